"""Two models' log-probabilities of one text compared, token by token or by spans of equal text.

Plain Python: for the few tokens of one text that is faster than tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LONGEST_SPAN = 6
"""Tokens of a span, on either side: in longer ones a sum says little about a single token."""
CERTAIN = -1e-4
"""A span whose log-probability is above this has none that could be divided among its tokens."""


@dataclass(frozen=True)
class Reading:
    """A text in the tokens of one model."""

    logps: Sequence[float]
    """Log-probability of each token."""
    ends: Sequence[int] | None = None
    """Where in the text each token ends, never falling; one that ends inside a character ends where the next border is.
    None: its tokens are those of the model it is compared with."""


def common_spans(own_ends: Sequence[int], other_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest spans of text that begin and end at token borders of both models, as tokens of each.

    Tokens without text at the beginning belong to no span, nor do those behind the last common border.
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
    """How much more likely the text is for the other model, for each token of the own one; NaN where it is left out.

    With one vocabulary log p_other - log p_own. Else, with S the sum of a span, (S_other / S_own - 1) log p_own, which
    is the same where the span is one token for both.
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
