"""Naive sharing: GSPO on everybody's rollouts as if they were the learner's own.

One pooled mean and standard deviation, one pooled mean of the terms, no capability; the ratio is
taken against the source's log-probabilities. The paper's negative control.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hacrl.algorithms.algorithm import Algorithm, Sequences, Terms
from hacrl.algorithms.gspo import gspo_terms


@dataclass(frozen=True)
class Naive(Algorithm):
    shares_rollouts: ClassVar[bool] = True

    name: Literal["naive"] = "naive"
    epsilon: float = 3.0e-4
    epsilon_high: float = 4.0e-4

    def terms(self, sequences: Sequences, update: int) -> Terms:
        return gspo_terms(sequences, self.epsilon, self.epsilon_high)
