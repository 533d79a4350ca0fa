"""F-TIS (arXiv 2605.22537): filtered, truncated importance sampling, token by token.

Everybody's rollouts of a prompt are one group. A foreign token's gradient is weighted by how much more
likely it is for the learner than for its source, truncated at `cap`. Wrong foreign rollouts (A < 0) far from
the learner are left out. Own rollouts are treated as in GSPO. As we read it: the values of `cap` and
`kl_max`, and the estimate of the divergence (k3, mean over tokens).

The method is defined between agents with one vocabulary. `spread` lets others take part, which is ours: the same
log-probability of a completion, spread evenly, gives its tokens other weights.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from hacrl.algorithms.algorithm import Algorithm, Sequences, Terms
from hacrl.algorithms.explanation import Explanation
from hacrl.algorithms.foreign import mean_over_tokens, own_or_foreign, unbounded
from hacrl.algorithms.gspo import gspo_explanation, gspo_terms
from hacrl.algorithms.importance import LOG_RATIO_LIMIT, k3_kl


@dataclass(frozen=True)
class FTIS(Algorithm):
    shares_rollouts: ClassVar[bool] = True

    name: Literal["ftis"] = "ftis"
    epsilon: float = 3.0e-4
    epsilon_high: float = 4.0e-4
    cap: float = 2.0
    """The largest weight of a foreign token."""
    kl_max: float = 0.5
    """Foreign rollouts with A < 0 are left out where KL(source || learner) per token is above this."""
    spread: bool = False
    """Spread a source's log-probability evenly over the learner's tokens where their tokenizers differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap == 0:
            raise ValueError("cap must be above 0: with 0 nothing foreign is learned")

    @property
    def compares_tokens(self) -> bool:
        return not self.spread

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = gspo_terms(sequences, self.epsilon, self.epsilon_high, self.loss_type)
        logp_NT, old_logp_NT, mask_NT = sequences.logp_NT, sequences.old_logp_NT, sequences.mask_NT
        log_ratio_NT = torch.where(mask_NT, logp_NT.detach() - old_logp_NT, 0.0)
        weight_NT = log_ratio_NT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=self.cap)
        # A factor of 1 whose gradient is that of the log-probability.
        weight_N = mean_over_tokens(weight_NT * (logp_NT - logp_NT.detach()).exp(), mask_NT)
        far_N = k3_kl(old_logp_NT, logp_NT.detach(), mask_NT) > self.kl_max
        left_out_N = far_N & (sequences.advantage_N < 0)
        foreign = unbounded(torch.where(left_out_N, 0.0, weight_N), sequences.advantage_N, own.log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def explain(self, num_agents: int) -> Explanation:
        return replace(
            gspo_explanation(self.epsilon, self.epsilon_high, self.loss_type),
            weight=(
                "The weight of each token of a foreign rollout is how much more likely it is for the learner than for "
                f"its source, at most {self.cap:g}; s does not affect it."
            ),
            decision=(
                "Decision: F-TIS is not defined between agents with different tokenizers; there a source's "
                "log-probability is spread evenly over the learner's tokens (algorithm.spread)."
            )
            if self.spread
            else None,
            wrong_filter=(
                "A foreign rollout with A < 0 is left out where the KL divergence between its source and the learner "
                f"is above {self.kl_max:g} per token."
            ),
        )
