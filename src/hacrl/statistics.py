"""Statistics of few seeds: intervals, an exact paired test, Holm's correction, effect size. NumPy and scipy alone."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

EXACT = 16
"""Up to so many differences all sign flips are enumerated; beyond, as many are drawn as that gives."""
RESAMPLES = 9999

Interval = tuple[float, float]


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Interval of the mean by Student's t: exact for normal values, close to its level for others from three on."""
    from scipy import stats

    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - half, mean + half


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The interval of the mean by resampling: BCa, or percentiles where BCa has no answer; always the same draws."""
    from scipy import stats

    data = (np.asarray(values, dtype=float),)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # values that are all alike: percentiles it is
            result = stats.bootstrap(
                data,
                np.mean,
                confidence_level=level,
                n_resamples=RESAMPLES,
                method=method,
                rng=np.random.default_rng(0),
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
    # Equal sums differ by rounding.
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
