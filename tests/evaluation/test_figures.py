"""Figures of several completions against enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.evaluation.figures import by_problem, majority, pass_at

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
    counts = (1, 2, 4, 8, 16, 30)
    assert list(by_problem(np.ones((2, 30)))) == ["avg@30", *(f"pass@{k}" for k in counts), "best@30"]
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
