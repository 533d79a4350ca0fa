"""What a run will do and need, worked out from its config without loading a weight."""

from dataclasses import dataclass

import torch

from hacrl.agents.loading import count_parameters
from hacrl.config import AgentConfig, RunConfig
from hacrl.decoder.head import CHUNK_ELEMENTS
from hacrl.decoder.policy import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS
from hacrl.execution.local import THREADS
from hacrl.tasks import build_task
from hacrl.tasks.dataset import is_on_hub
from hacrl.tasks.problem import Problem
from hacrl.training.speed import CORE, H200, H200_FLOAT32, Device, Shape, learning_seconds, sampling_seconds

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
    device: str
    """What the seconds are for."""
    sampling: float
    learning: float
    """Seconds, at full lengths: an estimate."""


def plan(config: RunConfig) -> list[AgentPlan]:
    plans, bases = [], set()
    for agent in config.agents:
        base = (agent.model, agent.dtype, agent.device) if agent.lora is not None else None
        plans.append(plan_agent(config, agent, shares_base=base in bases and config.execution == "local"))
        bases |= {base} - {None}
    return plans


def first_problem(config: RunConfig) -> tuple[Problem | None, list[str]]:
    """What agents will be asked first, None where it would have to be downloaded; and remarks for the user.

    UserError if the run could not begin with this task.
    """
    sources = [config.task, *config.task.mixture]
    remote = [data for source in sources for data in (source.train, source.eval) if data and is_on_hub(data)]
    if remote:
        return None, [f"{', '.join(dict.fromkeys(remote))}: read when the run starts."]
    task, remarks = build_task(config.task, config.seed)
    with task.verifier:
        return task.train(0, config.prompts_per_step)[0], remarks


def plan_agent(config: RunConfig, agent: AgentConfig, shares_base: bool) -> AgentPlan:
    """`shares_base`: another agent with adapters has the model already."""
    parameters, trained = count_parameters(agent)
    shape = Shape.of(agent, parameters)
    device, cores = device_of(config, agent)
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
            **working_memory(config, agent, shape),
        },
        host_memory=(optimizer if agent.optimizer_offload else 0) / GIB,
        device=f"{cores * agent.fsdp} x {device.name}",
        sampling=sampling_seconds(config, agent, shape, device.times(cores)),
        learning=learning_seconds(config, agent, shape, device.times(cores)),
    )


def step_seconds(config: RunConfig, plans: list[AgentPlan]) -> float:
    """Seconds of a step as the executor runs it: agents that run at the same time share a CPU's cores."""
    at_once = len(plans) if config.execution == "ray" else side_by_side(config)
    phases = ([row.sampling for row in plans], [row.learning for row in plans])
    return sum(max(max(seconds), sum(seconds) / at_once) for seconds in phases)


def side_by_side(config: RunConfig) -> int:
    """Agents that one process runs at the same time."""
    in_turns = any(is_on_gpu(config, agent) and agent.fsdp == 1 for agent in config.agents)
    return 1 if in_turns else min(len(config.agents), THREADS)


def is_on_gpu(config: RunConfig, agent: AgentConfig) -> bool:
    """Whether it will be; a plan may be for another machine."""
    if config.execution == "ray" and agent.resources.num_gpus == 0:
        return False
    return agent.device.startswith("cuda") or (agent.device == "auto" and torch.cuda.is_available())


def device_of(config: RunConfig, agent: AgentConfig) -> tuple[Device, int]:
    """What one process of an agent computes with, and how many of them."""
    if is_on_gpu(config, agent):
        return (H200 if agent.dtype == "bfloat16" else H200_FLOAT32), 1
    if config.execution == "ray":
        return CORE, agent.resources.num_cpus
    return CORE, max(THREADS // side_by_side(config) // agent.fsdp, 1)


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


def working_memory(config: RunConfig, agent: AgentConfig, shape: Shape) -> dict[str, float]:
    """The key-value cache, and one micro-batch of activations."""
    size = 2 if agent.dtype == "bfloat16" else 4
    length = agent.max_prompt_length + agent.max_completion_length
    rollouts = config.prompts_per_step * config.rollouts_per_prompt(agent)
    tokens = min(agent.micro_batch_size or rollouts, rollouts) * length
    if agent.micro_batch_size is None:  # at most so many in one pass, and fewer where memory is short
        tokens = min(tokens, max(CUDA_BATCH_TOKENS if is_on_gpu(config, agent) else CPU_BATCH_TOKENS, length))
    # Of several processes, each takes its share of a pass and of the prompts.
    tokens = max(tokens // agent.fsdp, length)
    decoded = min(agent.sampling_batch_size, config.prompts_per_step * agent.num_generations // agent.fsdp)
    # A prompt is there once for all of its completions.
    cached = decoded * (agent.max_completion_length + agent.max_prompt_length / agent.num_generations)

    return {
        "cache": shape.cache_bytes(size) * cached / GIB,
        # About 34 bytes a layer, position and channel at two bytes a number, without attention matrices.
        "activations": 17 * size * shape.layers * shape.width * tokens / GIB,
        # A slice of them at a time, its probabilities and their gradient.
        "logits": 3 * 4 * min(CHUNK_ELEMENTS, tokens * shape.vocabulary) / GIB,
    }
