"""Every agent in a process of its own, on one machine or on a cluster, by Ray."""

import logging
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hacrl import __version__
from hacrl.agents.agent import Agent
from hacrl.agents.learning import LearnResult, Lesson
from hacrl.algorithms import Algorithm
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError, warn
from hacrl.execution.executor import AgentLost, files_of
from hacrl.execution.memory import keep_freed_memory, peak_resident_gib
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem

try:
    import ray
    from ray import exceptions
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise UserError("execution: ray needs the package ray. Install it with `pip install 'hacrl[ray]'`.") from None

LOST = (
    exceptions.RayActorError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
    exceptions.WorkerCrashedError,
)
CHUNK = 64 * 2**20
"""Bytes of a checkpoint that travel at once."""


@dataclass
class Reply:
    """What comes back from an agent's process."""

    value: Any
    seconds: float
    peak_memory: float | None
    """GiB of GPU memory during the call."""
    resident: float
    """GiB, the most so far."""
    warnings: list[str]


class Kept(logging.Handler):
    """Keeps warnings until the next reply takes them along."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class AgentProcess:
    """The other side of `RayExecutor`: one agent. It does one thing at a time, in the order it was asked."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.warnings = Kept()
        logging.getLogger("hacrl").addHandler(self.warnings)
        self.files: tempfile.TemporaryDirectory[str] | None = None

    def place(self) -> tuple[str, str, int]:
        """Id and address of the node, and the process."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def open(
        self, version: str, config: AgentConfig, index: int, algorithm: Algorithm, seed: int, trace: bool
    ) -> Reply:
        """Load the model; the answer is whether it has a chat template."""
        if version != __version__:
            raise UserError(
                f"Agent {config.id}: hacrl is {__version__} on its node and {version} here. Install the same on all."
            )
        self.agent = Agent(config, index, algorithm, seed, trace=trace)
        return self._reply(lambda: self.agent.has_chat_template)

    def check_prompts(self, problems: Sequence[Problem]) -> Reply:
        return self._reply(lambda: self.agent.check_prompts(problems))

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Reply:
        return self._reply(lambda: self.agent.sample(problems, step, sampling_round))

    def sample_ahead(self, problems: Sequence[Problem], step: int) -> Reply:
        return self._reply(lambda: self.agent.sample_ahead(problems, step))

    def answer(self, problems: Sequence[Problem]) -> Reply:
        return self._reply(lambda: self.agent.answer(problems))

    def learn(self, lesson: Lesson, rows: list[tuple[int, int]], *parts: list[Rollout]) -> Reply:
        """`rows` says where each rollout of the lesson is: in which part, and at which place there."""
        lesson = replace(lesson, rollouts=[parts[part][place] for part, place in rows])
        return self._reply(lambda: self.agent.learn(lesson))

    def save(self, folder: str | None) -> Reply:
        """Into this folder; without one, into files that `read` reads: their names are the answer."""
        if folder is not None:
            return self._reply(lambda: self.agent.save(*files_of(Path(folder), self.agent.config.id)))
        self.files = tempfile.TemporaryDirectory(prefix="hacrl-")
        (self._root / "state").mkdir()

        def work() -> list[str]:
            self.agent.save(*files_of(self._root, self.agent.config.id))
            return [str(path.relative_to(self._root)) for path in sorted(self._root.rglob("*")) if path.is_file()]

        return self._reply(work)

    def read(self, name: str, offset: int) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def write(self, name: str, chunk: bytes) -> None:
        """Append to a file that `load` will look at."""
        if self.files is None:
            self.files = tempfile.TemporaryDirectory(prefix="hacrl-")
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(chunk)

    def load(self, folder: str | None) -> Reply:
        root = self._root if folder is None else Path(folder)
        return self._reply(lambda: self.agent.load(*files_of(root, self.agent.config.id)))

    def forget_files(self) -> None:
        if self.files is not None:
            self.files.cleanup()
            self.files = None

    @property
    def _root(self) -> Path:
        assert self.files is not None
        return Path(self.files.name)

    def _reply(self, work: Callable[[], Any]) -> Reply:
        on_gpu = self.agent.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.agent.device)
        start = time.perf_counter()
        value = work()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(self.agent.device) / 2**30 if on_gpu else None
        warnings, self.warnings.messages = self.warnings.messages, []
        return Reply(value, seconds, peak, peak_resident_gib(), warnings)


class RayExecutor:
    """All agents work at once. Rollouts are put into Ray's object store, once for all who learn from them."""

    def __init__(self, config: RunConfig, on_agent: Callable[[str, bool], None] | None = None) -> None:
        """`on_agent` is told which agent starts (True) or ends (False) its part of a call."""
        self.config, self.on_agent = config, on_agent or (lambda agent, busy: None)
        self.ids = [agent.id for agent in config.agents]
        self.seconds = [0.0] * len(self.ids)
        self.peak_memory: list[float | None] = [None] * len(self.ids)
        self.resident = [0.0] * len(self.ids)
        self.actors: list[Any] = []
        self.places: list[tuple[str, str, int]] = []
        state = random.getstate()
        self._connect()
        random.setstate(state)  # Ray draws from it
        try:
            self.agents = [self._on_its_node(agent) for agent in config.agents]
            self._place()
            self.places = [self._get(k, actor.place.remote()) for k, actor in enumerate(self.actors)]
            self.node = ray.get_runtime_context().get_node_id()
            common = (config.algorithm, config.seed, config.trace)
            self.chat_templates: list[bool] = self._each(
                lambda k, actor: actor.open.remote(__version__, self.agents[k], k, *common)
            )
        except BaseException:
            self.close()
            raise

    # --- Ray ---------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if ray.is_initialized():
            raise UserError("This process is connected to Ray already. Call ray.shutdown() before the run.")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # The device is decided here; Ray announces that it will stop hiding GPUs from those who ask for none.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = self.config.ray.address
        if address is None:
            cores = sum(agent.resources.num_cpus for agent in self.config.agents)
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
            return
        try:
            if address != "auto":
                host, _, port = address.partition(":")
                socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself tries for minutes
            ray.init(address=address, **quiet)
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            raise UserError(
                f"ray.address: there is no cluster at {address} ({' '.join(str(error).split())}). "
                "Start one with `ray start --head`, or leave ray.address out for a Ray on this machine alone."
            ) from None

    def _on_its_node(self, agent: AgentConfig) -> AgentConfig:
        """The agent with its share of GPUs decided, and paths that do not depend on where the driver was started."""
        gpus = agent.resources.num_gpus
        if gpus is None:
            there = ray.cluster_resources().get("GPU", 0) > 0
            gpus = 0.0 if agent.device == "cpu" or (agent.device == "auto" and not there) else 1.0
        changes: dict[str, Any] = {"resources": agent.resources.model_copy(update={"num_gpus": gpus})}
        if not gpus:
            changes["device"] = "cpu"
        if Path(agent.model).is_dir():
            changes["model"] = str(Path(agent.model).absolute())
        return agent.model_copy(update=changes)

    def _place(self) -> None:
        """A placement group and a process for each agent."""
        deadline = time.monotonic() + self.config.ray.placement_timeout
        groups: dict[str, Any] = {}
        # Who can run on few nodes comes first, before somebody else takes the cores there.
        for agent in sorted(self.agents, key=choosiness, reverse=True):
            groups[agent.id] = placement_group([bundle(agent)], name=f"hacrl-{agent.id}")
            # Nobody adds a node to a Ray of our own.
            if self._lacks() or not groups[agent.id].wait(max(deadline - time.monotonic(), 0.1)):
                raise UserError(self._no_room())
        for agent in self.agents:
            options = {
                "name": agent.id,
                "num_cpus": agent.resources.num_cpus,
                "num_gpus": agent.resources.num_gpus,
                "resources": agent.resources.custom,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    groups[agent.id], placement_group_bundle_index=0
                ),
            }
            self.actors.append(ray.remote(AgentProcess).options(**options).remote(agent.resources.num_cpus))

    def _wanted(self) -> dict[str, float]:
        wanted: dict[str, float] = {}
        for agent in self.agents:
            for name, amount in bundle(agent).items():
                wanted[name] = wanted.get(name, 0.0) + amount
        return wanted

    def _lacks(self) -> bool:
        there = ray.cluster_resources()
        lacking = any(amount > there.get(name, 0.0) for name, amount in self._wanted().items())
        return lacking and self.config.ray.address is None

    def _no_room(self) -> str:
        each = "; ".join(f"{agent.id} {written(bundle(agent))}" for agent in self.agents)
        there = {name: amount for name, amount in ray.cluster_resources().items() if name in self._wanted()}
        nodes = sum(node["Alive"] for node in ray.nodes())
        advice = "Add nodes, or lower the agents' resources (num_gpus may be a fraction)."
        if (Path(self.config.output_dir) / "config.yaml").is_file():
            advice += f" Continue with `hacrl train {self.config.output_dir} --resume`."
        return f"Ray has no room for all agents. Wanted: {each}; {nodes} nodes have {written(there)}. {advice}"

    def close(self) -> None:
        """Processes and placement groups go with the connection; so does a Ray of our own."""
        ray.shutdown()

    # --- what the trainer asks ---------------------------------------------------------------------

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        shared = ray.put(problems)
        self._each(lambda k, actor: actor.check_prompts.remote(shared))

    def without_chat_template(self) -> list[str]:
        return [agent_id for agent_id, there in zip(self.ids, self.chat_templates, strict=True) if not there]

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[list[Rollout]]:
        shared = ray.put(problems)
        return self._each(lambda k, actor: actor.sample.remote(shared, step, sampling_round))

    def learn(self, lessons: Sequence[Lesson]) -> list[LearnResult]:
        packed = packed_lessons(lessons)
        return self._each(lambda k, actor: actor.learn.remote(*packed[k]))

    def sample_and_learn(
        self,
        problems: Sequence[Problem],
        step: int,
        lessons: Sequence[Lesson],
        on_sampled: Callable[[list[list[Rollout]]], None],
    ) -> list[LearnResult]:
        shared, packed = ray.put(problems), packed_lessons(lessons)
        sampling = [actor.sample_ahead.remote(shared, step) for actor in self.actors]
        learning = [actor.learn.remote(*packed[k]) for k, actor in enumerate(self.actors)]
        on_sampled(self._gather(sampling))
        return self._gather(learning)

    def answer(self, problems: Sequence[Problem]) -> list[list[str]]:
        shared = ray.put(problems)
        return self._each(lambda k, actor: actor.answer.remote(shared))

    def save(self, folder: Path) -> None:
        """Agents on this node write into the folder; files of the others come here in pieces."""
        folder = folder.absolute()
        names = self._each(lambda k, actor: actor.save.remote(str(folder) if self._is_near(k) else None))
        for k, actor in enumerate(self.actors):
            for name in names[k] or []:
                path, offset = folder / name, 0
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while chunk := self._get(k, actor.read.remote(name, offset)):
                        file.write(chunk)
                        offset += len(chunk)
            self._get(k, actor.forget_files.remote())

    def load(self, folder: Path) -> None:
        folder = folder.absolute()
        for k, actor in enumerate(self.actors):
            if self._is_near(k):
                continue
            model_dir, state_file = files_of(folder, self.ids[k])
            for path in [*(path for path in sorted(model_dir.rglob("*")) if path.is_file()), state_file]:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        self._get(k, actor.write.remote(str(path.relative_to(folder)), chunk))
        self._each(lambda k, actor: actor.load.remote(str(folder) if self._is_near(k) else None))
        for k, actor in enumerate(self.actors):
            self._get(k, actor.forget_files.remote())

    def run_peak_memory(self) -> float:
        peaks = [peak for peak in self.peak_memory if peak is not None]
        return sum(peaks) if peaks else sum(self.resident) + peak_resident_gib()

    # --- calls -------------------------------------------------------------------------------------

    def _is_near(self, k: int) -> bool:
        return self.places[k][0] == self.node

    def _each(self, ask: Callable[[int, Any], Any]) -> list[Any]:
        return self._gather([ask(k, actor) for k, actor in enumerate(self.actors)])

    def _gather(self, asked: list[Any]) -> list[Any]:
        """Replies as they come; the first agent that fails ends the wait."""
        for agent_id in self.ids:
            self.on_agent(agent_id, True)
        replies: dict[int, Reply] = {}
        while len(replies) < len(asked):
            (ready,), _ = ray.wait([ref for k, ref in enumerate(asked) if k not in replies])
            k = asked.index(ready)
            replies[k] = self._get(k, ready)
            self.on_agent(self.ids[k], False)
        for k, reply in sorted(replies.items()):
            self.seconds[k], self.resident[k] = reply.seconds, reply.resident
            if reply.peak_memory is not None:
                self.peak_memory[k] = max(self.peak_memory[k] or 0.0, reply.peak_memory)
            for message in reply.warnings:
                warn(message)
        return [replies[k].value for k in range(len(asked))]

    def _get(self, k: int, asked: Any) -> Any:
        try:
            return ray.get(asked)
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except LOST as error:
            where = f" (process {self.places[k][2]} on {self.places[k][1]})" if self.places else ""
            raise AgentLost(f"Agent {self.ids[k]}{where} was lost: {reason(error)}.") from error


