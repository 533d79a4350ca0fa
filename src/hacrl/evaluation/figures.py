"""Figures of several completions of each problem: avg@k, pass@k, best@k, maj@k, with intervals. NumPy alone.

P problems with K completions each. NaN is a completion that could not be judged: it counts as neither right nor wrong.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 9999

Interval = tuple[float, float]
Array = npt.NDArray[np.float64]


def pass_at(k: int, judged: int, right: int) -> float:
    """The chance that one of k completions is right, without bias: 1 - C(n-c, k) / C(n, k) of n judged, c right.

    Chen et al., arXiv 2107.03374. NaN with fewer than k completions.
    """
    return 1 - math.comb(judged - right, k) / math.comb(judged, k) if judged >= k else math.nan


def majority(votes: Sequence[int | None]) -> float:
    """Whether the most frequent answer is right: votes are 0 for the right answer, other numbers for other ones.

    Of several that are equally frequent one would be drawn: a right one among m of them gives 1/m. None, a completion
    without an answer or without a verdict, does not vote; nobody's vote gives 0.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    return 1 / list(counts.values()).count(most) if most and counts[0] == most else 0.0


def by_problem(correct_PK: npt.ArrayLike) -> dict[str, Array]:
    """A value for each problem: avg@K, pass@k for powers of two and for K, best@K; NaN where nothing was judged."""
    correct = np.asarray(correct_PK, dtype=float)
    K = correct.shape[1]
    judged_P = (~np.isnan(correct)).sum(1)
    right_P = np.nansum(correct, axis=1)
    missing_P = judged_P == 0
    average_P = np.where(missing_P, np.nan, right_P / np.maximum(judged_P, 1))
    found = {f"avg@{K}": average_P}
    if K == 1:
        return found
    for k in sorted({K, *(2**power for power in range(K.bit_length()))}):
        pairs = zip(judged_P.tolist(), right_P.tolist(), strict=True)
        found[f"pass@{k}"] = np.array([pass_at(k, judged, int(right)) for judged, right in pairs])
    found[f"best@{K}"] = np.where(missing_P, np.nan, (right_P > 0).astype(float))
    return found


def resampled_means(values: Sequence[float] | Array, seed: int = 0) -> Array:
    """Means of as many values, drawn from them with replacement: by how often each distinct value comes up."""
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=RESAMPLES)
    means: Array = drawn @ distinct / len(values)
    return means


def mean_interval(values: Sequence[float] | Array, level: float = 0.95) -> Interval:
    """The interval of the mean of values between 0 and 1, by resampling (BCa); always the same draws.

    Where all agree nothing varies: then Chernoff's bound, which for all 1 or all 0 is the exact binomial one. NaN
    without values.
    """
    data = np.asarray(values, dtype=float)
    if not len(data):
        return math.nan, math.nan
    if (data == data[0]).all():
        chance = np.array([(1 - level) / 2])
        low, high = (bound(data[0], len(data), chance, upper)[0] for upper in (False, True))
        return float(low), float(high)
    mean, draws, normal = data.mean(), resampled_means(data), NormalDist()
    # Equal means differ by rounding; they count half.
    below = (np.mean(draws < mean - 1e-12) + np.mean(draws <= mean + 1e-12)) / 2
    away = data - mean
    if not 0 < below < 1:
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)
    bias = normal.inv_cdf(float(below))
    acceleration = float((away**3).sum() / (6 * (away**2).sum() ** 1.5))
    shares = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + normal.inv_cdf(tail)
        shares.append(normal.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(draws, shares)
    return float(low), float(high)


def mean_over_sets(sets: Sequence[Array], level: float = 0.95) -> tuple[float, float, float]:
    """The mean of several sets' means, each set with the same weight, and its interval: problems are drawn within
    each set. NaN as soon as a set has no values."""
    known = [values[~np.isnan(values)] for values in sets]
    if not all(len(values) for values in known):
        return math.nan, math.nan, math.nan
    if len(known) == 1:
        return float(known[0].mean()), *mean_interval(known[0], level)
    mean = float(np.mean([values.mean() for values in known]))
    ends = []
    for upper, tail in ((False, (1 - level) / 2), (True, (1 + level) / 2)):
        draws = np.mean([_draws(values, seed, upper) for seed, values in enumerate(known)], axis=0)
        ends.append(float(np.quantile(draws, tail)))
    return mean, min(ends[0], mean), max(ends[1], mean)


def _draws(values: Array, seed: int, upper: bool) -> Array:
    """Means as likely as the sample has them. Where all agree that is no certainty: on either side, what the bound
    leaves to chance."""
    if (values == values[0]).all():
        return bound(values[0], len(values), np.random.default_rng(seed).uniform(size=RESAMPLES), upper)
    return resampled_means(values, seed)


def bound(value: float, count: int, chance: Array, upper: bool) -> Array:
    """How far the true mean may be from that of `count` values between 0 and 1 to let it come about with a chance of at
    least so much (Chernoff): exp(-count KL(value, mean)) = chance, found by bisection."""
    near, far = np.full_like(chance, value), np.full_like(chance, float(upper))
    for _ in range(60):
        middle = (near + far) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            right = value * np.log(value / middle) if value > 0 else 0.0
            wrong = (1 - value) * np.log((1 - value) / (1 - middle)) if value < 1 else 0.0
            beyond = count * (right + wrong) > -np.log(chance)
        near, far = np.where(beyond, near, middle), np.where(beyond, middle, far)
    return near
