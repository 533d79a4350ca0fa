"""Success-gated transfer (Mutual RL, arXiv 2605.07244): GSPO, plus foreign successes where the learner has none.

A rollout is a success if its reward is above the mean reward of all agents on that prompt. On prompts where the
learner has no success of its own, it learns from foreign successes without importance correction. No other foreign
rollouts are used. Our interpretation: the advantage of a transferred rollout is the one in the group of all agents,
and the objective adds one mean over the rollouts of each source to the mean over own rollouts.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms.advantage import EDGE, Advantages, group_advantages, num_prompts, sum_by
from hacrl.algorithms.algorithm import Explanation, means_by_source
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.terms import Sequences, Terms, as_if_on_policy, own_or_foreign, unbounded


@dataclass(frozen=True)
class SuccessGated(GSPO):
    shares_rollouts: ClassVar[bool] = True
    groups_by_source: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    name: str = "success_gated"
    transfer_weight: float = 1.0
    """Weight of the transferred foreign successes in the objective, beside the mean over own rollouts."""

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """Advantages in the own group for own rollouts, in the group of all agents for transferred ones, else 0."""
        own = group_advantages(rewards_N, prompt_N * len(omega_KK) + source_N, self.scale_rewards, source_N)
        pooled = group_advantages(rewards_N, prompt_N, self.scale_rewards)
        own_N, success_N = source_N == learner, pooled.advantage_N > EDGE
        solved_P = sum_by((own_N & success_N).to(rewards_N), prompt_N, num_prompts(prompt_N)) > 0
        transferred_N = success_N & ~solved_P[prompt_N]
        return Advantages(
            torch.where(own_N, own.advantage_N, pooled.advantage_N * transferred_N),
            torch.where(own_N, own.baseline_N, pooled.baseline_N),
        )

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        weight_N = self.transfer_weight * as_if_on_policy(sequences)
        foreign = unbounded(weight_N, sequences.advantage_N, own.log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        return means_by_source(source_N, learner, 1.0)

    def explain(self, num_agents: int) -> Explanation:
        return replace(
            super().explain(num_agents),
            weight=(
                "On prompts where the learner has no success, a reward above the mean of everybody's, a foreign "
                f"success has the weight {self.transfer_weight:g} whatever its s; other foreign rollouts are not used."
            ),
        )
