"""F-TIS (arXiv 2605.22537): filtered, truncated importance sampling, token by token.

The rollouts of all agents on a prompt form one group. The gradient of a foreign token is weighted by how much more
likely the token is for the learner than for its source, truncated at `cap`. Wrong foreign rollouts (A < 0) far from
the learner are left out. Own rollouts are treated as in GSPO. Our interpretation: the values of `cap` and `kl_max`, and
the estimate of the divergence (k3, mean over tokens).

The method is defined only between agents with one vocabulary. `spread` is our extension to other agents: it spreads
the log-probability of a completion evenly over its tokens, which changes the weights of single tokens.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hacrl.algorithms.algorithm import Explanation
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.terms import LOG_RATIO_LIMIT, Sequences, Terms, k3_kl, mean_over_tokens, own_or_foreign, unbounded


@dataclass(frozen=True)
class FTIS(GSPO):
    shares_rollouts: ClassVar[bool] = True

    name: str = "ftis"
    cap: float = 2.0
    """Largest weight of a foreign token."""
    kl_max: float = 0.5
    """Foreign rollouts with A < 0 are left out if the KL divergence of source and learner, per token, is above this."""
    spread: bool = False
    """Whether to spread a source's log-probability evenly over the learner's tokens if their tokenizers differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap == 0:
            raise ValueError("cap must be above 0: with 0 nothing foreign is learned")

    @property
    def compares_tokens(self) -> bool:
        return not self.spread

    @property
    def needs_logps(self) -> bool:
        return True

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        logp_NT, old_logp_NT, mask_NT = sequences.logp_NT, sequences.old_logp_NT, sequences.mask_NT
        log_ratio_NT = torch.where(mask_NT, logp_NT.detach() - old_logp_NT, 0.0)
        weight_NT = log_ratio_NT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=self.cap)
        # The factor exp(logp - logp.detach()) is 1 and has the gradient of the log-probability.
        weight_N = mean_over_tokens(weight_NT * (logp_NT - logp_NT.detach()).exp(), mask_NT)
        left_out_N = (k3_kl(old_logp_NT, logp_NT.detach(), mask_NT) > self.kl_max) & (sequences.advantage_N < 0)
        foreign = unbounded(torch.where(left_out_N, 0.0, weight_N), sequences.advantage_N, own.log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def explain(self, num_agents: int) -> Explanation:
        decision = (
            "Decision: F-TIS is not defined between agents with different tokenizers; there a source's log-probability "
            "is spread evenly over the learner's tokens (algorithm.spread)."
        )
        return replace(
            super().explain(num_agents),
            weight=(
                "The weight of each token of a foreign rollout is how much more likely it is for the learner than for "
                f"its source, at most {self.cap:g}; s does not affect it."
            ),
            decision=decision if self.spread else None,
            wrong_filter=(
                "A foreign rollout with A < 0 is left out where the KL divergence between its source and the learner "
                f"is above {self.kl_max:g} per token."
            ),
        )
