"""Runs every agent in its own process, or with `fsdp` in several, on one machine or on a cluster, by Ray."""

import logging
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from hacrl import __version__
from hacrl.agents.agent import state_of
from hacrl.agents.processes import Member, joined
from hacrl.config import AgentConfig, ResourcesConfig, RunConfig
from hacrl.errors import UserError, warn
from hacrl.execution.executor import AgentLost, Executor, OnSampled, Timed, files_of
from hacrl.execution.memory import peak_resident_gib
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem

try:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import ray
    from ray import exceptions
except ImportError:
    raise UserError("execution: ray needs the package ray. Install it with `pip install 'hacrl[ray]'`.") from None

from hacrl.execution import private_ray
from hacrl.execution.ray_process import CHUNK, AgentProcess, AgentReply, Key, SamplerProcess, answer_of

LOST = (
    exceptions.RayActorError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
    exceptions.WorkerCrashedError,
)
NOTICE = 30.0
"""Seconds that Ray gets to notice a lost rank after another rank has failed to reach it."""


@dataclass
class RemoteRank:
    """The driver's handle of one process of an agent."""

    agent: int
    rank: int
    actor: Any
    place: tuple[str, str, int] | None = None


class RayExecutor(Executor):
    """Runs all agents at once. Rollouts are put into Ray's object store, once for all agents that use them."""

    def __init__(self, config: RunConfig, on_agent: Callable[[str, bool], None] | None = None) -> None:
        super().__init__(config, on_agent)
        self.resident = [0.0] * len(self.ids)
        self.workers: list[RemoteRank] = []
        self.samplers: list[Any] = []
        self.folder: Path | None = None
        """Folder with sockets and logs of a private Ray instance; None with a cluster."""
        self.lost = False
        state = random.getstate()
        self._connect()
        random.setstate(state)  # Ray uses Python's generator
        try:
            self.agents = [self._on_its_node(agent) for agent in config.agents]
            self._place()
            for worker in self.workers:
                worker.place = self._get(worker, worker.actor.place.remote())
            self.node = ray.get_runtime_context().get_node_id()
            points = {w.agent: self._meeting_point(w) for w in self.workers if w.rank == 0}
            self._each("open", lambda w: (__version__, self._member(w, points[w.agent]), self.samplers[w.agent]))
        except BaseException:
            self.close()
            raise

    # --- Ray ---------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if ray.is_initialized():
            raise UserError("This process is connected to Ray already. Call ray.shutdown() before the run.")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # We choose the device; Ray announces that it will stop hiding GPUs from actors that request none.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = self.config.ray.address
        if address is None:
            cores = int(sum(process["CPU"] for agent in self.config.agents for process in bundles(agent)))
            self.folder = private_ray.start(num_cpus=cores, **quiet)
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
        """The agent's config with `num_gpus` filled in, and with a model path that works from any working directory."""
        there = ray.cluster_resources().get("GPU", 0) > 0
        default = 0.0 if agent.device == "cpu" or (agent.device == "auto" and not there) else 1.0

        def decided(resources: Any) -> Any:
            return resources.model_copy(update={"num_gpus": default}) if resources.num_gpus is None else resources

        resources = decided(agent.resources)
        if resources.sampler is not None:
            resources = resources.model_copy(update={"sampler": decided(resources.sampler)})
        changes: dict[str, Any] = {"resources": resources}
        if not resources.num_gpus:
            changes["device"] = "cpu"
        if Path(agent.model).is_dir():
            changes["model"] = str(Path(agent.model).absolute())
        return agent.model_copy(update=changes)

    def _place(self) -> None:
        """Create a placement group for each agent and a process for each rank, on as few nodes as possible."""
        deadline = time.monotonic() + self.config.ray.placement_timeout
        groups: dict[str, Any] = {}
        # Agents that can run on few nodes come first, before others take the cores there.
        for agent in sorted(self.agents, key=choosiness, reverse=True):
            groups[agent.id] = placement_group(bundles(agent), "PACK", f"hacrl-{agent.id}")
            # A private Ray instance never gets more nodes, so do not wait.
            if self._lacks() or not groups[agent.id].wait(max(deadline - time.monotonic(), 0.1)):
                raise UserError(self._no_room())
        for k, agent in enumerate(self.agents):
            for rank in range(agent.fsdp):
                where = actor_options(f"{agent.id}:{rank}", agent.resources, groups[agent.id], rank)
                process = ray.remote(AgentProcess).options(**where)
                self.workers.append(RemoteRank(k, rank, process.remote(agent.resources.num_cpus)))
            sampler = None
            if agent.resources.sampler is not None:
                where = actor_options(f"{agent.id}:sampler", agent.resources.sampler, groups[agent.id], agent.fsdp)
                sampler = ray.remote(SamplerProcess).options(**where).remote()
            self.samplers.append(sampler)

    def _meeting_point(self, first: RemoteRank) -> str:
        """URL at which the ranks of an agent find each other; "" for a single rank."""
        if self.agents[first.agent].fsdp == 1:
            return ""
        if self.folder is not None:  # on this machine: no port that others could reach
            return f"file://{self.folder}/{uuid4().hex}"
        assert first.place is not None
        return f"tcp://{first.place[1]}:{self._get(first, first.actor.free_port.remote())}"

    def _member(self, worker: RemoteRank, meeting_point: str) -> Member:
        common = (self.config.algorithm, self.config.seed, self.config.trace)
        return Member(self.agents[worker.agent], worker.agent, *common, worker.rank, meeting_point)

    def _wanted(self) -> dict[str, float]:
        wanted: defaultdict[str, float] = defaultdict(float)
        for name, amount in (item for agent in self.agents for process in bundles(agent) for item in process.items()):
            wanted[name] += amount
        return wanted

    def _lacks(self) -> bool:
        there = ray.cluster_resources()
        lacking = any(amount > there.get(name, 0.0) for name, amount in self._wanted().items())
        return lacking and self.config.ray.address is None

    def _no_room(self) -> str:
        each = "; ".join(f"{agent.id} {' + '.join(map(written, bundles(agent)))}" for agent in self.agents)
        there = {name: amount for name, amount in ray.cluster_resources().items() if name in self._wanted()}
        nodes = sum(node["Alive"] for node in ray.nodes())
        advice = "Add nodes, or lower the agents' resources (num_gpus may be a fraction)."
        if (Path(self.config.output_dir) / "config.yaml").is_file():
            advice += (
                f" Continue with `hacrl train {self.config.output_dir} --resume agents.ID.resources.num_gpus=...`."
            )
        return f"Ray has no room for all agents. Wanted: {each}; {nodes} nodes have {written(there)}. {advice}"

    def close(self) -> None:
        """Disconnect from Ray, which ends all processes and placement groups, and a private Ray instance. The folder of
        the instance is removed, unless an agent was lost: the logs may say why."""
        ray.shutdown()
        if self.folder is not None:
            (private_ray.leave if self.lost else private_ray.remove)(self.folder)

    # --- what the trainer asks ---------------------------------------------------------------------

    def ask(self, call: str, *common: Any, each: Sequence[Any] | None = None) -> list[Timed[Any]]:
        shared = [ray.put(value) if isinstance(value, list) else value for value in common]
        own = [()] * len(self.ids) if each is None else [(ray.put(value),) for value in each]
        return self._gather(call, [w.actor.call.remote(call, *shared, *own[w.agent]) for w in self.workers])

    def learn(self, lessons: Sequence[Lesson]) -> list[Timed[LearnResult]]:
        packed = packed_lessons(lessons)
        return self._each("learn", lambda worker: packed[worker.agent])

    def sample_and_learn(
        self, problems: Sequence[Problem], step: int, lessons: Sequence[Lesson], on_sampled: OnSampled
    ) -> list[Timed[LearnResult]]:
        shared, packed = ray.put(problems), packed_lessons(lessons)
        sampling = [worker.actor.call.remote("sample_ahead", shared, step) for worker in self.workers]
        learning = [worker.actor.learn.remote(*packed[worker.agent]) for worker in self.workers]
        on_sampled(self._gather("sample_ahead", sampling))
        return self._gather("learn", learning)

    def save(self, folder: Path) -> None:
        """Save all agents: those on this node write into the folder; files of the others are copied here in chunks."""
        folder = folder.absolute()
        self._each("save", lambda worker: (self._near(worker, folder),))
        for worker in self.workers:
            for name in self._get(worker, worker.actor.file_names.remote()):
                path, offset = folder / name, 0
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while chunk := self._get(worker, worker.actor.read.remote(name, offset)):
                        file.write(chunk)
                        offset += len(chunk)
            self._get(worker, worker.actor.forget_files.remote())

    def load(self, folder: Path) -> None:
        folder = folder.absolute()
        for worker in self.workers:
            if self._near(worker, folder) is not None:
                continue
            model_dir, state_file = files_of(folder, self.ids[worker.agent])
            files = [path for path in sorted(model_dir.rglob("*")) if path.is_file()]
            for path in [*files, state_of(state_file, worker.rank)]:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        self._get(worker, worker.actor.write.remote(str(path.relative_to(folder)), chunk))
        self._each("load", lambda worker: (self._near(worker, folder),))
        for worker in self.workers:
            self._get(worker, worker.actor.forget_files.remote())

    def run_peak_memory(self) -> float:
        peaks = [peak for peak in self.peak_memory if peak is not None]
        return sum(peaks) if peaks else sum(self.resident) + peak_resident_gib()

    # --- calls -------------------------------------------------------------------------------------

    def _near(self, worker: RemoteRank, folder: Path) -> str | None:
        """The folder if the process is on this node and can reach it, else None."""
        assert worker.place is not None
        return str(folder) if worker.place[0] == self.node else None

    def _each(self, name: str, args: Callable[[RemoteRank], tuple[Any, ...]]) -> list[Timed[Any]]:
        asked = [getattr(worker.actor, name).remote(*args(worker)) for worker in self.workers]
        return self._gather(name, asked)

    def _gather(self, name: str, asked: list[Any]) -> list[Timed[Any]]:
        """Collect each agent's answer from the replies of its processes; the first process that fails ends the wait."""
        for agent_id in self.ids:
            self.on_agent(agent_id, True)
        replies: list[dict[int, AgentReply]] = [{} for _ in self.ids]
        waiting = dict(zip(asked, self.workers, strict=True))
        while waiting:
            (ready,), _ = ray.wait(list(waiting))
            worker = waiting.pop(ready)
            mates = [ref for ref, other in waiting.items() if other.agent == worker.agent]
            try:
                replies[worker.agent][worker.rank] = self._get(worker, ready)
            except RuntimeError:
                # Ranks that wait for a lost rank fail too, often before Ray notices the loss.
                for ref in ray.wait(mates, num_returns=len(mates), timeout=NOTICE)[0] if mates else []:
                    with suppress(RuntimeError):
                        self._get(waiting[ref], ref)
                raise
            if not mates:
                self.on_agent(self.ids[worker.agent], False)
        answers = []
        for k, by_rank in enumerate(replies):
            parts = [by_rank[rank] for rank in sorted(by_rank)]
            self.resident[k] = sum(reply.resident for reply in parts)
            peaks = [reply.peak_memory for reply in parts if reply.peak_memory is not None]
            if peaks:
                self.peak_memory[k] = max(self.peak_memory[k] or 0.0, sum(peaks))
            for message in dict.fromkeys(message for reply in parts for message in reply.warnings):
                warn(message)
            answer = joined(name, [reply.value for reply in parts])
            answers.append(Timed(answer, max(reply.seconds for reply in parts)))
        return answers

    def _get(self, worker: RemoteRank, asked: Any) -> Any:
        try:
            return answer_of(asked)
        except LOST as error:
            where = f" (process {worker.place[2]} on {worker.place[1]})" if worker.place else ""
            self.lost = True
            logs = f" Ray's logs are in {self.folder}." if self.folder is not None else ""
            raise AgentLost(f"Agent {self.ids[worker.agent]}{where} was lost: {what_happened(error)}.{logs}") from error


