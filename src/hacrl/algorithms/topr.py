"""TOPR (arXiv 2503.14286): right answers have full weight, wrong ones less if the learner finds them unlikely.

The rollouts of all agents on a prompt form one group. One rule holds for own and foreign rollouts:

    term = w A logp / len        w = 1 where A > 0, min(pi / mu, 1) where A < 0; no gradient goes through w

pi / mu is how much more likely the whole answer is for the learner than it was for its source, not a mean over tokens
as in GSPO. Our interpretation: the group-relative advantage stands for the reward minus a baseline, and
log-probabilities are means over tokens, so that a learning rate has the same meaning as in the other algorithms.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hacrl.algorithms.algorithm import Algorithm, Explanation, ratio_sentence
from hacrl.algorithms.capability import CapabilityOptions
from hacrl.algorithms.terms import Sequences, Terms, as_if_on_policy, unbounded

WEIGHT = (
    "has the weight 1 where A > 0. Where A < 0, its weight is how much more likely the whole answer is for the learner "
    "than it was for its source, at most 1."
)


@dataclass(frozen=True)
class TOPR(Algorithm):
    shares_rollouts: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    name: str = "topr"

    @property
    def needs_logps(self) -> bool:
        return True

    def terms(self, sequences: Sequences, update: int) -> Terms:
        likelier_N = (sequences.logp_N.detach() - sequences.old_logp_N).clamp(max=0.0).exp()
        weight_N = torch.where(sequences.advantage_N < 0, likelier_N, 1.0)
        return unbounded(weight_N * as_if_on_policy(sequences), sequences.advantage_N, sequences.log_ratio_N)

    def explain(self, num_agents: int) -> Explanation:
        return Explanation(
            ratio=ratio_sentence(),
            own_weight=f"An own rollout {WEIGHT}",
            weight=f"A foreign rollout {WEIGHT}",
            capability=CapabilityOptions().sentence(),
        )
