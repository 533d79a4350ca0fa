"""Estimates what a run will do and need, from its config alone and without loading weights: `--dry-run`.

Seconds are operations and memory traffic at full lengths, divided by rates that were measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hacrl.agents.loading import count_parameters, load_model_config
from hacrl.config import AgentConfig, RunConfig
from hacrl.config.agent import logs_kl
from hacrl.decoder.head import CHUNK_ELEMENTS, CUDA_ROWS
from hacrl.decoder.policy import CAPTURED, CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, lean_layer
from hacrl.execution.local import THREADS
from hacrl.learners.parts import EXACT
from hacrl.tasks import build_task
from hacrl.tasks.dataset import is_on_hub
from hacrl.tasks.problem import Problem
from hacrl.training.asking import stored_remarks

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its cost depends on."""

    parameters: int
    layers: int
    width: int
    inner: int
    """Width inside of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, agent: AgentConfig, parameters: int) -> "Shape":
        text = load_model_config(agent).get_text_config()
        width, heads = text.hidden_size, text.num_attention_heads
        settings = text.to_dict()  # not every architecture has grouped heads or a head size of its own
        kv_heads = settings.get("num_key_value_heads") or heads
        head_dim = settings.get("head_dim") or width // heads
        inner = settings.get("intermediate_size") or 4 * width
        return cls(parameters, text.num_hidden_layers, width, inner, heads, kv_heads, head_dim, text.vocab_size)

    def activations(self, checkpointed: bool) -> int:
        """How many numbers one token keeps until the backward pass, and in it."""
        layer = lean_layer(self.width, self.inner, (self.heads + self.kv_heads) * self.head_dim)
        return self.layers * self.width + 2 * layer if checkpointed else (self.layers + 1) * layer

    def cache_bytes(self, size: int) -> int:
        """Bytes of the keys and values of one token, with `size` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def operations(self, context: float) -> float:
        """Operations of a forward pass for one token that attends to `context` others."""
        return 2.0 * self.parameters + 4.0 * self.layers * self.heads * self.head_dim * context


class Shapes:
    """Shapes of models, and how many parameters are trained: each is read once for several plans."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Shape, int]] = {}

    def of(self, agent: AgentConfig) -> tuple[Shape, int]:
        key = agent.model_dump_json(include={"model", "trust_remote_code", "lora"})
        if key not in self._known:
            parameters, trained = count_parameters(agent)
            self._known[key] = Shape.of(agent, parameters), trained
        return self._known[key]


@dataclass(frozen=True)
class Device:
    """How fast a device is, and which share of that speed a model reaches."""

    name: str
    operations: float
    """Operations a second in large matrix products."""
    bytes: float
    """Bytes a second from its memory."""
    sampling: float
    """Share of the possible speed, limited by arithmetic or by memory, that decoding a token reaches."""
    learning: float
    """Share of the arithmetic's speed that the products of forward and backward passes reach."""
    layer: float = 0.0
    """Fixed seconds that a layer takes to decode a token: the time to start kernels."""
    token: float = 0.0
    """Seconds that a token takes in a layer besides the matrix products; most of the time in tiny models."""
    channel: float = 0.0
    """Seconds that a token's gradient takes for each layer and channel besides the products: norms, gates, copies."""

    def times(self, count: int) -> "Device":
        """`count` such devices working together on all rows."""
        rates = self.operations * count, self.bytes * count
        token, channel = self.token / count, self.channel / count
        return replace(self, operations=rates[0], bytes=rates[1], token=token, channel=channel)


H200 = Device("H200", 790e12, 4.3e12, sampling=0.23, learning=0.77, layer=20.5e-6, channel=1.36e-10)
H200_FLOAT32 = replace(H200, operations=67e12)
"""NVIDIA's figure for float32: not measured."""
CORE = Device("CPU core", 130e9, 10e9, sampling=0.24, learning=0.57, token=16e-6)


