"""The interface of everything that gives rollouts."""

from collections.abc import Sequence
from typing import Protocol

from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem


class Source(Protocol):
    """Answers problems. What it needs for that, a model or something else, is its own affair."""

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        """The source's rollouts of each problem, in order; the verifier adds rewards later.

        A step may ask several times for more problems; `sampling_round` counts that from 0.
        """
        ...

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        """One answer to each problem: the best that the source has, or one that is sampled as in training."""
        ...
