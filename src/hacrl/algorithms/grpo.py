"""GRPO (arXiv 2402.03300) with clip-higher: a ratio and a clip for each token."""

from dataclasses import dataclass
from typing import Literal

import torch

from hacrl.algorithms.algorithm import Algorithm, LossType, Sequences, Terms
from hacrl.algorithms.capability import CapabilityOptions, capability_sentence
from hacrl.algorithms.clipping import clipped_minimum
from hacrl.algorithms.explanation import Explanation, ratio_sentence
from hacrl.algorithms.foreign import mean_over_tokens
from hacrl.algorithms.importance import LOG_RATIO_LIMIT


def grpo_terms(sequences: Sequences, epsilon: float, epsilon_high: float, loss_type: LossType) -> Terms:
    """Mean over a rollout's tokens of min(r_t A, clip(r_t) A); for `cispo`, of min(r_t, epsilon_high) A log p_t.

    No gradient goes through the minimum of `cispo`.
    """
    mask_NT = sequences.mask_NT
    log_ratio_NT = torch.where(mask_NT, sequences.logp_NT - sequences.old_logp_NT, 0.0)
    ratio_NT = log_ratio_NT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantage_NT = sequences.advantage_NT
    if loss_type == "cispo":
        weight_NT = ratio_NT.detach().clamp(max=epsilon_high)
        on_policy_NT = (sequences.logp_NT - sequences.logp_NT.detach()).exp()
        log_ratio_N = mean_over_tokens(log_ratio_NT.detach(), mask_NT)
        return Terms(
            mean_over_tokens(weight_NT * on_policy_NT * advantage_NT, mask_NT),
            log_ratio_N,
            torch.zeros_like(log_ratio_N),
            torch.full_like(log_ratio_N, torch.inf),
            ((advantage_NT != 0) & mask_NT).any(1),
            mean_over_tokens(weight_NT, mask_NT),
        )
    objective_NT, kept_NT = clipped_minimum(ratio_NT, advantage_NT, epsilon, epsilon_high)
    length_N = mask_NT.sum(1).clamp(min=1)
    objective_N = (objective_NT * mask_NT).sum(1) / length_N
    clipped_NT = ratio_NT.clamp(1 - epsilon, 1 + epsilon_high)
    weight_NT = torch.where(
        advantage_NT >= 0,
        torch.minimum(ratio_NT, clipped_NT),
        torch.maximum(ratio_NT, clipped_NT),
    )
    return Terms(
        objective_N,
        (log_ratio_NT.sum(1) / length_N).detach(),
        torch.full_like(objective_N, 1 - epsilon),
        torch.full_like(objective_N, 1 + epsilon_high),
        (kept_NT & mask_NT).any(1),
        ((weight_NT * mask_NT).sum(1) / length_N).detach(),
    )


@dataclass(frozen=True)
class GRPO(Algorithm):
    name: Literal["grpo"] = "grpo"
    epsilon: float = 0.2
    epsilon_high: float = 0.28

    def terms(self, sequences: Sequences, update: int) -> Terms:
        return grpo_terms(sequences, self.epsilon, self.epsilon_high, self.loss_type)

    def explain(self, num_agents: int) -> Explanation:
        band = (
            f"Its band is {1 - self.epsilon:g} to {1 + self.epsilon_high:g}: the token "
            "teaches nothing where A > 0 and its ratio is above, or where A < 0 and its ratio is below; a rollout "
            "is kept if one of its tokens teaches."
        )
        if self.loss_type == "cispo":
            band = f"The weight is at most {self.epsilon_high:g}; there is no band."
        return Explanation(
            ratio=ratio_sentence(),
            own_weight=(
                "Each token of an own rollout has its own ratio as its weight: how likely it is now over how likely it "
                f"was when it was sampled. {band}"
            ),
            capability=capability_sentence(CapabilityOptions(), used=False),
        )