@dataclass(frozen=True)
class AgentPlan:
    """What one agent does in a step, and an estimate of what it needs for that."""

    id: str
    parameters: int
    adapters: int
    """Number of parameters in adapters. If there are any, only these are trained."""
    rollouts_sampled: int
    rollouts_used: int
    updates: int
    memory: dict[str, float]
    """GiB by purpose, in each process of the agent."""
    least_pass: float
    """GiB of activations and logits in the smallest passes that learning falls back to when memory is short."""
    least_cache: float
    """GiB of the cache of a single completion, to which sampling falls back when memory is short."""
    host_memory: float
    """GiB that `optimizer_offload` or `offload_idle` needs in the computer's memory."""
    device: str
    """The devices that the seconds are estimated for."""
    sampling: float
    """Seconds of sampling in a step, if all completions are as long as allowed."""
    learning: float
    """Seconds of learning in a step, if all completions are as long as allowed."""


def plan(config: RunConfig, shapes: Shapes | None = None) -> list[AgentPlan]:
    """The plan of each agent."""
    plans, bases, shapes = [], set(), shapes or Shapes()
    for agent in config.agents:
        base = (agent.model, agent.dtype, agent.device) if agent.lora is not None else None
        shares_base = base in bases and config.execution == "local"
        plans.append(plan_agent(config, agent, shares_base, *shapes.of(agent)))
        bases |= {base} - {None}
    return plans


def first_problem(config: RunConfig) -> tuple[Problem | None, list[str]]:
    """Return the first problem of the run, or None if it must be downloaded; and remarks for the user.

    UserError if the run could not begin with this task and these stored rollouts.
    """
    sources = [config.task, *config.task.mixture]
    remote = [data for source in sources for data in (source.train, source.eval) if data and is_on_hub(data)]
    if remote:
        return None, [f"{', '.join(dict.fromkeys(remote))}: read when the run starts."]
    task, remarks = build_task(config.task, config.seed)
    with task.verifier:
        first = task.train(0, config.prompts_per_step)
    return first[0], [*remarks, *stored_remarks(config, [*first, *task.listed])]


def plan_agent(config: RunConfig, agent: AgentConfig, shares_base: bool, shape: Shape, trained: int) -> AgentPlan:
    """Make the plan of one agent; `shares_base`: another agent with adapters has loaded the model already."""
    device, cores = device_of(config, agent)
    optimizer, longest = optimizer_bytes(agent, trained), agent.max_prompt_length + agent.max_completion_length
    return AgentPlan(
        id=agent.id,
        parameters=shape.parameters,
        adapters=trained if agent.lora is not None else 0,
        rollouts_sampled=config.prompts_per_step * agent.num_generations,
        rollouts_used=config.prompts_per_step * config.rollouts_per_prompt(agent) * agent.num_iterations,
        updates=config.updates_per_step(agent) * agent.num_iterations,
        memory={
            "weights": weight_bytes(config, agent, shape.parameters, trained, shares_base) / GIB,
            "optimizer": (0 if agent.optimizer_offload else optimizer) / GIB,
            "gradients": gradient_bytes(config, agent, shape.parameters, trained) / GIB,
            "parts": part_bytes(config, agent, trained) / GIB,
            **working_memory(config, agent, shape),
        },
        least_pass=least_pass(config, agent, shape),
        least_cache=shape.cache_bytes(number_bytes(agent)) * longest / GIB,
        host_memory=host_bytes(config, agent, trained) / GIB,
        device=f"{cores * agent.fsdp} x {device.name}",
        sampling=sampling_seconds(config, agent, shape, device.times(cores)),
        learning=learning_seconds(config, agent, shape, device.times(cores)),
    )


def step_seconds(config: RunConfig, plans: Sequence[AgentPlan]) -> float:
    """Seconds of a step as the executor runs it: agents that run at the same time share a CPU's cores."""
    at_once = len(plans) if config.execution == "ray" else side_by_side(config)
    phases = ([row.sampling for row in plans], [row.learning for row in plans])
    return sum(max(max(seconds), sum(seconds) / at_once) for seconds in phases)


def side_by_side(config: RunConfig) -> int:
    """How many agents one process runs at the same time."""
    in_turns = any(is_on_gpu(config, agent) and agent.fsdp == 1 for agent in config.agents)
    return 1 if in_turns else min(len(config.agents), THREADS)


def is_on_gpu(config: RunConfig, agent: AgentConfig) -> bool:
    """Whether the agent will be on a GPU. This machine need not have one, because a plan may be for another."""
    if config.execution == "ray" and agent.resources.num_gpus == 0:
        return False
    return agent.device.startswith("cuda") or (agent.device == "auto" and torch.cuda.is_available())


