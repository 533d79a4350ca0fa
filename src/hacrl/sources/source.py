"""The interface of everything that gives rollouts."""

from collections.abc import Sequence
from typing import Protocol

from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem


class Source(Protocol):
    """Answers problems, with a model or in any other way."""

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        """Return rollouts of each problem, in the order of the problems. The verifier adds rewards later.

        A step may have several rounds of sampling, each with new problems; `sampling_round` counts them from 0.
        """
        ...

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        """Return one answer to each problem: the source's best, or one that is sampled as in training."""
        ...