def bundle(agent: AgentConfig) -> dict[str, float]:
    """What an agent needs, in Ray's words."""
    resources = agent.resources
    gpus = {"GPU": resources.num_gpus} if resources.num_gpus else {}
    return {"CPU": float(resources.num_cpus), **gpus, **resources.custom}


def choosiness(agent: AgentConfig) -> tuple[int, float, int]:
    return len(agent.resources.custom), agent.resources.num_gpus or 0.0, agent.resources.num_cpus


def written(amounts: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing of it"


def packed_lessons(lessons: Sequence[Lesson]) -> list[tuple[Any, ...]]:
    """Arguments of `AgentProcess.learn`: rollouts as references, one object for each source whoever uses it."""
    parts: dict[int, list[Rollout]] = {}
    places: dict[int, int] = {}
    for lesson in lessons:
        for rollout in lesson.rollouts:
            if id(rollout) not in places:
                part = parts.setdefault(rollout.source, [])
                places[id(rollout)] = len(part)
                part.append(rollout)
    references = {source: ray.put(part) for source, part in parts.items()}
    packed = []
    for lesson in lessons:
        used = sorted({rollout.source for rollout in lesson.rollouts})
        rows = [(used.index(rollout.source), places[id(rollout)]) for rollout in lesson.rollouts]
        packed.append((replace(lesson, rollouts=[]), rows, *(references[source] for source in used)))
    return packed


def reason(error: Exception) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "died" in line.lower() and not line.startswith("The actor died unexpectedly")]
    return (told or lines or [type(error).__name__])[-1].rstrip(".")
