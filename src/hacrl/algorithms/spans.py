"""Compares the log-probabilities of two models for one text, token by token or by spans of equal text.

The code is plain Python, which is faster than tensors for the few tokens of one text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LONGEST_SPAN = 6
"""Most tokens of a span for either model: the sum over a longer span says little about a single token."""
CERTAIN = -1e-4
"""Spans with a log-probability above this are left out: it is too close to 0 to be divided among tokens."""


@dataclass(frozen=True)
class Reading:
    """A text in the tokens of one model."""

    logps: Sequence[float]
    """Log-probability of each token."""
    ends: Sequence[int] | None = None
    """Where in the text each token ends, never falling; one that ends inside a character ends where the next border is.
    None: the tokens are those of the model that this reading is compared with."""


def common_spans(own_ends: Sequence[int], other_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest spans of text that begin and end at token borders of both models, as slices of both token lists.

    Leading tokens without text belong to no span, and neither do tokens after the last common border.
    """
    own, other, begin = 0, 0, 0
    for end in sorted(set(own_ends) & set(other_ends)):
        own_stop, other_stop = own, other
        while own_stop < len(own_ends) and own_ends[own_stop] <= end:
            own_stop += 1
        while other_stop < len(other_ends) and other_ends[other_stop] <= end:
            other_stop += 1
        if end > begin:
            yield slice(own, own_stop), slice(other, other_stop)
        own, other, begin = own_stop, other_stop, end


def log_gap(own: Reading, other: Reading) -> list[float]:
    """How much more likely each token of `own` is for the other model, as a difference of logs; NaN where left out.

    With one vocabulary this is log p_other - log p_own. Otherwise it is (S_other / S_own - 1) log p_own, where S is the
    sum over a span. Both formulas agree if the span is one token for both models.
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
