"""What the trainer asks of whoever runs the agents, in this process or elsewhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hacrl.agents.agent import Traits
from hacrl.algorithms import Reading
from hacrl.errors import UserError
from hacrl.learners.learner import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem


class AgentLost(UserError):
    """The process or the node of an agent is gone, and with it what the agent had learned since the last checkpoint."""


def files_of(checkpoint: Path, agent_id: str) -> tuple[Path, Path]:
    """Model folder and state file of an agent in a checkpoint."""
    return checkpoint / "agents" / agent_id, checkpoint / "state" / f"{agent_id}.pt"


class Executor(Protocol):
    """Answers of sample, score, learn and answer are lists with one entry for each agent."""

    seconds: list[float]
    """How long each agent took for the last call."""
    peak_memory: list[float | None]
    """GiB of GPU memory, the largest so far while each agent worked; None on a CPU, which agents share."""

    def check_prompts(self, problems: Sequence[Problem]) -> None: ...
    def traits(self, problem: Problem) -> list[Traits]:
        """How each agent reads and writes text; the problem is one of the run's."""
        ...

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[list[Rollout]]: ...
    def score(self, requests: Sequence[Sequence[Rollout]]) -> list[list[Reading | None]]:
        """What each agent says of the rollouts that it is asked about, as `Agent.score`."""
        ...

    def learn(self, lessons: Sequence[Lesson]) -> list[LearnResult]: ...
    def sample_and_learn(
        self,
        problems: Sequence[Problem],
        step: int,
        lessons: Sequence[Lesson],
        on_sampled: Callable[[list[list[Rollout]]], None],
    ) -> list[LearnResult]:
        """Every agent samples for `step`, then learns from its lesson of the step before, whatever others do.

        `on_sampled` gets all rollouts as soon as they are there, while agents learn. `seconds` are those of sampling
        then, and those of learning at the end.
        """
        ...

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[list[str]]:
        """Greedy answers of each agent, or answers sampled as in training."""
        ...

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def run_peak_memory(self) -> float:
        """GiB of all agents together."""
        ...

    def close(self) -> None:
        """End what was started for the agents."""
        ...
