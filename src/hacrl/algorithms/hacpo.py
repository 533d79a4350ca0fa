"""HACPO (arXiv 2603.02604): GSPO on the rollouts of all agents, with four mechanisms meant to make this safe.

The paper's names for them, and the functions that compute them:

1. agent-capability-aware advantage estimation    advantage.capability_advantages
2. model capabilities discrepancy coefficient     omega(j, k) on foreign rollouts: HACPO.coefficients
3. exponential importance sampling                hacpo.exponential_ratio
4. stepwise clipping                              hacpo.stepwise_clip

Own rollouts are treated as in GSPO: with one agent, HACPO is GSPO.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hacrl.algorithms.advantage import Advantages, capability_advantages
from hacrl.algorithms.algorithm import CapabilityAware, Explanation, ratio_sentence
from hacrl.algorithms.capability import shifted
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.terms import Sequences, Terms, banded, has_gradient, own_or_foreign, sequence_log_ratio


def exponential_ratio(ratio_N: Tensor, alpha: float) -> Tensor:
    """s * stopgrad(min(s, 1))^alpha: the less likely an answer is for the learner, the less the learner moves."""
    return ratio_N * ratio_N.detach().clamp(max=1.0) ** alpha


def stepwise_lower_bound(update: int, delta: float, delta_step: float) -> float:
    """lo_u = min(1 - delta + u * delta_step, 1), where u counts the updates already made in this step."""
    return min(1.0 - delta + update * delta_step, 1.0)


def stepwise_clip(ratio_N: Tensor, lower: float) -> tuple[Tensor, Tensor]:
    """clip(s, lo_u, 1), and a mask of the rollouts whose s lies in the band: others have no gradient, whatever A is."""
    return ratio_N.clamp(lower, 1.0), (ratio_N >= lower) & (ratio_N <= 1.0)


@dataclass(frozen=True)
class HACPO(CapabilityAware, GSPO):
    name: str = "hacpo"
    alpha: float = 1.0
    """Exponent of the exponential importance weight; 0 switches the weight off."""
    delta: float = 0.2
    """In the first update of a step, foreign rollouts with s in [1 - delta, 1] are learned from."""
    delta_step: float = 0.025
    """How much the lower bound of s rises with each update of a step."""
    baseline: Literal["capability", "joint"] = "capability"
    """What rewards are compared with. `joint` sets omega to 1 in the baseline: the ablation of mechanism 1."""
    cross_baseline: Literal["learner", "source"] = "learner"
    """Whose baseline a foreign rollout is compared with."""
    baseline_guard: bool = True
    """Replace a baseline outside the range of a prompt's rewards by the learner's own mean reward on the prompt."""
    cross_omega: bool = True
    """Whether foreign rollouts are multiplied by omega(j, k). False is the ablation of mechanism 2."""
    cross_clip: bool = True
    """Whether foreign rollouts have a band. False is an ablation of mechanism 4."""
    allow_closed_band: bool = False
    """Accept settings whose band closes, so that the last updates of a step use no foreign rollouts."""
    ratio_unit: Literal["token", "byte"] = "token"
    """Unit of length that foreign log-probabilities are divided by. Own ratios are always those of GSPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.delta <= 1:
            printed = "table 5 of the paper, version 1, prints the lower bound 1 - delta (0.8) under this name"
            raise ValueError(f"delta must lie in (0, 1], but is {self.delta}; {printed}")

    @property
    def needs_logps(self) -> bool:
        return True

    def check_schedule(self, updates_per_step: int) -> None:
        last = stepwise_lower_bound(updates_per_step - 1, self.delta, self.delta_step)
        if self.cross_clip and self.cross_weight > 0 and last >= 1 - 1e-12 and not self.allow_closed_band:
            small = 0.999 * self.delta / max(updates_per_step - 1, 1)
            raise ValueError(
                f"with delta {self.delta} and delta_step {self.delta_step} the band of foreign ratios closes before "
                f"the last of the {updates_per_step} updates of a step; use a delta_step below {small:.3g}, fewer "
                "updates (a larger rollouts_per_update), or allow_closed_band: true"
            )

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        rewards_N = shifted(rewards_N, self.reward_min)
        omega_KK = omega_KK if self.baseline == "capability" else torch.ones_like(omega_KK)
        options = self.cross_baseline, self.baseline_guard, self.scale_rewards
        return capability_advantages(rewards_N, prompt_N, source_N, learner, omega_KK, *options)

    def coefficients(self, source_N: Tensor, learner: int, omega_KK: Tensor) -> Tensor:
        """omega(j, k) = C_j / C_k for a rollout of source j: the reciprocal of the omega in the baseline."""
        if not self.cross_omega:
            return super().coefficients(source_N, learner, omega_KK)
        return torch.where(source_N == learner, 1.0, omega_KK[source_N, learner])

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        return own_or_foreign(sequences.own_N, own, self._foreign_terms(sequences, update))

    def _foreign_terms(self, sequences: Sequences, update: int) -> Terms:
        """c * stopgrad(min(c, 1))^alpha * omega(j, k) * A with c = clip(s, lo_u, 1), or c = s without a band."""
        length_N, old_length_N = sequences.length_N, sequences.old_length_N
        if self.ratio_unit == "byte":
            length_N = old_length_N = sequences.bytes_N.clamp(min=1)
        log_ratio_N = sequence_log_ratio(sequences.logp_N, length_N, sequences.old_logp_N, old_length_N)
        ratio_N, kept_N, lower, upper = log_ratio_N.exp(), has_gradient(log_ratio_N), 0.0, torch.inf
        if self.cross_clip:
            lower, upper = stepwise_lower_bound(update, self.delta, self.delta_step), 1.0
            ratio_N, inside_N = stepwise_clip(ratio_N, lower)
            kept_N = kept_N & inside_N
        weight_N = exponential_ratio(ratio_N, self.alpha) * sequences.omega_N
        return banded(weight_N * sequences.advantage_N, log_ratio_N, lower, upper, kept_N, weight_N)

    def explain(self, num_agents: int) -> Explanation:
        power = f"s to the power of {1 + self.alpha:g}"
        if not self.cross_clip:
            power = f"s times min(s, 1) to the power of {self.alpha:g}"
        times = ", times ω" if self.cross_omega else ""
        lower = f"{1 - self.delta:g}"
        if self.delta_step > 0:
            lower += f" (in the first update of a step, and {self.delta_step:g} higher in each further one)"
        effects = []
        if self.cross_omega:
            effects.append("the source's rollouts are multiplied by it, so that a stronger source counts for more")
        if self.baseline == "capability":
            effects.append("the learner's baseline multiplies the source's rewards by the inverse ratio")
        acts = bool(effects) and self.capability.ratio_min < self.capability.ratio_max
        others, what = num_agents - 1, "rollouts" if self.loss_type in ("grpo", "dr_grpo") else "tokens"
        decision = (
            f"Decision: the paper's HACPO has two agents; with {num_agents}, each of the {others} others adds the mean "
            f"over its {what} with weight {self.cross_weight:g} (algorithm.cross_weight), together "
            f"{others * self.cross_weight:g}, against 1 for the mean over the learner's own."
        )
        band = f"A foreign rollout teaches only inside its band: where s lies between {lower} and 1."
        in_bytes = "foreign ones per byte of the text, own ones per token"
        return replace(
            super().explain(num_agents),
            ratio=ratio_sentence(in_bytes) if self.ratio_unit == "byte" else ratio_sentence(),
            weight=f"A foreign rollout has the weight {power if self.alpha else 's'}{times}.",
            band=band if self.cross_clip else None,
            capability=self.capability.sentence(self.reward_min, used=acts),
            omega=f"{self.capability.omega_sentence()}; {', and '.join(effects)}." if acts else None,
            decision=decision if num_agents > 2 else None,
        )
