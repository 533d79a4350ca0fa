"""Robust HACPO in which a learner takes help only where it needs help: on prompts that it rarely solves itself."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hacrl.algorithms import Advantages, RobustHACPO


@dataclass(frozen=True)
class Helped(RobustHACPO):
    solved: float = 0.25
    """Other agents' answers to a prompt are left out if the learner's own mean reward on it is above this."""

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        given = super().advantages(rewards_N, prompt_N, source_N, learner, omega_KK)
        own_N = (source_N == learner).double()
        answers_P = torch.bincount(prompt_N, weights=own_N).clamp(min=1)
        own_mean_P = torch.bincount(prompt_N, weights=own_N * rewards_N) / answers_P
        left_out_N = (own_N == 0) & (own_mean_P[prompt_N] > self.solved)
        return replace(given, advantage_N=given.advantage_N.masked_fill(left_out_N, 0.0))
