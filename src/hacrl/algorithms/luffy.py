"""LUFFY (arXiv 2504.14945): right foreign rollouts join the learner's group as demonstrations.

A prompt's group consists of the learner's own rollouts and the right ones of other agents. A foreign token has the
weight f(pi) = pi / (pi + gamma), where pi is its probability under the learner: compared with the plain probability,
unlikely tokens get more of the gradient. Foreign rollouts have no clip; own ones are treated as in GSPO. Our
interpretation: the paper's demonstrations are all right, here right means a reward above the mean of all agents on
the prompt; and the objective adds one mean over each source's demonstrations to the mean over own rollouts.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms.advantage import EDGE, Advantages, group_advantages
from hacrl.algorithms.algorithm import Explanation, means_by_source
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.terms import Sequences, Terms, mean_over_tokens, own_or_foreign, unbounded


@dataclass(frozen=True)
class LUFFY(GSPO):
    shares_rollouts: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    name: str = "luffy"
    gamma: float = 0.1
    """gamma in the weight pi / (pi + gamma) of a foreign token, where pi is its probability under the learner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma == 0:
            raise ValueError("gamma must be above 0: with 0 nothing foreign is learned")

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """Advantages within the group of own and right foreign rollouts; 0 for wrong foreign rollouts."""
        everybodys = group_advantages(rewards_N, prompt_N)
        used_N = (source_N == learner) | (everybodys.advantage_N > EDGE)
        group = group_advantages(rewards_N[used_N], prompt_N[used_N], self.scale_rewards)
        advantage_N, baseline_N = torch.zeros_like(rewards_N), everybodys.baseline_N.clone()
        advantage_N[used_N], baseline_N[used_N] = group.advantage_N, group.baseline_N
        return Advantages(advantage_N, baseline_N)

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        shaped_NT = torch.sigmoid(sequences.logp_NT - math.log(self.gamma))  # pi / (pi + gamma)
        weight_N = mean_over_tokens(shaped_NT, sequences.mask_NT)
        foreign = unbounded(weight_N, sequences.advantage_N, own.log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        return means_by_source(source_N, learner, 1.0)

    def explain(self, num_agents: int) -> Explanation:
        return replace(
            super().explain(num_agents),
            weight=(
                "Each token of a foreign rollout whose reward is above the mean of everybody's on the prompt has the "
                f"weight p / (p + {self.gamma:g}), p being its probability for the learner, whatever s is; other "
                "foreign rollouts are not used."
            ),
        )
