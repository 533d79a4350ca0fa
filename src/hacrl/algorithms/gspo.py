"""GSPO (arXiv 2507.18071): one ratio for a whole sequence, clipped tightly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Algorithm, Explanation, ratio_sentence
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


@dataclass(frozen=True)
class GSPO(Algorithm):
    name: str = "gspo"
    epsilon: float = 3.0e-4
    """Lower clip of GSPO's ratios: 1 minus this."""
    epsilon_high: float = 4.0e-4
    """Upper clip of GSPO's ratios: 1 plus this; with cispo, this itself."""

    def terms(self, sequences: Sequences, update: int) -> Terms:
        """min(s A, clip(s) A) with s = exp(logp / len - old_logp / old_len); for `cispo` min(s, epsilon_high) A logp /
        len, without a gradient through the minimum."""
        log_ratio_N, advantage_N = sequences.log_ratio_N, sequences.advantage_N
        ratio_N, clip = log_ratio_N.exp(), (self.epsilon, self.epsilon_high)
        if self.loss_type == "cispo":
            weight_N = ratio_N.detach().clamp(max=self.epsilon_high) * as_if_on_policy(sequences)
            return unbounded(weight_N, advantage_N, log_ratio_N.detach())
        objective_N, kept_N = clipped_minimum(ratio_N, advantage_N, *clip)
        weight_N, kept_N = clipped_ratio(ratio_N, advantage_N, *clip), kept_N & has_gradient(log_ratio_N)
        return banded(objective_N, log_ratio_N, 1 - self.epsilon, 1 + self.epsilon_high, kept_N, weight_N)

    def explain(self, num_agents: int) -> Explanation:
        band = "It has no band." if self.loss_type == "cispo" else self._clip_sentence("Its band")
        own_weight = f"An own rollout has the weight {self._weight()}. {band}"
        return Explanation(ratio_sentence(), own_weight, capability=CapabilityOptions().sentence())

    def _weight(self) -> str:
        """The factor of A, as text."""
        return f"min(s, {self.epsilon_high:g})" if self.loss_type == "cispo" else "s"

    def _clip_sentence(self, band: str) -> str:
        """A sentence that explains the clip; `band` is its subject, such as "Its band"."""
        nothing = "it teaches nothing where A > 0 and s is above, or where A < 0 and s is below."
        return f"{band} is {1 - self.epsilon:g} to {1 + self.epsilon_high:g}: {nothing}"
