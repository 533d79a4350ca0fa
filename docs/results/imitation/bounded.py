"""Robust HACPO with two bounds on what one answer of another agent may do.

hacrl study docs/results/imitation/leads.yaml
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms import Advantages, RobustHACPO, Sequences, Terms


@dataclass(frozen=True)
class Bounded(RobustHACPO):
    keeps_all: ClassVar[bool] = False

    stop: bool = False
    """Whether a foreign answer teaches nothing once its s is above 1 + epsilon_high, as an own right answer in GSPO."""
    floor: float = 0.0
    """Smallest divisor of a foreign reward above the learner's mean; a standard deviation below it is replaced."""

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        found = super().advantages(rewards_N, prompt_N, source_N, learner, omega_KK)
        if not self.floor:
            return found
        bounded_N = torch.minimum(found.advantage_N, (rewards_N - found.baseline_N) / self.floor)
        bounds_N = (source_N != learner) & (found.advantage_N > 0)
        return replace(found, advantage_N=torch.where(bounds_N, bounded_N, found.advantage_N))

    def terms(self, sequences: Sequences, update: int) -> Terms:
        found = super().terms(sequences, update)
        if not self.stop:
            return found
        stopped_N = ~sequences.own_N & (found.log_ratio_N > math.log1p(self.epsilon_high))
        objective_N = torch.where(stopped_N, found.objective_N.detach(), found.objective_N)
        return replace(found, objective_N=objective_N, kept_N=found.kept_N & ~stopped_N)
