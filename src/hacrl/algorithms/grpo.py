"""GRPO (arXiv 2402.03300) with clip-higher: a ratio and a clip for each token."""

from dataclasses import dataclass

import torch

from hacrl.algorithms.algorithm import Algorithm, Explanation, ratio_sentence
from hacrl.algorithms.capability import CapabilityOptions
from hacrl.algorithms.gspo import clipped_minimum, clipped_ratio
from hacrl.algorithms.terms import LOG_RATIO_LIMIT, Sequences, Terms, banded, mean_over_tokens


@dataclass(frozen=True)
class GRPO(Algorithm):
    name: str = "grpo"
    epsilon: float = 0.2
    """Lower clip of ratios: 1 minus this."""
    epsilon_high: float = 0.28
    """Upper clip of ratios: 1 plus this; with cispo, this itself."""

    def terms(self, sequences: Sequences, update: int) -> Terms:
        """Mean over a rollout's tokens of min(r_t A, clip(r_t) A); for `cispo`, of min(r_t, epsilon_high) A log p_t,
        without a gradient through the minimum.
        """
        mask_NT, advantage_NT, clip = sequences.mask_NT, sequences.advantage_NT, (self.epsilon, self.epsilon_high)
        log_ratio_NT = torch.where(mask_NT, sequences.logp_NT - sequences.old_logp_NT, 0.0)
        ratio_NT = log_ratio_NT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if self.loss_type == "cispo":
            lower, upper = 0.0, torch.inf
            weight_NT = ratio_NT.detach().clamp(max=self.epsilon_high)
            objective_NT = weight_NT * (sequences.logp_NT - sequences.logp_NT.detach()).exp() * advantage_NT
            kept_NT = advantage_NT != 0
        else:
            lower, upper = 1 - self.epsilon, 1 + self.epsilon_high
            weight_NT = clipped_ratio(ratio_NT, advantage_NT, *clip)
            objective_NT, kept_NT = clipped_minimum(ratio_NT, advantage_NT, *clip)
        if sequences.token_weight_NT is not None:
            weight_NT, objective_NT = weight_NT * sequences.token_weight_NT, objective_NT * sequences.token_weight_NT
        objective_N, log_ratio_N = mean_over_tokens(objective_NT, mask_NT), mean_over_tokens(log_ratio_NT, mask_NT)
        weight_N = mean_over_tokens(weight_NT, mask_NT)
        return banded(objective_N, log_ratio_N, lower, upper, (kept_NT & mask_NT).any(1), weight_N)

    def explain(self, num_agents: int) -> Explanation:
        band = (
            f"Its band is {1 - self.epsilon:g} to {1 + self.epsilon_high:g}: the token teaches nothing where A > 0 and "
            "its ratio is above, or where A < 0 and its ratio is below; a rollout is kept if one of its tokens teaches."
        )
        if self.loss_type == "cispo":
            band = f"The weight is at most {self.epsilon_high:g}; there is no band."
        return Explanation(
            ratio=ratio_sentence(),
            own_weight=(
                "Each token of an own rollout has its own ratio as its weight: how likely it is now over how likely it "
                f"was when it was sampled. {band}"
            ),
            capability=CapabilityOptions().sentence(),
        )
