"""Figures of several completions of each problem: avg@k, pass@k, best@k, maj@k, with intervals.

P problems with K completions each. NaN is a completion that could not be judged: it counts as neither right nor wrong.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hacrl.statistics import Array, mean_interval

NO_ROOM = "no_room"
"""Finish reason of a completion that was not sampled, because its prompt does not fit into the model."""

Line = dict[str, Any]
"""A completion with its verdict, as it is written down."""
Figure = dict[str, float | None]


def pass_at(k: int, judged: int, right: int) -> float:
    """The chance that one of k completions is right, without bias: 1 - C(n-c, k) / C(n, k) of n judged, c right. NaN
    with fewer than k completions. Chen et al., arXiv 2107.03374."""
    return 1 - math.comb(judged - right, k) / math.comb(judged, k) if judged >= k else math.nan


def majority(votes: Sequence[int | None]) -> float:
    """Whether the most frequent answer is right: votes are 0 for the right answer, other numbers for other ones.

    If m answers are equally frequent and one of them is right, this is 1/m. None is a completion without an answer or
    without a verdict, and does not vote. Without any votes this is 0.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    return 1 / list(counts.values()).count(most) if most and counts[0] == most else 0.0


def by_problem(correct_PK: npt.ArrayLike) -> dict[str, Array]:
    """A value for each problem: avg@K, pass@k for powers of two and for K, best@K; NaN where nothing was judged."""
    correct = np.asarray(correct_PK, dtype=float)
    K = correct.shape[1]
    judged_P, right_P = (~np.isnan(correct)).sum(1), np.nansum(correct, axis=1)
    missing_P = judged_P == 0
    found = {f"avg@{K}": np.where(missing_P, np.nan, right_P / np.maximum(judged_P, 1))}
    if K == 1:
        return found
    for k in sorted({K, *(2**power for power in range(K.bit_length()))}):
        pairs = zip(judged_P.tolist(), right_P.astype(int).tolist(), strict=True)
        found[f"pass@{k}"] = np.array([pass_at(k, *pair) for pair in pairs])
    found[f"best@{K}"] = np.where(missing_P, np.nan, (right_P > 0).astype(float))
    return found


def by_problem_with_votes(groups: Sequence[Sequence[Line]]) -> dict[str, Array]:
    """`by_problem` of the completions of each problem, with maj@K where there are several."""
    correct_PK = np.array([[np.nan if line["reward"] is None else line["reward"] for line in own] for own in groups])
    values, K = by_problem(correct_PK), len(groups[0])
    if K > 1:
        majorities = np.array([majority([line["vote"] for line in own]) for own in groups])
        values[f"maj@{K}"] = np.where(np.isnan(correct_PK).all(1), np.nan, majorities)
    return values


def summary(lines: Sequence[Line], values: dict[str, Array]) -> dict[str, Any]:
    """Counts of all completions of a benchmark, and each figure's mean over problems with its interval."""
    figures = {}
    for name, value_P in values.items():
        known = value_P[~np.isnan(value_P)]
        mean = float(known.mean()) if len(known) else math.nan
        figures[name] = {**figure(mean, *mean_interval(known)), "problems": len(known)}
    return {
        "completions": len(lines),
        "unverified": sum(line["reward"] is None for line in lines),
        "cut_off": sum(line["finish_reason"] == "length" for line in lines),
        "no_room": sum(line["finish_reason"] == NO_ROOM for line in lines),
        "mean_tokens": sum(line["num_tokens"] for line in lines) / len(lines),
        "figures": figures,
    }


def figure(value: float, low: float, high: float) -> Figure:
    """A value with its interval as JSON has them: a number that is not finite is null."""
    numbers = {"value": value, "low": low, "high": high}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
