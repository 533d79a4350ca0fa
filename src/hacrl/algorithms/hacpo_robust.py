"""Robust HACPO: GSPO on own rollouts, plus the rollouts that other agents got right.

A learner uses a foreign rollout if its reward is above the learner's own mean on that prompt:

    A = max(R - mean own reward, 0) / (sigma + 1e-6)        sigma of the rewards of learner and source on the prompt
    w = min(s, 1) * min(omega(j, k), 1)                     no gradient goes through w
    term = w * A * log s

There is no band: a right answer that the learner finds unlikely counts less, by s, but is never discarded. Wrong
foreign answers are never used. Weights are at most 1. Own rollouts are treated exactly as in GSPO. The terms of a
source depend only on that source and the learner, so a source without right answers adds exactly 0. After the last
step each agent fine-tunes on everybody's right answers (`imitation`). Theory: docs/algorithm.md, section 18.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hacrl.algorithms.advantage import EDGE, Advantages, divisors, group_advantages, mean_by, num_prompts, sum_by
from hacrl.algorithms.algorithm import CapabilityAware, Explanation, ratio_sentence
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.imitation import Imitation
from hacrl.algorithms.terms import Sequences, Terms, as_if_on_policy, own_or_foreign, sequence_log_ratio, unbounded


@dataclass(frozen=True)
class RobustHACPO(CapabilityAware, GSPO):
    keeps_all: ClassVar[bool] = True
    groups_by_source: ClassVar[bool] = True

    name: str = "hacpo_robust"
    foreign: Literal["right", "all", "centred", "exact"] = "right"
    """Which foreign rollouts are used. The ablations also use those worse than the learner's own: `all`; `centred`
    compares with the mean of the source; `exact` weights them by min(p learner / p source, 1) of the whole answer."""
    truncate: bool = True
    """Whether min(s, 1) is a factor of the weight. False is an ablation that uses the factor 1 instead."""
    cross_omega: bool = True
    """Whether sources with a lower capability than the learner count less. False is an ablation."""
    ratio_unit: Literal["learner", "token"] = "learner"
    """What log-probabilities are divided by in s: both by the `learner`'s token count or, an ablation that follows the
    paper, each by its own model's token count (`token`)."""
    imitation: Imitation = field(default_factory=lambda: Imitation(when="end", confidence=16.0, focus=1.0))
    """Supervised updates on everybody's right answers after the last step."""

    @property
    def needs_logps(self) -> bool:
        return self.foreign == "exact"

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """Own advantages as in GSPO; foreign ones are 0 on prompts where the learner has no reward of its own."""
        P, own_N = num_prompts(prompt_N), source_N == learner
        own_rewards, own_prompts = rewards_N[own_N], prompt_N[own_N]
        advantage_N = torch.zeros_like(rewards_N)
        advantage_N[own_N] = group_advantages(own_rewards, own_prompts, self.scale_rewards).advantage_N
        has_own_P = sum_by(own_N.to(rewards_N), prompt_N, P) > 0
        baseline_N = mean_by(own_rewards, own_prompts, P)[prompt_N]
        for source in (j for j in range(len(omega_KK)) if j != learner):
            of_source_N = source_N == source
            of_pair_N = own_N | of_source_N
            divisor_N = torch.ones_like(rewards_N)
            divisor_N[of_pair_N] = divisors(rewards_N[of_pair_N], prompt_N[of_pair_N], self.scale_rewards)
            compared_N = baseline_N
            if self.foreign == "centred":
                compared_N = mean_by(rewards_N[of_source_N], prompt_N[of_source_N], P)[prompt_N]
            better_N = (rewards_N - compared_N) / divisor_N * has_own_P[prompt_N]
            better_N = torch.where(better_N.abs() > EDGE, better_N, 0.0)  # equal up to rounding
            if self.foreign == "right":
                better_N = better_N.clamp(min=0)
            advantage_N = torch.where(of_source_N, better_N, advantage_N)
        return Advantages(advantage_N, baseline_N)

    def coefficients(self, source_N: Tensor, learner: int, omega_KK: Tensor) -> Tensor:
        """min(C_j / C_k, 1): a source weaker than the learner counts less, a stronger one does not count more."""
        if not self.cross_omega:
            return super().coefficients(source_N, learner, omega_KK)
        return torch.where(source_N == learner, 1.0, omega_KK[source_N, learner].clamp(max=1.0))

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        length_N = sequences.length_N
        old_length_N = length_N if self.ratio_unit == "learner" else sequences.old_length_N
        log_ratio_N = sequence_log_ratio(sequences.logp_N.detach(), length_N, sequences.old_logp_N, old_length_N)
        ratio_N = log_ratio_N.exp().clamp(max=1.0) if self.truncate else torch.ones_like(log_ratio_N)
        if self.foreign == "exact":
            exact_N = (sequences.logp_N.detach() - sequences.old_logp_N).clamp(max=0.0).exp()
            ratio_N = torch.where(sequences.advantage_N < 0, exact_N, ratio_N)
        weight_N = sequences.omega_N * ratio_N * as_if_on_policy(sequences)
        foreign = unbounded(weight_N, sequences.advantage_N, log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def explain(self, num_agents: int) -> Explanation:
        discounts = self.cross_omega and self.capability.ratio_min < 1
        weight = " times ".join(["min(s, 1)"] * self.truncate + ["min(ω, 1)"] * discounts) or "1 whatever its s"
        better = " with a reward above the learner's own mean on the prompt" if self.foreign == "right" else ""
        others = {
            "right": "; others are not used",
            "all": "",
            "centred": ". Its reward is compared with the mean of its source",
            "exact": ". Where A < 0, the learner's probability of the whole answer over its source's, at most 1, takes "
            "the place of min(s, 1)",
        }[self.foreign]
        effect = "below 1 the source's rollouts count for less by this factor, above 1 they do not count for more"
        return replace(
            super().explain(num_agents),
            ratio=ratio_sentence("both per token of the learner") if self.ratio_unit == "learner" else ratio_sentence(),
            weight=f"A foreign rollout{better} has the weight {weight}{others}.",
            capability=self.capability.sentence(self.reward_min, used=discounts),
            omega=f"{self.capability.omega_sentence()}; {effect}." if discounts else None,
        )
