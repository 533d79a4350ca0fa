"""Compares what a run needs with the memory there is, and finds the smallest change that makes it fit."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from hacrl.config import AgentConfig, RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.decoder.policy import SHORT
from hacrl.errors import UserError
from hacrl.rollouts.vllm import SHARE
from hacrl.training.plan import AgentPlan, Shapes, is_on_gpu, moves_when_idle, plan

GPUS = {"h200": 139.8, "h100": 79.1, "a100-80": 79.2, "l40s": 44.4, "4090": 23.5}
"""Memory of GPUs in GiB, as CUDA reports it."""
USABLE = 0.95
"""Share of a memory that a run may fill: the rest is for CUDA, the process and gaps between tensors."""
COMPUTER = "this computer"
GPU_COUNTS = (2, 4, 8)
"""Numbers of GPUs that a suggestion may ask for."""
MOST_CHANGES = 3
"""How many settings a suggestion changes at most."""


@dataclass(frozen=True)
class Need:
    """What some agents need of one memory, in GiB."""

    agents: list[str]
    place: str
    planned: float
    least: float
    """GiB with the smallest passes and batches, which the agent falls back to when memory is short."""
    there: float | None
    """The size of the memory; None if it is not known."""

    @property
    def fits(self) -> bool | None:
        return None if self.there is None else self.least <= USABLE * self.there

    @property
    def verdict(self) -> str:
        if self.there is None:
            return "not known"
        if not self.fits:
            return "does not fit"
        return "fits" if self.planned <= USABLE * self.there else "fits, with smaller passes"


class Memories:
    """The memories that a run's plan is compared with."""

    def __init__(self, gpu: str | None = None) -> None:
        """`gpu` is one of `GPUS`; None: what this computer has."""
        self.gpu = gpu
        self._shapes = Shapes()

    def plan(self, config: RunConfig) -> tuple[RunConfig, list[AgentPlan]]:
        """The config as it runs on that machine, and its plan."""
        config = config.model_copy(update={"agents": [self._there(agent) for agent in config.agents]})
        return config, plan(config, self._shapes)

    def needs(self, config: RunConfig) -> list[Need]:
        """What each agent needs alone, and what agents that share a memory need together."""
        config, plans = self.plan(config)
        rows = list(zip(config.agents, plans, strict=True))
        places = {agent.id: _places(config, agent) for agent in config.agents}
        found = [self._need(config, [row], places[row[0].id][0]) for row in rows]
        for place in dict.fromkeys(place for own in places.values() for place in own):
            sharing = [row for row in rows if place in places[row[0].id]]
            if len(sharing) > 1:
                found.append(self._need(config, sharing, place))
        return found

    def _need(self, config: RunConfig, rows: Sequence[tuple[AgentConfig, AgentPlan]], place: str) -> Need:
        agents, there = [agent.id for agent, _ in rows], self.size(place)
        if place == COMPUTER:  # side by side, each with all of its processes
            total = sum(agent.fsdp * sum(row.memory.values()) for agent, row in rows)
            return Need(agents, place, total, total, there)
        if config.execution == "ray" and there is not None:
            there *= min(rows[0][0].resources.num_gpus or 1, 1)
        # In turns: each keeps weights and optimizer, and its cache while there is room; one samples or learns.
        idle = sum(_idle(config, agent, row) for agent, row in rows)
        learning = [_learning(config, agent, row) for agent, row in rows]
        passes = [row.memory["activations"] + row.memory["logits"] for _, row in rows]
        fewest = [row.least_cache for _, row in rows]
        # Sampling takes more memory only while there is some.
        room = math.inf if there is None else max(USABLE * there - max(idle, SHORT * there), *fewest)
        caches = [min(row.memory["cache"], room) for _, row in rows]
        planned = idle + sum(caches) + max(map(sum, zip(learning, passes, strict=True)))
        if there is not None:
            turns = (max(cache, own + made) for cache, own, made in zip(caches, learning, passes, strict=True))
            planned = min(planned, max(idle, SHORT * there) + max(turns))
        least = [own + row.least_pass for own, (_, row) in zip(learning, rows, strict=True)]
        vllm = sum(_of_vllm(agent) for agent, _ in rows) * (there or 0)
        return Need(agents, place, vllm + planned, vllm + idle + max(*fewest, *least), there)

    def size(self, place: str) -> float | None:
        """GiB of a memory."""
        if place == COMPUTER:
            return computer_gib()
        if self.gpu is not None:
            return GPUS[self.gpu]
        index = int(place.partition("cuda:")[2] or 0)
        if index >= torch.cuda.device_count():
            return None
        return float(torch.cuda.get_device_properties(index).total_memory) / 2**30

    def name(self, place: str) -> str:
        """The name of a memory, with the kind of its GPU."""
        index = place.partition("cuda:")[2]
        if self.gpu is None and index and int(index) < torch.cuda.device_count():
            return f"{place}, {torch.cuda.get_device_name(int(index))}"
        return place if place == COMPUTER or self.gpu is None else f"{place}, {self.gpu}"

    def remarks(self, needs: Sequence[Need]) -> list[str]:
        """What a person should know about the comparison."""
        choice = f"--gpu {'|'.join(GPUS)}"
        if any(need.there is None for need in needs):
            return [f"This computer does not have these GPUs. Name theirs to compare with their memory: {choice}."]
        if any(need.place == COMPUTER for need in needs) and not torch.cuda.is_available():
            return [f"This computer has no GPU: agents are compared with its own memory. For another one: {choice}."]
        return []

    def smallest_change(self, config: RunConfig) -> list[str] | None:
        """The fewest overrides that make a run fit. Those that change no result come first.

        Several GPUs for each agent (fsdp) come last, because they may not be there. Empty if the run fits; None if
        `MOST_CHANGES` settings are not enough.
        """
        tight = self._tight(config)
        if not tight:
            return []
        *options, fsdp = self._options(config, tight)
        options = [choices for choices in options if choices]
        sets = [chosen for count in range(1, MOST_CHANGES + 1) for chosen in combinations(options, count)]
        if fsdp:
            sets += [(*chosen, fsdp) for chosen in [(), *sets] if len(chosen) < MOST_CHANGES]
        for chosen in sets:
            changes = [choices[-1] for choices in chosen]
            if not self._fits(config, changes):
                continue
            for place, choices in enumerate(chosen):  # no stronger than needed
                rest = changes[:place], changes[place + 1 :]
                changes[place] = next(own for own in choices if self._fits(config, [*rest[0], own, *rest[1]]))
            return [override for change in changes for override in change]
        return None

    def _tight(self, config: RunConfig) -> list[AgentConfig]:
        """The agents whose memory is too small."""
        names = {name for need in self.needs(config) if need.fits is False for name in need.agents}
        return [agent for agent in config.agents if agent.id in names]

    def _fits(self, config: RunConfig, changes: Sequence[list[str]]) -> bool:
        overrides = [override for change in changes for override in change]
        try:
            return not self._tight(RunConfig.from_dict(apply_overrides(config.to_dict(), overrides)))
        except UserError:  # settings that do not go together, or a package that is missing
            return False

    def _options(self, config: RunConfig, tight: Sequence[AgentConfig]) -> Iterator[list[list[str]]]:
        """Overrides that need less memory: for each setting a list, from the smallest change to the largest."""
        own = {key for agent in config.to_dict()["agents"] for key in agent}

        def each(name: str, value: object, agents: Sequence[AgentConfig] = tight) -> list[str]:
            if len(agents) == len(config.agents) and name.partition(".")[0] not in own:
                return [f"{name}={value}"]
            return [f"agents.{agent.id}.{name}={value}" for agent in agents]

        on_gpu = [agent for agent in tight if is_on_gpu(config, self._there(agent))]
        rows = min(max(agent.rows_at_once(agent in on_gpu) for agent in tight), config.rollouts_per_step)
        yield [each("sampling_batch_size", size) for size in _halves(rows)]
        if any(agent.fsdp > 1 for agent in tight) or not on_gpu:  # elsewhere passes are halved by themselves
            rollouts = config.prompts_per_step * max(config.rollouts_per_prompt(agent) for agent in tight)
            yield [each("micro_batch_size", size) for size in _halves(rollouts)]
        if not config.algorithm.beta and any(agent.log_kl is not False for agent in tight):
            yield [each("log_kl", "false")]
        gpus = torch.cuda.device_count() if self.gpu is None else max(GPU_COUNTS)
        if config.execution == "local" and 1 < len(on_gpu) <= gpus:
            places = [(agent, f"cuda:{index}") for index, agent in enumerate(on_gpu)]
            yield [[f"agents.{a.id}.device={place}" for a, place in places if (a.device, place) != ("auto", "cuda:0")]]
        yield [each("dtype", "bfloat16", own) for own in [[a for a in tight if a.dtype == "float32"]] if own]
        moving = [agent for agent in on_gpu if not agent.optimizer_offload]
        yield [each("offload_idle", "true", moving)] * (len(moving) > 1 and config.execution == "local")
        yield [each("optimizer_offload", "true", on_gpu)] * bool(on_gpu)
        yield [each("lora.r", 16, own) for own in [[a for a in tight if a.lora is None]] if own]
        yield [each("fsdp", size, on_gpu) for size in GPU_COUNTS if on_gpu and on_gpu[0].fsdp < size <= gpus]

    def _there(self, agent: AgentConfig) -> AgentConfig:
        """The agent's config on a machine with the GPU that was named."""
        moves = self.gpu is not None and agent.device == "auto"
        return agent.model_copy(update={"device": "cuda"}) if moves else agent


