"""Naive sharing, the paper's negative control: GSPO on the rollouts of all agents, without HACPO's mechanisms.

All agents share one mean and standard deviation of rewards and one mean of the terms; capability is not used. The
paper describes it as "shared rollouts but lacking the algorithmic innovations in Section 3". This leaves open which
model's probability is the denominator of a foreign rollout's ratio; `ratio` offers both readings.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from hacrl.algorithms.algorithm import Explanation, ratio_sentence
from hacrl.algorithms.gspo import GSPO


@dataclass(frozen=True)
class Naive(GSPO):
    shares_rollouts: ClassVar[bool] = True

    name: str = "naive"
    ratio: Literal["source", "own"] = "source"
    """Denominator of a foreign ratio: the `source` when it sampled, or the learner before its first update (`own`)."""

    @property
    def rescores_foreign(self) -> bool:
        return self.ratio == "own"

    @property
    def needs_logps(self) -> bool:
        return self.ratio == "source"

    def explain(self, num_agents: int) -> Explanation:
        to_itself = (
            "s compares how likely a rollout is for the learner with how likely it was for the same learner before, "
            "per token: when it sampled an own one, and before the first update of the step for a foreign one."
        )
        taken, other = ("its source", "own") if self.ratio == "source" else ("the learner itself", "source")
        decision = (
            "Decision: the paper does not say what the ratio of a foreign rollout is taken to in naive sharing; here "
            f"it is {taken} (algorithm.ratio={self.ratio}). The other reading is algorithm.ratio={other}."
        )
        return replace(
            super().explain(num_agents),
            ratio=to_itself if self.ratio == "own" else ratio_sentence(),
            weight=f"A foreign rollout is used like an own one: its weight is {self._weight()}.",
            band=None if self.loss_type == "cispo" else self._clip_sentence("The band of a foreign rollout"),
            decision=decision if num_agents > 1 else None,
        )