def device_of(config: RunConfig, agent: AgentConfig) -> tuple[Device, int]:
    """Return the device of one process of an agent, and how many it has: one GPU, or several cores."""
    if is_on_gpu(config, agent):
        return (H200 if agent.dtype == "bfloat16" else H200_FLOAT32), 1
    if config.execution == "ray":
        return CORE, agent.resources.num_cpus
    return CORE, max(THREADS // side_by_side(config) // agent.fsdp, 1)


def number_bytes(agent: AgentConfig) -> int:
    """Size in bytes of the numbers that the model computes with."""
    return 2 if agent.dtype == "bfloat16" else 4


def weight_bytes(config: RunConfig, agent: AgentConfig, parameters: int, trained: int, shares_base: bool) -> int:
    """Bytes of the model's weights and of the starting policy, which needs no copy where there are adapters."""
    size = number_bytes(agent)
    keeps_reference = bool(config.algorithm.beta) or logs_kl(agent, parameters)
    if agent.fsdp > 1:  # parts of both in float32, and the whole model while it samples
        return 4 * parameters * (1 + keeps_reference) // agent.fsdp + size * parameters
    if agent.lora is not None:
        return size * (trained + (0 if shares_base else parameters))
    return size * parameters * (1 + keeps_reference)


def optimizer_bytes(agent: AgentConfig, trained: int) -> int:
    """Bytes of Adam's two moments, and of float32 weights if the model's are separate."""
    moments = 2 * (1 if agent.optimizer == "adamw_8bit" else 4)
    return trained * (4 * has_master_weights(agent) + moments) // agent.fsdp


def gradient_bytes(config: RunConfig, agent: AgentConfig, parameters: int, trained: int) -> int:
    """Bytes of gradients while the agent learns. Those of a large model are added up in one place; a smaller one on a
    GPU has gradients in its own dtype besides, which CUDA graphs write."""
    low = agent.gradient_dtype == "bfloat16"
    total = 2 if low else 0 if agent.optimizer_offload else 4
    if has_master_weights(agent) and not low and is_on_gpu(config, agent) and parameters <= CAPTURED:
        total += number_bytes(agent)
    return trained * total // agent.fsdp


def part_bytes(config: RunConfig, agent: AgentConfig, trained: int) -> int:
    """Bytes of a copy of the own part of a gradient and of the foreign part, where both are told apart by a copy."""
    shares = config.algorithm.shares_rollouts and len(config.names) > 1
    return 8 * trained // agent.fsdp if shares and trained <= EXACT and not agent.optimizer_offload else 0


def host_bytes(config: RunConfig, agent: AgentConfig, trained: int) -> int:
    """Bytes that the agent's training takes in the computer's memory, if its model is on a GPU."""
    if agent.optimizer_offload:
        return optimizer_bytes(agent, trained) + 4 * trained
    return optimizer_bytes(agent, trained) if moves_when_idle(config, agent) else 0


def moves_when_idle(config: RunConfig, agent: AgentConfig) -> bool:
    """Whether the optimizer's states are on the GPU only while the agent learns."""
    return agent.offload_idle and is_on_gpu(config, agent)


def has_master_weights(agent: AgentConfig) -> bool:
    return agent.optimizer_offload or (agent.dtype == "bfloat16" and agent.fsdp == 1)


def working_memory(config: RunConfig, agent: AgentConfig, shape: Shape) -> dict[str, float]:
    """GiB of the key-value cache, and of the activations and logits of one pass."""
    size = number_bytes(agent)
    length = agent.max_prompt_length + agent.max_completion_length
    rollouts = config.prompts_per_step * config.rollouts_per_prompt(agent)
    tokens = min(agent.micro_batch_size or rollouts, rollouts) * length
    if agent.micro_batch_size is None:  # the most tokens in one pass; fewer if memory is short
        tokens = min(tokens, max(CUDA_BATCH_TOKENS if is_on_gpu(config, agent) else CPU_BATCH_TOKENS, length))
    # Each process of an agent takes its share of a pass and of the prompts.
    tokens = max(tokens // agent.fsdp, length)
    rows = agent.rows_at_once(is_on_gpu(config, agent))
    decoded = min(rows, config.prompts_per_step * agent.num_generations // agent.fsdp)
    # All completions of a prompt share its cache.
    cached = decoded * (agent.max_completion_length + agent.max_prompt_length / agent.num_generations)

    cache = shape.cache_bytes(size) * cached / GIB
    return {"cache": cache, **pass_memory(config, agent, shape, tokens, bool(agent.gradient_checkpointing))}


def pass_memory(
    config: RunConfig, agent: AgentConfig, shape: Shape, tokens: int, checkpointed: bool
) -> dict[str, float]:
    """GiB of the activations and logits of so many tokens, and of the gradient of the output layer."""
    chunk = max(CHUNK_ELEMENTS, CUDA_ROWS * shape.vocabulary if is_on_gpu(config, agent) else 0)
    size, head = number_bytes(agent), 0 if agent.lora else shape.vocabulary * shape.width
    # A float32 sum and the product to be added, then the sum in bfloat16; in float32 products add to the sum.
    head_gradient = head * (10 if size == 2 else 4)
    return {
        "activations": size * shape.activations(checkpointed) * tokens / GIB,
        # One slice at a time: logits, probabilities and their gradient.
        "logits": (3 * 4 * min(chunk, tokens * shape.vocabulary) + head_gradient) / GIB,
    }


def least_pass(config: RunConfig, agent: AgentConfig, shape: Shape) -> float:
    """GiB of the smallest pass: one rollout, or with `fsdp`, which halves no passes, the first."""
    if agent.fsdp > 1:
        memory = working_memory(config, agent, shape)
        return memory["activations"] + memory["logits"]
    length = agent.max_prompt_length + agent.max_completion_length
    return sum(pass_memory(config, agent, shape, length, agent.gradient_checkpointing is not False).values())


def sampling_seconds(config: RunConfig, agent: AgentConfig, shape: Shape, device: Device) -> float:
    """Seconds to decode all completions, as long as allowed, in batches; each process takes its share of them."""
    size = number_bytes(agent)
    prompts, length = config.prompts_per_step / agent.fsdp, agent.max_completion_length
    rows = min(float(agent.rows_at_once(is_on_gpu(config, agent))), prompts * agent.num_generations)
    batches = math.ceil(prompts * agent.num_generations / rows)
    operations = rows * shape.operations(agent.max_prompt_length + length / 2)
    # A prompt's keys and values are read once for all of its completions.
    cached = rows * length / 2 + rows / agent.num_generations * agent.max_prompt_length
    traffic = shape.parameters * size + cached * shape.cache_bytes(size)
    floor = max(operations / device.operations, traffic / device.bytes)
    token_step = floor / device.sampling + shape.layers * (device.layer + rows * device.token)
    reading = prompts * agent.max_prompt_length * shape.operations(agent.max_prompt_length / 2)
    return batches * length * token_step + reading / device.operations / device.learning


def learning_seconds(config: RunConfig, agent: AgentConfig, shape: Shape, device: Device) -> float:
    """Seconds to learn from all rollouts and to score others', if all are as long as allowed, none has A = 0 and the
    clip keeps all foreign ones."""
    used = config.rollouts_per_prompt(agent)
    own = min(agent.num_generations, used)
    gradient = 3 + bool(agent.gradient_checkpointing)  # counted in forward passes; a backward pass is two
    reference = 0.0
    if config.algorithm.beta:
        reference = agent.num_iterations
    elif logs_kl(agent, shape.parameters):  # logged in the first update alone
        reference = 1 / config.updates_per_step(agent)
    own_passes = agent.num_iterations * gradient + agent.recomputes_logprobs + reference
    looks = agent.fast and not config.trace and not config.algorithm.keeps_all
    foreign_passes = agent.num_iterations * (gradient + looks)

    def tokens(rollouts: int) -> int:
        return config.prompts_per_step * (agent.max_prompt_length + rollouts * agent.max_completion_length)

    passed = own_passes * tokens(own) + (foreign_passes * tokens(used - own) if used > own else 0)
    if config.algorithm.scores_by_others and len(config.agents) > 1:
        passed += tokens(sum(other.num_generations for other in config.agents if other.id != agent.id))
    operations = shape.operations(agent.max_prompt_length + agent.max_completion_length / 2)
    besides = shape.layers * (device.token + shape.width * device.channel) / 3
    return passed / agent.fsdp * (operations / device.operations / device.learning + besides)
