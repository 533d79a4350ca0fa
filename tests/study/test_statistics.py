"""Intervals, tests and corrections against published examples and long-winded computations."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hacrl.statistics import (
    bootstrap_interval,
    effect_size,
    holm,
    sign_flip_p,
    t_interval,
)

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Heights of crossed minus self-fertilised plants, in eighths of an inch: Fisher, The Design of Experiments, 1935."""

few_integers = st.lists(st.integers(-20, 20), min_size=2, max_size=8)
few_numbers = st.lists(st.floats(-1, 1), min_size=2, max_size=8)


# --- the sign-flip test ----------------------------------------------------------------------------


def test_fishers_own_example() -> None:
    """He counted 863 of 32,768 ways with as large a sum, and as many with as small a one."""
    assert sign_flip_p(DARWIN) == 2 * 863 / 32768


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1, 2, 3], 2 / 8), ([3, 2, -1], 4 / 8), ([1, 2, -3], 1.0), ([0.0, 0.0], 1.0), ([0.1] * 5, 2 / 32), ([1], 1.0)],
)
def test_sign_flips_counted_by_hand(differences: list[float], p: float) -> None:
    assert sign_flip_p(differences) == p


@given(few_integers)
def test_sign_flips_are_those_of_an_enumeration(differences: list[int]) -> None:
    sums = [abs(sum(flipped)) for flipped in itertools.product(*((d, -d) for d in differences))]
    expected = sum(value >= abs(sum(differences)) for value in sums) / len(sums)
    assert sign_flip_p(differences) == expected
    assert sign_flip_p([d / 1000 for d in differences]) == expected


def test_sign_flips_are_those_of_scipy() -> None:
    differences = np.random.default_rng(5).normal(0.3, 1, 9)
    theirs = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(differences.tolist()) == pytest.approx(theirs.pvalue)


@given(few_numbers)
def test_p_knows_neither_order_nor_direction_and_has_a_floor(differences: list[float]) -> None:
    p = sign_flip_p(differences)
    assert 2 / 2 ** len(differences) <= p <= 1
    assert sign_flip_p(sorted(differences)) == sign_flip_p([-d for d in differences]) == p


def test_many_differences_are_sampled() -> None:
    differences = np.random.default_rng(0).normal(0.4, 1, 40)
    assert sign_flip_p(differences.tolist()) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.01)
    assert 0 < sign_flip_p([1.0] * 40) < 1e-4


# --- Holm ------------------------------------------------------------------------------------------


def test_holm_is_r_s_p_adjust() -> None:
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_only_raises(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True) if a is not None)
    by_p = [a for _, a in sorted(zip(p_values, adjusted, strict=True))]
    assert by_p == sorted(by_p)
    # Bonferroni's is never smaller.
    bonferroni = [min(1.0, len(p_values) * p) for p in p_values]
    assert all(a <= b for a, b in zip(adjusted, bonferroni, strict=True))


# --- intervals -------------------------------------------------------------------------------------


def test_the_t_interval_of_darwins_plants() -> None:
    """As R prints it for this data, in inches."""
    assert t_interval([d / 8 for d in DARWIN]) == pytest.approx((0.003899165, 5.229434168), abs=1e-8)


def test_the_t_interval_of_two_is_wide() -> None:
    assert t_interval([0.0, 1.0]) == pytest.approx((0.5 - 12.7062 / 2, 0.5 + 12.7062 / 2), abs=1e-4)
    assert t_interval([0.3, 0.3, 0.3]) == pytest.approx((0.3, 0.3))


def test_bca_over_all_resamples() -> None:
    """Efron's formulas, on the 3125 resamples that five values have."""
    values = [1.0, 2.0, 4.0, 7.0, 11.0]  # their mean is a whole number: ties are exact
    means = sorted(sum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    mean, normal = sum(values) / 5, NormalDist()
    below = sum((m < mean) + (m == mean) / 2 for m in means) / len(means)
    bias = normal.inv_cdf(below)
    jackknife = [(sum(values) - v) / 4 for v in values]
    centred = [sum(jackknife) / 5 - j for j in jackknife]
    acceleration = sum(c**3 for c in centred) / (6 * sum(c**2 for c in centred) ** 1.5)

    def bound(share: float) -> float:
        z = bias + normal.inv_cdf(share)
        return means[int(len(means) * normal.cdf(bias + z / (1 - acceleration * z)))]

    assert bootstrap_interval(values) == pytest.approx((bound(0.025), bound(0.975)), abs=0.25)  # means are 0.2 apart


def test_the_bootstrap_of_many_values_is_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(size=500)
    half = 1.96 * values.std(ddof=1) / math.sqrt(500)
    assert bootstrap_interval(values.tolist()) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_the_bootstrap_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@settings(max_examples=15, deadline=None)
@given(few_numbers)
def test_intervals_do_not_know_the_order_and_move_with_the_values(values: list[float]) -> None:
    low, high = t_interval(values)
    assert low <= np.mean(values) + 1e-12
    assert t_interval(values[::-1]) == pytest.approx((low, high))
    assert t_interval([-value for value in values]) == pytest.approx((-high, -low))
    assert t_interval([value + 3 for value in values]) == pytest.approx((low + 3, high + 3))
    low, high = bootstrap_interval(values)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


def coverage(interval: object, count: int, repeats: int, skewed: bool = False) -> float:
    """How often an interval holds the true mean."""
    assert callable(interval)
    random = np.random.default_rng(count)
    samples = random.gamma(2.0, size=(repeats, count)) - 2 if skewed else random.normal(size=(repeats, count))
    bounds = [interval(sample.tolist()) for sample in samples]
    return sum(low <= 0 <= high for low, high in bounds) / repeats


def test_which_interval_is_honest_with_few_seeds() -> None:
    """Why t is the default: 95 % of its intervals hold the truth, of the bootstrap's with three seeds far fewer."""
    for count in (3, 5, 10):
        assert 0.93 <= coverage(t_interval, count, 1500) <= 0.97
        assert coverage(t_interval, count, 1500, skewed=True) >= 0.88
    assert coverage(bootstrap_interval, 3, 300) < 0.85
    assert coverage(bootstrap_interval, 5, 300) < 0.92
    assert coverage(bootstrap_interval, 10, 300) < 0.96


# --- effect size -----------------------------------------------------------------------------------


def test_effect_size_with_hedges_correction() -> None:
    assert effect_size([1, 2, 3]) == pytest.approx(2 / math.sqrt(math.pi))
    ten = [0.0] * 5 + [2.0] * 5
    # J(9) = 0.9139 in Hedges' table, deviation sqrt(10 / 9).
    assert effect_size(ten) == pytest.approx(0.9139 / math.sqrt(10 / 9), abs=1e-4)
    assert effect_size([-d for d in ten]) == pytest.approx(-0.9139 / math.sqrt(10 / 9), abs=1e-4)
    assert effect_size([1.0, 2.0]) is None
    assert effect_size([0.1, 0.1, 0.1]) is None
