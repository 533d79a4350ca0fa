"""The interface between the trainer and the agents, which run in this process or elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hacrl.algorithms import Reading
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.rollouts.reader import Traits
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem

Answer = TypeVar("Answer")


class AgentLost(UserError):
    """Raised if an agent's process or node is gone, with everything the agent learned since the last checkpoint."""


def files_of(checkpoint: Path, agent_id: str) -> tuple[Path, Path]:
    """Model folder and state file of an agent in a checkpoint."""
    return checkpoint / "agents" / agent_id, checkpoint / "state" / f"{agent_id}.pt"


@dataclass(frozen=True)
class Timed(Generic[Answer]):
    """An agent's answer, and how many seconds it took."""

    value: Answer
    seconds: float


OnSampled = Callable[[list[Timed[list[Rollout]]]], None]
"""Receives the rollouts of all agents as soon as they are complete."""


class Executor(ABC):
    """Runs calls on the agents. Answers are lists with one entry for each agent."""

    def __init__(self, config: RunConfig, on_agent: Callable[[str, bool], None] | None = None) -> None:
        """`on_agent(id, busy)` is called when an agent starts (True) or ends (False) its part of a call."""
        self.config, self.on_agent = config, on_agent or (lambda agent, busy: None)
        self.ids = [agent.id for agent in config.agents]
        self.peak_memory: list[float | None] = [None] * len(self.ids)
        """Peak GPU memory so far while each agent worked, in GiB; None on a CPU, whose memory the agents share."""

    @abstractmethod
    def ask(self, call: str, *common: Any, each: Sequence[Any] | None = None) -> list[Timed[Any]]:
        """Call a method of every agent with the `common` arguments, followed by the agent's own from `each`."""

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        self.ask("check_prompts", problems)

    def traits(self, problem: Problem) -> list[Traits]:
        """How each agent reads and writes text, tried on one problem of the run."""
        return [answer.value for answer in self.ask("traits", problem)]

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Timed[list[Rollout]]]:
        return self.ask("sample", problems, step, sampling_round)

    def score(self, requests: Sequence[Sequence[Rollout]]) -> list[Timed[list[Reading | None]]]:
        """Score rollouts: each agent scores its own list of requests with `Agent.score`."""
        return self.ask("score", each=requests)

    def learn(self, lessons: Sequence[Lesson]) -> list[Timed[LearnResult]]:
        return self.ask("learn", each=lessons)

    @abstractmethod
    def sample_and_learn(
        self, problems: Sequence[Problem], step: int, lessons: Sequence[Lesson], on_sampled: OnSampled
    ) -> list[Timed[LearnResult]]:
        """Every agent samples for `step`, then learns from its lesson of the step before, without waiting for others.
        `on_sampled` is called while agents learn."""

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[Timed[list[str]]]:
        """Greedy answers of each agent, or answers sampled as in training."""
        return self.ask("answer", problems, sampled)

    @abstractmethod
    def save(self, folder: Path) -> None: ...
    @abstractmethod
    def load(self, folder: Path) -> None: ...
    @abstractmethod
    def run_peak_memory(self) -> float:
        """Peak memory of all agents together, in GiB."""

    @abstractmethod
    def close(self) -> None:
        """End all processes that were started for the agents."""
