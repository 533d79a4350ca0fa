"""Runs all agents in this process: in parallel on a CPU, one after the other on a GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hacrl.agents.agent import Agent
from hacrl.agents.loading import Bases
from hacrl.agents.processes import ShardedAgent
from hacrl.config import RunConfig
from hacrl.decoder.parallel import use_threads
from hacrl.execution.executor import Executor, OnSampled, Timed, files_of
from hacrl.execution.memory import keep_freed_memory, measured, peak_resident_gib
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem

AnyAgent = Agent | ShardedAgent

THREADS = torch.get_num_threads()
"""Torch's threads before the agents of a run divide them, so that a second run in this process has as many."""


class LocalExecutor(Executor):
    """Runs the trainer's calls on agents in this process."""

    def __init__(self, config: RunConfig, on_agent: Callable[[str, bool], None] | None = None) -> None:
        super().__init__(config, on_agent)
        bases: Bases = {}
        self.agents: list[AnyAgent] = []
        for index, agent in enumerate(config.agents):
            if agent.fsdp > 1:
                self.agents.append(ShardedAgent(agent, index, config.algorithm, config.seed, config.trace))
            else:
                self.agents.append(Agent(agent, index, config.algorithm, config.seed, config.trace, bases))
        keep_freed_memory()
        on_cpu = all(agent.device.type == "cpu" for agent in self.agents)
        self.workers = min(len(self.agents), THREADS) if on_cpu else 1
        # Small models gain more from running in parallel than from several threads each.
        self.threads = THREADS // self.workers
        use_threads(self.threads)

    def ask(self, call: str, *common: Any, each: Sequence[Any] | None = None) -> list[Timed[Any]]:
        def work(agent: AnyAgent) -> Timed[Any]:
            own = () if each is None else (each[agent.index],)
            return self._timed(agent, call, *common, *own)

        with self._pool() as pool:
            return list(pool.map(work, self.agents))

    def sample_and_learn(
        self, problems: Sequence[Problem], step: int, lessons: Sequence[Lesson], on_sampled: OnSampled
    ) -> list[Timed[LearnResult]]:
        sampled: list[Future[Timed[list[Rollout]]]] = [Future() for _ in self.agents]

        def work(agent: AnyAgent) -> Timed[LearnResult]:
            try:
                sampled[agent.index].set_result(self._timed(agent, "sample_ahead", problems, step))
            except BaseException as error:
                sampled[agent.index].set_exception(error)
                raise
            return self._timed(agent, "learn", lessons[agent.index])

        with self._pool() as pool:
            learning = [pool.submit(work, agent) for agent in self.agents]
            on_sampled([future.result() for future in sampled])
            return [future.result() for future in learning]

    def save(self, folder: Path) -> None:
        for agent in self.agents:
            agent.save(*files_of(folder, agent.config.id))

    def load(self, folder: Path) -> None:
        for agent in self.agents:
            agent.load(*files_of(folder, agent.config.id))

    def run_peak_memory(self) -> float:
        peaks = [peak for peak in self.peak_memory if peak is not None]
        if not peaks:
            return peak_resident_gib()
        by_device: dict[torch.device, float] = {}
        for agent, peak in zip(self.agents, self.peak_memory, strict=True):
            by_device[agent.device] = max(by_device.get(agent.device, 0.0), peak or 0.0)
        return sum(by_device.values())

    def close(self) -> None:
        for agent in self.agents:
            if isinstance(agent, ShardedAgent):
                agent.end()

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, initializer=use_threads, initargs=(self.threads,))

    def _timed(self, agent: AnyAgent, call: str, *args: Any) -> Timed[Any]:
        self.on_agent(agent.config.id, True)
        result, seconds, peak = measured(agent.device, lambda: getattr(agent, call)(*args))
        self.on_agent(agent.config.id, False)
        if peak is not None:
            self.peak_memory[agent.index] = max(self.peak_memory[agent.index] or 0.0, peak)
        return Timed(result, seconds)
