"""Figures of several completions against enumeration, and intervals against scipy, tables and simulation."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hacrl.evaluation.figures import (
    by_problem,
    majority,
    mean_interval,
    mean_over_sets,
    pass_at,
    resampled_means,
)

NAN = math.nan


# --- pass@k, best@k, avg@k -------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(right: list[bool], k: int) -> None:
    choices = list(itertools.combinations(right, k))
    expected = sum(any(choice) for choice in choices) / len(choices) if choices else NAN
    assert pass_at(k, len(right), sum(right)) == pytest.approx(expected, nan_ok=True)


def test_pass_at_k_of_many_completions() -> None:
    # 1 - (197 * 196 * 195) / (200 * 199 * 198), by hand for c = 3, k = 3.
    assert pass_at(3, 200, 3) == pytest.approx(1 - 197 * 196 * 195 / (200 * 199 * 198))
    assert pass_at(1000, 4000, 1) == 0.25


def test_figures_by_problem() -> None:
    values = by_problem([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert {name: value.tolist() for name, value in values.items()} == {
        "avg@4": [0.25, 1, 0],
        "pass@1": [0.25, 1, 0],
        "pass@2": [0.5, 1, 0],
        "pass@4": [1, 1, 0],
        "best@4": [1, 1, 0],
    }
    assert list(by_problem(np.ones((2, 30)))) == [
        f"{name}"
        for name in (
            "avg@30",
            "pass@1",
            "pass@2",
            "pass@4",
            "pass@8",
            "pass@16",
            "pass@30",
            "best@30",
        )
    ]
    assert {name: value.tolist() for name, value in by_problem([[1], [0]]).items()} == {"avg@1": [1, 0]}


def test_what_could_not_be_judged_is_neither_right_nor_wrong() -> None:
    values = by_problem([[1, NAN, 0, NAN], [NAN] * 4, [0, NAN, NAN, NAN]])
    np.testing.assert_array_equal(values["avg@4"], [0.5, NAN, 0])
    np.testing.assert_array_equal(values["best@4"], [1, NAN, 0])
    np.testing.assert_array_equal(values["pass@2"], [1, NAN, NAN])
    np.testing.assert_array_equal(values["pass@4"], [NAN, NAN, NAN])


# --- maj@k -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([0, 0, 1], 1),
        ([0, 1, 1], 0),
        ([0, 1], 1 / 2),
        ([0, 1, 2], 1 / 3),
        ([0, 0, 1, 1, 2], 1 / 2),
        ([1, 2], 0),
        ([None, None, 0], 1),
        ([None, None, 1], 0),
        ([None, None], 0),
        ([], 0),
    ],
)
def test_majority(votes: list[int | None], expected: float) -> None:
    assert majority(votes) == pytest.approx(expected)


@given(st.lists(st.sampled_from([None, 0, 1, 2]), max_size=7))
def test_majority_is_what_drawing_among_the_most_frequent_gives(votes: list[int | None]) -> None:
    cast = [vote for vote in votes if vote is not None]
    winners = [vote for vote in set(cast) if all(cast.count(vote) >= cast.count(other) for other in cast)]
    expected = winners.count(0) / len(winners) if winners else 0
    assert majority(votes) == pytest.approx(expected)
    assert majority(votes[::-1]) == majority(votes)


# --- intervals -------------------------------------------------------------------------------------


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
