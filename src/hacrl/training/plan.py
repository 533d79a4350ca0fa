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
    rollouts_sampled: int
    """In one step."""
    rollouts_used: int
    updates: int
    memory: dict[str, float]
    """GiB by purpose: an estimate."""


def plan(config: RunConfig) -> list[AgentPlan]:
    return [plan_agent(config, agent) for agent in config.agents]


def plan_agent(config: RunConfig, agent: AgentConfig) -> AgentPlan:
    parameters = count_parameters(agent)
    return AgentPlan(
        id=agent.id,
        parameters=parameters,
        rollouts_sampled=config.prompts_per_step * agent.num_generations,
        rollouts_used=config.prompts_per_step * config.rollouts_per_prompt(agent) * agent.num_iterations,
        updates=config.updates_per_step(agent) * agent.num_iterations,
        memory=estimate_memory(config, agent, parameters),
    )


def estimate_memory(config: RunConfig, agent: AgentConfig, parameters: int) -> dict[str, float]:
    """Weights, gradients and Adam's two moments, the key-value cache, and one micro-batch of activations."""
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

    keeps_reference = bool(config.algorithm.beta) or agent.log_kl
    splits_gradient = config.algorithm.shares_rollouts and len(config.agents) > 1
    copies = 1 + keeps_reference  # weights
    copies += 1 + splits_gradient  # gradients, and the own part of them
    copies += 2  # Adam's moments
    model = copies * parameters * 4 + (2 * 2 * parameters if agent.dtype == "bfloat16" else 0)
    return {
        "model": model / GIB,
        "cache": 2 * layers * kv_heads * head_dim * decoded * length * size / GIB,
        # About 34 bytes a layer, position and channel at two bytes a number, without attention matrices.
        "activations": 17 * size * layers * width * tokens / GIB,
        # A slice of them at a time, its probabilities and their gradient.
        "logits": 3 * 4 * min(CHUNK_ELEMENTS, tokens * text.vocab_size) / GIB,
    }
