"""An estimate of how long a step takes at full lengths: arithmetic and memory traffic over rates that were measured."""

import math
from dataclasses import dataclass, replace

from hacrl.agents.loading import load_model_config
from hacrl.config import AgentConfig, RunConfig


@dataclass(frozen=True)
class Shape:
    """What the cost of a model depends on."""

    parameters: int
    layers: int
    width: int
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
        return cls(parameters, text.num_hidden_layers, width, heads, kv_heads, head_dim, text.vocab_size)

    def cache_bytes(self, size: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def operations(self, context: float) -> float:
        """Operations of a forward pass for one token that attends to `context` others."""
        return 2.0 * self.parameters + 4.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True)
class Device:
    """Rates, and what is reached of them: from the runs in docs/speed.md."""

    name: str
    operations: float
    """A second, in large matrix products."""
    bytes: float
    """A second."""
    sampling: float
    """Share of the floor, the longer of arithmetic and traffic, that a token step reaches."""
    learning: float
    """Share of the arithmetic's rate that forward and backward passes reach."""
    layer: float = 0.0
    """Seconds of a layer in a token step, whatever it computes: starting kernels."""
    token: float = 0.0
    """Seconds of a token in a layer besides the products, sampled or learned from: what rules in tiny models."""

    def times(self, count: int) -> "Device":
        """`count` such devices working together on all rows."""
        return replace(self, operations=self.operations * count, bytes=self.bytes * count, token=self.token / count)


H200 = Device("H200", 790e12, 4.3e12, sampling=0.23, learning=0.28, layer=20.5e-6)
H200_FLOAT32 = replace(H200, operations=67e12)
"""NVIDIA's figure for float32: not measured."""
CORE = Device("CPU core", 130e9, 10e9, sampling=0.24, learning=0.57, token=16e-6)


def sampling_seconds(config: RunConfig, agent: AgentConfig, shape: Shape, device: Device) -> float:
    """All completions as long as allowed, decoded in batches; of several processes each takes its share of them."""
    size = 2 if agent.dtype == "bfloat16" else 4
    prompts, length = config.prompts_per_step / agent.fsdp, agent.max_completion_length
    rows = min(float(agent.sampling_batch_size), prompts * agent.num_generations)
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
    """All rollouts as long as allowed, none with A = 0, all foreign ones kept by the clip; scoring others' included."""
    used = config.rollouts_per_prompt(agent)
    own = min(agent.num_generations, used)
    gradient = 3 + bool(agent.gradient_checkpointing)  # in forward passes, which a backward pass is two of
    reference = 0.0
    if config.algorithm.beta:
        reference = agent.num_iterations
    elif agent.log_kl:  # logged in the first update alone
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
    return passed / agent.fsdp * (operations / device.operations / device.learning + shape.layers * device.token / 3)
