"""What a run will do and need, worked out from its config without loading a weight."""

from dataclasses import dataclass

from hacrl.agents.loading import count_parameters, load_model_config, resolve_device
from hacrl.agents.policy import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS
from hacrl.config import AgentConfig, RunConfig
from hacrl.decoder.head import CHUNK_ELEMENTS

GIB = 2**30


@dataclass(frozen=True)
class AgentPlan:
    id: str
    parameters: int
    adapters: int
    """Parameters of the adapters, which are all that is trained where there are any."""
    rollouts_sampled: int
    """In one step."""
    rollouts_used: int
    updates: int
    memory: dict[str, float]
    """GiB by purpose, of each process: an estimate."""
    host_memory: float
    """GiB that `optimizer_offload` needs in the computer's memory."""


def plan(config: RunConfig) -> list[AgentPlan]:
    plans, bases = [], set()
    for agent in config.agents:
        base = (agent.model, agent.dtype, agent.device) if agent.lora is not None else None
        plans.append(plan_agent(config, agent, shares_base=base in bases and config.execution == "local"))
        bases |= {base} - {None}
    return plans


def plan_agent(config: RunConfig, agent: AgentConfig, shares_base: bool) -> AgentPlan:
    """`shares_base`: another agent with adapters has the model already."""
    parameters, trained = count_parameters(agent)
    optimizer = optimizer_bytes(config, agent, trained)
    return AgentPlan(
        id=agent.id,
        parameters=parameters,
        adapters=trained if agent.lora is not None else 0,
        rollouts_sampled=config.prompts_per_step * agent.num_generations,
        rollouts_used=config.prompts_per_step * config.rollouts_per_prompt(agent) * agent.num_iterations,
        updates=config.updates_per_step(agent) * agent.num_iterations,
        memory={
            "weights": weight_bytes(config, agent, parameters, trained, shares_base) / GIB,
            "optimizer": (0 if agent.optimizer_offload else optimizer) / GIB,
            **working_memory(config, agent),
        },
        host_memory=(optimizer if agent.optimizer_offload else 0) / GIB,
    )


def weight_bytes(config: RunConfig, agent: AgentConfig, parameters: int, trained: int, shares_base: bool) -> int:
    """What the model computes with, the gradients it leaves there, and the starting policy: for adapters, the model."""
    size = 2 if agent.dtype == "bfloat16" else 4
    keeps_reference = bool(config.algorithm.beta) or agent.log_kl
    if agent.fsdp > 1:  # parts of both in float32, and the whole model while it samples
        return 4 * parameters * (1 + keeps_reference) // agent.fsdp + size * parameters
    gradients = trained if has_master_weights(agent) else 0
    if agent.lora is not None:
        return size * (gradients + trained + (0 if shares_base else parameters))
    return size * (gradients + parameters * (1 + keeps_reference))


def optimizer_bytes(config: RunConfig, agent: AgentConfig, trained: int) -> int:
    """Float32 gradients, Adam's two moments, and float32 weights where the model computes with others."""
    splits_gradient = config.algorithm.shares_rollouts and len(config.agents) > 1  # the own part is kept
    moments = 2 * (1 if agent.optimizer == "adamw_8bit" else 4)
    return trained * (4 * (1 + splits_gradient + has_master_weights(agent)) + moments) // agent.fsdp


def has_master_weights(agent: AgentConfig) -> bool:
    return agent.optimizer_offload or (agent.dtype == "bfloat16" and agent.fsdp == 1)


def working_memory(config: RunConfig, agent: AgentConfig) -> dict[str, float]:
    """The key-value cache, and one micro-batch of activations."""
    text = load_model_config(agent).get_text_config()
    size = 2 if agent.dtype == "bfloat16" else 4
    layers, width, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    # Not every architecture has grouped heads or a head size of its own.
    settings = text.to_dict()
    kv_heads = settings.get("num_key_value_heads") or heads
    head_dim = settings.get("head_dim") or width // heads
    length = agent.max_prompt_length + agent.max_completion_length
    rollouts = config.prompts_per_step * config.rollouts_per_prompt(agent)
    tokens = min(agent.micro_batch_size or rollouts, rollouts) * length
    if agent.micro_batch_size is None:  # at most so many in one pass, and fewer where memory is short
        most = CPU_BATCH_TOKENS if resolve_device(agent.device).type == "cpu" else CUDA_BATCH_TOKENS
        tokens = min(tokens, max(most, length))
    decoded = min(agent.sampling_batch_size, config.prompts_per_step * agent.num_generations)

    return {
        "cache": 2 * layers * kv_heads * head_dim * decoded * length * size / GIB,
        # About 34 bytes a layer, position and channel at two bytes a number, without attention matrices.
        "activations": 17 * size * layers * width * tokens / GIB,
        # A slice of them at a time, its probabilities and their gradient.
        "logits": 3 * 4 * min(CHUNK_ELEMENTS, tokens * text.vocab_size) / GIB,
    }
