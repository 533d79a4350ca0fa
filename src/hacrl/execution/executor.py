"""What the trainer asks of whoever runs the agents, in this process or elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hacrl.agents.learning import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem


class Executor(Protocol):
    """Answers of sample, learn and answer are lists with one entry for each agent."""

    seconds: list[float]
    """How long each agent took for the last call."""
    peak_memory: list[float | None]
    """GiB of GPU memory, the largest so far while each agent worked; None on a CPU, which agents share."""

    def check_prompts(self, problems: Sequence[Problem]) -> None: ...
    def without_chat_template(self) -> list[str]: ...
    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[list[Rollout]]: ...
    def learn(self, lessons: Sequence[Lesson]) -> list[LearnResult]: ...
    def answer(self, problems: Sequence[Problem]) -> list[list[str]]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def run_peak_memory(self) -> float:
        """GiB of all agents together."""
        ...
