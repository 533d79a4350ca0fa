"""Intervals, tests and corrections against published examples and long-winded computations."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hacrl.evaluation.figures import by_problem
from hacrl.statistics import (
    bootstrap_interval,
    effect_size,
    holm,
    mean_interval,
    mean_over_sets,
    resampled_means,
    sign_flip_p,
    t_interval,
)

NAN = math.nan

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


# --- intervals over seeds ---------------------------------------------------------------------------


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


# --- intervals over problems ------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0] * 25 + [1] * 15, [0.0, 0.1, 0.1, 0.2, 0.9, 1.0] * 5, [0] * 27 + [1] * 3])
def test_the_interval_is_the_bca_bootstrap(values: list[float]) -> None:
    expected = stats.bootstrap((np.array(values),), np.mean, n_resamples=20_000, rng=np.random.default_rng(1))
    low, high = expected.confidence_interval
    step = (max(values) - min(values)) / len(values)  # means of right and wrong come in such steps
    assert mean_interval(values) == pytest.approx((low, high), abs=step + 1e-9)


def test_resampling_has_the_moments_of_drawing_with_replacement() -> None:
    values = np.array([0, 0, 0.25, 0.5, 1, 1, 1])
    draws = resampled_means(values)
    assert draws.mean() == pytest.approx(values.mean(), abs=0.01)
    assert draws.std() == pytest.approx(values.std() / math.sqrt(7), rel=0.03)


def problems_interval(correct_PK: npt.ArrayLike) -> tuple[float, float]:
    """Of the accuracy of one model on P problems with K answers each."""
    correct = np.asarray(correct_PK, dtype=float)
    average_P = by_problem(correct)[f"avg@{correct.shape[1]}"]
    return mean_interval(average_P[~np.isnan(average_P)])


def test_the_interval_over_problems_covers() -> None:
    """Answers to one problem agree more than answers to different ones; problems are what is drawn."""
    random = np.random.default_rng(3)
    hits = hits_of_answers = 0
    for _ in range(200):
        difficulty_P = random.beta(0.5, 0.5, size=80)
        correct_PK = random.random((80, 8)) < difficulty_P[:, None]
        low, high = problems_interval(correct_PK)
        hits += low <= 0.5 <= high
        half = 1.96 * correct_PK.std() / math.sqrt(correct_PK.size)
        hits_of_answers += abs(correct_PK.mean() - 0.5) <= half
    assert 0.9 <= hits / 200 <= 0.99
    assert hits_of_answers / 200 < 0.75


def test_all_right_is_not_certainty() -> None:
    """The exact binomial bound of 10 of 10, as tables have it."""
    assert problems_interval(np.ones((10, 4))) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert problems_interval(np.zeros((10, 1))) == pytest.approx((0.0, 0.3085), abs=1e-4)
    # All problems half right: as wide as Chernoff's bound, exp(-20 KL(0.5, x)) = 0.025.
    low, high = mean_interval([0.5] * 20)
    assert low == pytest.approx(1 - high)
    assert 20 * (0.5 * math.log(0.5 / low) + 0.5 * math.log(0.5 / (1 - low))) == pytest.approx(-math.log(0.025))
    assert all(math.isnan(bound) for bound in mean_interval([]))


def test_problems_without_a_judgement_are_left_out() -> None:
    with_gaps = [[1, NAN], [0, 0], [NAN, NAN], [1, 0], [0, NAN], [1, 1]]
    assert problems_interval(with_gaps) == problems_interval([[1, 1], [0, 0], [1, 0], [0, 0], [1, 1]])


def test_the_mean_over_sets_weighs_sets_alike() -> None:
    random = np.random.default_rng(0)
    small, large = (random.random(40) < 0.3).astype(float), (random.random(1000) < 0.8).astype(float)
    value, low, high = mean_over_sets([small, large])
    assert value == pytest.approx((small.mean() + large.mean()) / 2)
    error = math.sqrt(small.var() / 40 + large.var() / 1000) / 2
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.01)
    assert mean_over_sets([small])[1:] == mean_interval(small)
    assert math.isnan(mean_over_sets([small, np.array([NAN])])[0])


def test_sets_that_are_all_wrong_leave_the_mean_uncertain() -> None:
    value, low, high = mean_over_sets([np.zeros(10), np.zeros(10)])
    assert (value, low) == (0, 0)
    # Half the sum of two numbers whose upper bound is 0.3085 each.
    assert 0.3085 / 2 < high < 0.3085
    value, low, high = mean_over_sets([np.ones(10), np.zeros(10)])
    assert low < value == 0.5 < high


def test_sets_that_are_all_wrong_do_not_lift_the_mean() -> None:
    """What a weak model finds: some sets with a few right answers, some without any."""
    random = np.random.default_rng(5)
    rates, sizes = (0.3, 0.2, 0.05, 0.05, 0.03, 0.001, 0.001), (400, 200, 100, 200, 40, 30, 30)
    below = above = 0
    for _ in range(100):
        value, low, high = mean_over_sets(
            [(random.random(n) < p).astype(float) for p, n in zip(rates, sizes, strict=True)]
        )
        assert low < value < high
        below += np.mean(rates) < low
        above += np.mean(rates) > high
    assert max(below, above) <= 6