def bundle(resources: ResourcesConfig) -> dict[str, float]:
    """Resources of one process, as a Ray bundle."""
    gpus = {"GPU": resources.num_gpus} if resources.num_gpus else {}
    return {"CPU": float(resources.num_cpus), **gpus, **resources.custom}


def bundles(agent: AgentConfig) -> list[dict[str, float]]:
    """Ray bundles for the ranks of an agent, and for its vLLM if that has a process of its own."""
    sampler = agent.resources.sampler
    return [bundle(agent.resources)] * agent.fsdp + ([] if sampler is None else [bundle(sampler)])


def actor_options(name: str, resources: ResourcesConfig, group: Any, place: int) -> dict[str, Any]:
    """Ray's options for an actor in one bundle of a placement group."""
    return {
        "name": name,
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "resources": resources.custom,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
    }


def choosiness(agent: AgentConfig) -> tuple[int, float, float]:
    needs = bundles(agent)
    custom = {name for need in needs for name in need} - {"CPU", "GPU"}
    return len(custom), sum(need.get("GPU", 0.0) for need in needs), sum(need["CPU"] for need in needs)


def written(amounts: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing of it"


def packed_lessons(lessons: Sequence[Lesson]) -> list[tuple[Any, ...]]:
    """Arguments of `AgentProcess.learn`, with rollouts as references to one stored object for each source."""
    keys = [[rollout.key for rollout in lesson.rollouts] for lesson in lessons]
    parts: defaultdict[int, dict[Key, Rollout]] = defaultdict(dict)
    for own, lesson in zip(keys, lessons, strict=True):
        for key, rollout in zip(own, lesson.rollouts, strict=True):
            parts[rollout.source][key] = rollout
    references = {source: ray.put(part) for source, part in parts.items()}
    return [
        (replace(lesson, rollouts=[]), own, *(references[source] for source in {source for source, _, _ in own}))
        for own, lesson in zip(keys, lessons, strict=True)
    ]


def what_happened(error: Exception) -> str:
    """The line of Ray's error message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "died" in line.lower() and not line.startswith("The actor died unexpectedly")]
    return (told or lines or [type(error).__name__])[-1].rstrip(".")