def _places(config: RunConfig, agent: AgentConfig) -> list[str]:
    """Names of the memories that hold an agent."""
    if not is_on_gpu(config, agent):
        return [COMPUTER]
    if config.execution == "ray":
        return [f"GPU of {agent.id}"]
    first = int(agent.device.partition(":")[2] or 0)
    return [f"cuda:{index}" for index in range(first, first + agent.fsdp)]


def _idle(config: RunConfig, agent: AgentConfig, row: AgentPlan) -> float:
    """GiB that the agent keeps on its GPU while another one works."""
    return row.memory["weights"] + (0 if moves_when_idle(config, agent) else row.memory["optimizer"])


def _learning(config: RunConfig, agent: AgentConfig, row: AgentPlan) -> float:
    """GiB that the agent needs only while it learns, without its passes."""
    own = row.memory["gradients"] + row.memory["parts"]
    return own + (row.memory["optimizer"] if moves_when_idle(config, agent) else 0)


def _of_vllm(agent: AgentConfig) -> float:
    """The share of the agent's GPU that vLLM takes; vLLM has a GPU of its own where `resources.sampler` is set."""
    if agent.engine != "vllm" or agent.resources.sampler is not None:
        return 0.0
    return float(agent.vllm.get("gpu_memory_utilization", SHARE))


def _halves(size: int) -> list[int]:
    """Powers of two below a size, from the largest."""
    return [2**n for n in reversed(range(size.bit_length())) if 2**n < size]


def computer_gib() -> float:
    """Memory of this computer, or of the container that this process is in."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text("ascii").strip()).isdigit():
        sizes.append(int(text))
    return min(sizes) / 2**30
