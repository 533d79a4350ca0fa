"""On-policy distillation between agents: each learns from its own rollouts, whose tokens other agents score.

    A_t = reward_weight * A + weight * mean over teachers of (log p_teacher - log p_learner)

A is GRPO's advantage of the rollout; log p_learner is taken at sampling and has no gradient. If the teacher has
another vocabulary, the smallest spans of equal text are compared (`log_gap`, after arXiv 2606.09456). The mean of the
difference over the learner's own tokens estimates -KL(learner || teacher). The terms are those of GRPO with A_t.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hacrl.algorithms.advantage import Advantages
from hacrl.algorithms.algorithm import Explanation, Reading, ratio_sentence
from hacrl.algorithms.capability import CapabilityOptions
from hacrl.algorithms.grpo import GRPO

LONGEST_SPAN = 6
"""Most tokens of a span for either model: the sum over a longer span says little about a single token."""
CERTAIN = -1e-4
"""Spans with a log-probability above this are left out: it is too close to 0 to be divided among tokens."""


def common_spans(own_ends: Sequence[int], other_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest spans of text that begin and end at token borders of both models, as slices of both token lists.

    Leading tokens without text belong to no span, and neither do tokens after the last common border.
    """
    own, other, begin = 0, 0, 0
    for end in sorted(set(own_ends) & set(other_ends)):
        own_stop, other_stop = bisect_right(own_ends, end), bisect_right(other_ends, end)
        if end > begin:
            yield slice(own, own_stop), slice(other, other_stop)
        own, other, begin = own_stop, other_stop, end


def log_gap(own: Reading, other: Reading) -> list[float]:
    """How much more likely each token of `own` is for the other model, as a difference of logs; NaN where left out.

    With one vocabulary this is log p_other - log p_own. Otherwise it is (S_other / S_own - 1) log p_own, where S is the
    sum over a span. Both formulas agree if the span is one token for both models. This is plain Python, which is faster
    than tensors for the few tokens of one text.
    """
    if own.ends is None or other.ends is None:
        return [theirs - mine for mine, theirs in zip(own.logps, other.logps, strict=True)]
    gap = [math.nan] * len(own.logps)
    for mine, theirs in common_spans(own.ends, other.ends):
        own_sum, other_sum = sum(own.logps[mine]), sum(other.logps[theirs])
        longest = max(mine.stop - mine.start, theirs.stop - theirs.start)
        if longest <= LONGEST_SPAN and own_sum <= CERTAIN:
            gap[mine] = [(other_sum / own_sum - 1) * logp for logp in own.logps[mine]]
    return gap


@dataclass(frozen=True)
class OPD(GRPO):
    scores_by_others: ClassVar[bool] = True

    name: str = "opd"
    weight: float = 1.0
    """Weight of the teachers' scores in the advantage of a token."""
    reward_weight: float = 1.0
    """Weight of the advantage from rewards; with 0, agents learn by distillation alone."""
    teachers: Literal["all", "stronger"] = "all"
    """Who scores a learner's rollouts: every other agent, or only those with a higher capability C in this step."""
    clamp: float = 10.0
    """Limit of the difference of log-probabilities between a teacher and the learner at one token, either way."""

    def teachers_of(self, learner: int, capabilities: Sequence[float | None]) -> list[int]:
        others = [j for j in range(len(capabilities)) if j != learner]
        if self.teachers == "all":
            return others
        own = capabilities[learner]
        return [j for j in others if own is not None and (theirs := capabilities[j]) is not None and theirs > own]

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        found = super().advantages(rewards_N, prompt_N, source_N, learner, omega_KK)
        return replace(found, advantage_N=self.reward_weight * found.advantage_N)

    def token_advantages(self, own: Reading, others: Sequence[Reading | None]) -> Tensor:
        readers, unread = sum(other is not None for other in others), [math.nan] * len(own.logps)
        gaps = [unread if other is None else log_gap(own, other) for other in others]
        gap_JT = torch.tensor(gaps, dtype=torch.float64).view(len(others), len(own.logps))
        return self.weight / max(readers, 1) * gap_JT.clamp(-self.clamp, self.clamp)

    def explain(self, num_agents: int) -> Explanation:
        who = "the other agents" if self.teachers == "all" else "the agents with a higher C"
        band = (
            f"with the band {1 - self.epsilon:g} to {1 + self.epsilon_high:g}: above it a token with A > 0 teaches "
            "nothing, and below it one with A < 0; a rollout is kept if one of its tokens teaches."
        )
        if self.loss_type == "cispo":
            band = f"at most {self.epsilon_high:g}, and without a band."
        return Explanation(
            ratio=ratio_sentence(),
            own_weight=(
                f"A differs from token to token: it is {self.reward_weight:g} times the reward's, plus {self.weight:g} "
                f"times how much more likely the token is for {who} than it was for the learner (the mean of the "
                f"differences of log-probabilities, each at most {self.clamp:g} either way). Between tokenizers it is "
                f"taken over spans of equal text of at most {LONGEST_SPAN} tokens. The A shown for a rollout is the "
                "mean over its tokens. Each token has as its weight its own ratio, of now to when it was sampled, "
                f"{band}"
            ),
            capability=CapabilityOptions().sentence(used=self.teachers == "stronger"),
        )
