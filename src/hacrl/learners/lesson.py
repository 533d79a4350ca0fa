"""What a learner gets for one step, and what it reports of it."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Prompt


@dataclass
class Lesson:
    """What one learner gets for one step: N valid rollouts and what they are worth to it."""

    step: int
    prompts: list[Prompt]
    rollouts: list[Rollout]
    advantage_N: Tensor
    omega_N: Tensor
    minibatches: list[list[int]]
    """Prompt positions of each update, one pass after the other; empty if the step reinforces nothing."""
    learning_rate: float
    examples: list[Rollout] = field(default_factory=list)
    """Right answers to keep for imitation."""
    imitates: bool = False
    """Whether the step ends with imitation of what was kept."""
    imitation_rate: float = 0.0
    """The agent's learning rate during imitation, which takes a multiple of it."""
    token_advantages: list[np.ndarray] | None = None
    """Values added to `advantage_N` for each token, by row; None: nothing is added."""

    @property
    def mean_advantages(self) -> list[float]:
        """Each rollout's advantage, averaged over its tokens."""
        advantages: list[float] = self.advantage_N.tolist()
        if self.token_advantages is None:
            return advantages
        return [a + float(added.mean()) for a, added in zip(advantages, self.token_advantages, strict=True)]


@dataclass
class LearnResult:
    """What a learner did in a step: one record for each rollout and update, and metrics."""

    records: dict[str, np.ndarray]
    metrics: dict[str, float]
    dropped: dict[int, str] = field(default_factory=dict)
    """Rollouts that could not be used, by row, and why."""
