"""Every interval and test of the project: of few seeds, of rewards, and of problems with several completions each."""

import math
import warnings
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy import stats

EXACT = 16
"""Up to this many differences all sign flips are enumerated; beyond, as many are drawn as that gives."""
RESAMPLES = 9999
"""Samples that each bootstrap draws."""
LEVEL = 0.95
TAILS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
"""Where intervals begin and end."""
Z = 1.96
"""Standard deviations on each side of a mean in its 95 % interval, as tables have it."""

Interval = tuple[float, float]
Array = npt.NDArray[np.float64]


# --- seeds -----------------------------------------------------------------------------------------


def t_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean by Student's t: exact for normal values, close to it for others from three on."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf(TAILS[1], len(values) - 1)) * error
    return mean - half, mean + half


def bootstrap_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean by resampling: BCa, or percentiles where BCa has no answer; the draws never change."""
    data = (np.asarray(values, dtype=float),)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BCa warns where all values are equal
            random = np.random.default_rng(0)
            result = stats.bootstrap(
                data, np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, method=method, rng=random
            )
        low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
        if math.isfinite(low) and math.isfinite(high):
            break
    return low, high


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of "the sign of each paired difference is a coin's": the share of flips with a mean as far from 0.

    Exact for up to 16 differences. With n of them it is never below 2 / 2**n: 0.25 for three, 0.0625 for five.
    """
    values = np.asarray(differences, dtype=float)
    count = len(values)
    if count <= EXACT:
        flips = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
    else:
        flips = 1 - 2 * np.random.default_rng(0).integers(2, size=(2**EXACT, count))
        flips[0] = 1  # what was seen is one of the possible ones: p is never 0
    sums = np.abs(flips @ values)
    observed = abs(values.sum())
    # Equal sums differ by rounding, for which scipy.stats.permutation_test leaves no room where they are 0.
    return float(np.mean(sums >= observed - 1e-9 * np.abs(values).sum()))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values: at most a share `level` of tables without any effect has one below `level`."""
    known = sorted((p, position) for position, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, position) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        adjusted[position] = highest
    return adjusted


def effect_size(differences: Sequence[float]) -> float | None:
    """Mean over standard deviation of paired differences (Cohen's d_z), times Hedges' correction for few of them.

    None for fewer than three, where the correction is 0, and where all differences are equal.
    """
    count = len(differences)
    deviation = float(np.std(differences, ddof=1)) if count > 2 else 0.0
    if deviation <= 1e-12:
        return None
    free = count - 1
    correction = math.exp(math.lgamma(free / 2) - math.lgamma((free - 1) / 2)) / math.sqrt(free / 2)
    return correction * float(np.mean(differences)) / deviation


# --- rewards and problems --------------------------------------------------------------------------


def reward_interval(rewards: Sequence[float]) -> Interval:
    """95 % interval of a mean reward: Wilson's for right and wrong, which is honest for few problems, else the normal
    one. NaN without rewards."""
    count = len(rewards)
    if count == 0:
        return math.nan, math.nan
    if set(rewards) <= {0.0, 1.0}:
        level = 2 * NormalDist().cdf(Z) - 1
        wilson = stats.binomtest(int(sum(rewards)), count).proportion_ci(level, "wilson")
        return float(wilson.low), float(wilson.high)
    mean = sum(rewards) / count
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(count - 1, 1)
    half = Z * math.sqrt(variance / count)
    return mean - half, mean + half


def mean_interval(values: Sequence[float] | Array) -> Interval:
    """95 % interval of the mean of values between 0 and 1, by resampling (BCa); the draws never change.

    Where all values are equal, Chernoff's bound, which for all 1 or all 0 is the exact binomial one. NaN without any.
    """
    data = np.asarray(values, dtype=float)
    if not len(data):
        return math.nan, math.nan
    tails: Sequence[float] = TAILS
    if (data == data[0]).all():
        low, high = (chernoff_bound(data[0], len(data), np.array(tails[:1]), upper)[0] for upper in (False, True))
        return float(low), float(high)
    mean, draws, normal = data.mean(), resampled_means(data), NormalDist()
    # Equal means differ by rounding; they count half.
    below = (np.mean(draws < mean - 1e-12) + np.mean(draws <= mean + 1e-12)) / 2
    if 0 < below < 1:
        bias, away = normal.inv_cdf(float(below)), data - mean
        acceleration = float((away**3).sum() / (6 * (away**2).sum() ** 1.5))
        shifted = [bias + normal.inv_cdf(tail) for tail in tails]
        tails = [normal.cdf(bias + z / (1 - acceleration * z)) for z in shifted]
    low, high = np.quantile(draws, tails)
    return float(low), float(high)


def mean_over_sets(sets: Sequence[Array]) -> tuple[float, float, float]:
    """Mean of several sets' means, each with the same weight, and its 95 % interval: problems are drawn within sets.

    NaN as soon as a set has no values.
    """
    known = [values[~np.isnan(values)] for values in sets]
    if not all(len(values) for values in known):
        return math.nan, math.nan, math.nan
    if len(known) == 1:
        return float(known[0].mean()), *mean_interval(known[0])
    mean = float(np.mean([values.mean() for values in known]))
    ends = []
    for upper, tail in zip((False, True), TAILS, strict=True):
        draws = np.mean([_draws(values, seed, upper) for seed, values in enumerate(known)], axis=0)
        ends.append(float(np.quantile(draws, tail)))
    return mean, min(ends[0], mean), max(ends[1], mean)


def resampled_means(values: Sequence[float] | Array, seed: int = 0) -> Array:
    """Means of as many values, drawn from them with replacement: by how often each distinct value comes up."""
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=RESAMPLES)
    means: Array = drawn @ distinct / len(values)
    return means


def _draws(values: Array, seed: int, upper: bool) -> Array:
    """Means of one set as likely as its sample makes them. Equal values are not taken for certainty: then the means
    lie on one side, as far away as the bound allows by chance."""
    if (values == values[0]).all():
        return chernoff_bound(values[0], len(values), np.random.default_rng(seed).uniform(size=RESAMPLES), upper)
    return resampled_means(values, seed)


def chernoff_bound(value: float, count: int, chance: Array, upper: bool) -> Array:
    """Farthest true mean for which `count` values between 0 and 1 have the mean `value` with at least this chance.

    The root of exp(-count KL(value, mean)) = chance above or below `value`, found by bisection.
    """
    near, far = np.full_like(chance, value), np.full_like(chance, float(upper))
    for _ in range(60):
        middle = (near + far) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            right = value * np.log(value / middle) if value > 0 else 0.0
            wrong = (1 - value) * np.log((1 - value) / (1 - middle)) if value < 1 else 0.0
            beyond = count * (right + wrong) > -np.log(chance)
        near, far = np.where(beyond, near, middle), np.where(beyond, middle, far)
    return near
