"""GSPO (arXiv 2507.18071): one ratio for a whole sequence, clipped tightly."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Algorithm, Explanation, LossType, ratio_sentence
from hacrl.algorithms.capability import CapabilityOptions
from hacrl.algorithms.terms import Sequences, Terms, as_if_on_policy, banded, has_gradient, unbounded


def clipped_minimum(ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float) -> tuple[Tensor, Tensor]:
    """min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A) of sequences or tokens, and a mask of what has a gradient."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    too_high = (advantage > 0) & (ratio > 1 + epsilon_high)
    too_low = (advantage < 0) & (ratio < 1 - epsilon)
    return objective, ~too_high & ~too_low & (advantage != 0)


def clipped_ratio(ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """The factor of A in `clipped_minimum`."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return torch.where(advantage >= 0, torch.minimum(ratio, clipped), torch.maximum(ratio, clipped))


def gspo_terms(sequences: Sequences, epsilon: float, epsilon_high: float, loss_type: LossType) -> Terms:
    """min(s A, clip(s) A) with s = exp(logp / len - old_logp / old_len); for `cispo` min(s, epsilon_high) A logp / len,
    without a gradient through the minimum.
    """
    log_ratio_N, advantage_N = sequences.log_ratio_N, sequences.advantage_N
    ratio_N = log_ratio_N.exp()
    if loss_type == "cispo":
        weight_N = ratio_N.detach().clamp(max=epsilon_high) * as_if_on_policy(sequences)
        return unbounded(weight_N, advantage_N, log_ratio_N.detach())
    objective_N, kept_N = clipped_minimum(ratio_N, advantage_N, epsilon, epsilon_high)
    weight_N = clipped_ratio(ratio_N, advantage_N, epsilon, epsilon_high)
    return banded(objective_N, log_ratio_N, 1 - epsilon, 1 + epsilon_high, kept_N & has_gradient(log_ratio_N), weight_N)


def gspo_explanation(epsilon: float, epsilon_high: float, loss_type: LossType) -> Explanation:
    """Explain how GSPO uses own rollouts, and that it does not use capability."""
    band = "It has no band." if loss_type == "cispo" else clip_sentence("Its band", epsilon, epsilon_high)
    return Explanation(
        ratio=ratio_sentence(),
        own_weight=f"An own rollout has the weight {weight_of(epsilon_high, loss_type)}. {band}",
        capability=CapabilityOptions().sentence(),
    )


def weight_of(epsilon_high: float, loss_type: LossType) -> str:
    """The factor of A in `gspo_terms`, as text."""
    return f"min(s, {epsilon_high:g})" if loss_type == "cispo" else "s"


def clip_sentence(band: str, epsilon: float, epsilon_high: float) -> str:
    """A sentence that explains the clip of `gspo_terms`; `band` is its subject, such as "Its band"."""
    nothing = "it teaches nothing where A > 0 and s is above, or where A < 0 and s is below."
    return f"{band} is {1 - epsilon:g} to {1 + epsilon_high:g}: {nothing}"


@dataclass(frozen=True)
class GSPO(Algorithm):
    name: Literal["gspo"] = "gspo"
    epsilon: float = 3.0e-4
    """Lower clip of ratios: 1 minus this."""
    epsilon_high: float = 4.0e-4
    """Upper clip of ratios: 1 plus this; with cispo, this itself."""

    def terms(self, sequences: Sequences, update: int) -> Terms:
        return gspo_terms(sequences, self.epsilon, self.epsilon_high, self.loss_type)

    def explain(self, num_agents: int) -> Explanation:
        return gspo_explanation(self.epsilon, self.epsilon_high, self.loss_type)
