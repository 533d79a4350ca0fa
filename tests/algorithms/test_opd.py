"""Distillation from other agents: numbers worked out by hand, laws, and the float64 reference."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from algorithm_batches import build, default_options, label, random_capabilities, random_rollouts, run, with_readings
from algorithm_batches import token_advantages as added_to
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import GRPO, OPD, Reading, Sequences, log_gap
from hacrl.algorithms.opd import common_spans
from reference import Options, objective, opd_teachers, opd_token_advantages

law = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**32 - 1)
NAN = math.nan


def close(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-11, abs=1e-13, nan_ok=True)


# --- by hand -----------------------------------------------------------------------------------------


def test_by_hand_token_by_token() -> None:
    assert log_gap(Reading([-1.0, -0.5]), Reading([-0.25, -3.0])) == [0.75, -2.5]


def test_by_hand_spans() -> None:
    # "12+7=19" and an end of turn. Own tokens: 12 + 7 = 19 </s>; the other's: 1 2 +7 =1 9 </s>.
    # Spans: "12" (-1 and -1.5), "+7" (-0.75 and -3), "=19" (-2 and -2), the end (-0.5 and -2).
    own = Reading([-1.0, -0.25, -0.5, -0.5, -1.5, -0.5], [2, 3, 4, 5, 7, 8])
    other = Reading([-1.0, -0.5, -3.0, -1.5, -0.5, -2.0], [1, 2, 4, 6, 7, 8])
    # (1.5 - 1) x -1; (4 - 1) x -0.25 and x -0.5; nothing; (4 - 1) x -0.5.
    assert log_gap(own, other) == close([-0.5, -0.75, -1.5, 0.0, 0.0, -1.5])


def test_by_hand_what_is_left_out() -> None:
    # Seven tokens of the other for one of the own; six are few enough.
    for count, want in ((7, NAN), (6, (6 - 1) * -1.0)):
        assert log_gap(Reading([-1.0], [7]), Reading([-1.0] * count, [*range(1, count), 7])) == close([want])
    # Certain: S_own is above -1e-4, or just below it.
    assert log_gap(Reading([-9e-5], [1]), Reading([-1.0], [1])) == close([NAN])
    assert log_gap(Reading([-2e-4], [1]), Reading([-1.0], [1])) == close([-1.0 + 2e-4])
    # Without text for both, at the beginning; a token without text behind it belongs to the span of the one before.
    assert log_gap(Reading([-1.0, -1.0], [0, 1]), Reading([-3.0, -2.0], [0, 1])) == close([NAN, -1.0])
    assert log_gap(Reading([-1.0, -1.0], [1, 1]), Reading([-4.0], [1])) == close([-1.0, -1.0])
    # Behind the last common border.
    assert log_gap(Reading([-1.0, -1.0], [1, 3]), Reading([-2.0, -1.0], [1, 2])) == close([-1.0, NAN])


def test_by_hand_teachers() -> None:
    """Two can read it and one cannot: the mean over the two, each limited, times the weight."""
    own = Reading([-1.0, -2.0])
    others = [Reading([-3.0, -1.0]), None, Reading([-0.5, -40.0])]
    got = OPD(weight=0.5, clamp=4.0).token_advantages(own, others)
    assert got[1].isnan().all()
    assert got[[0, 2]].tolist() == [[-0.5, 0.25], [0.125, -1.0]]
    assert OPD().token_advantages(own, []).shape == (0, 2)
    assert OPD().token_advantages(own, [None]).isnan().all()


def test_by_hand_terms() -> None:
    """Ratios 1 and 1.5 with A = 1 - 3 = -2 and 1 + 1 = 2: the second is above its clip of 1.28."""
    logp_NT = torch.tensor([[-1.0, math.log(1.5) - 1.0, 9.0]], dtype=torch.float64, requires_grad=True)
    one_N = torch.ones(1, dtype=torch.float64)
    sequences = Sequences(
        logp_NT=logp_NT,
        mask_NT=torch.tensor([[True, True, False]]),
        old_logp_N=-2 * one_N,
        old_length_N=2 * one_N,
        bytes_N=one_N,
        own_N=one_N.bool(),
        advantage_N=one_N,
        omega_N=one_N,
        old_logp_NT=torch.full((1, 3), -1.0, dtype=torch.float64),
        token_advantage_NT=torch.tensor([[-3.0, 1.0, 0.0]], dtype=torch.float64),
    )
    terms = OPD().terms(sequences, 0)
    assert terms.objective_N.tolist() == pytest.approx([(-2 + 2 * 1.28) / 2])
    terms.objective_N.sum().backward()
    assert logp_NT.grad is not None
    assert logp_NT.grad.tolist() == [pytest.approx([-1.0, 0.0, 0.0])]
    assert sequences.mean_advantage_N.tolist() == [0.0]
    assert terms.kept_N.tolist() == [True]


@pytest.mark.parametrize("which", ["all", "stronger"])
def test_who_teaches_whom(which: str) -> None:
    capabilities = [0.5, None, 0.7, 0.5]
    algorithm = OPD(teachers="all" if which == "all" else "stronger")
    got = [algorithm.teachers_of(k, capabilities) for k in range(4)]
    assert got == [opd_teachers(capabilities, k, which) for k in range(4)]
    assert got == ([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]] if which == "all" else [[2], [], [], [2]])


# --- the reference -----------------------------------------------------------------------------------

BATCHES = [
    default_options("opd"),
    replace(default_options("opd"), weight=0.3, reward_weight=0.0),
    replace(default_options("opd"), weight=2.0, reward_weight=0.5, clamp=1.5, beta=0.03),
    replace(default_options("opd"), weight=0.0),
]


@pytest.mark.parametrize("options", BATCHES, ids=label)
@pytest.mark.parametrize("teachers", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_objective_and_gradient_are_the_references(options: Options, teachers: int, seed: int) -> None:
    rng = random.Random(100 * seed + teachers)
    rollouts = with_readings(rng, random_rollouts(rng, 2, 0, dropped_share=0.0), teachers)
    algorithm = build(options)
    for rollout in rollouts:
        assert added_to(algorithm, rollout) == close(opd_token_advantages(rollout, options))
    capabilities = random_capabilities(rng, 2)
    outcome, expected = run(algorithm, rollouts, 0, capabilities), objective(rollouts, 0, capabilities, options)
    assert outcome.value == pytest.approx(expected.value, rel=1e-11, abs=1e-13)
    for got, want in zip(outcome.gradient, expected.gradient, strict=True):
        assert got == close(want)
    if options.weight and teachers:
        assert any(any(added_to(algorithm, rollout)) for rollout in rollouts)


# --- laws --------------------------------------------------------------------------------------------


@law
@given(seeds)
def test_without_teachers_it_is_grpo(seed: int) -> None:
    rng = random.Random(seed)
    rollouts = with_readings(rng, random_rollouts(rng, 1, 0), teachers=0)
    opd, grpo = (run(algorithm, rollouts, 0, [0.5]) for algorithm in (OPD(), GRPO()))
    assert opd.value == grpo.value
    assert opd.gradient == grpo.gradient


@law
@given(seeds)
def test_in_the_same_tokens_spans_say_what_tokens_say(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    own, other = ([-0.1 - 3 * rng.random() for _ in range(size)] for _ in range(2))
    ends = [3 * (t + 1) for t in range(size)]
    assert log_gap(Reading(own, ends), Reading(other, ends)) == close(log_gap(Reading(own), Reading(other)))


@law
@given(seeds)
def test_a_span_adds_up_to_the_difference_of_its_sums(seed: int) -> None:
    """So the sum over a text is the difference of what both models say of it, if nothing is left out."""
    rng = random.Random(seed)
    borders = [sorted([*rng.sample(range(1, 20), rng.randint(3, 12)), 20]) for _ in range(2)]
    own, other = (Reading([-0.1 - rng.random() for _ in ends], ends) for ends in borders)
    gap, seen = log_gap(own, other), 0
    for mine, theirs in common_spans(borders[0], borders[1]):
        seen += mine.stop - mine.start
        if not math.isnan(gap[mine.start]):
            assert sum(gap[mine]) == pytest.approx(sum(other.logps[theirs]) - sum(own.logps[mine]))
            assert sum(borders[0][t] == borders[1][u] for t in range(20)[mine] for u in range(20)[theirs]) == 1
    assert seen == len(own.logps)


@law
@given(seeds)
def test_the_mean_over_the_learners_tokens_is_minus_the_kl(seed: int) -> None:
    """One token of four, in expectation over the learner, and never above 0."""
    learner_V, teacher_V = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).double().log_softmax(1)
    gaps = [log_gap(Reading([float(a)]), Reading([float(b)]))[0] for a, b in zip(learner_V, teacher_V, strict=True)]
    mean = sum(math.exp(logp) * gap for logp, gap in zip(learner_V.tolist(), gaps, strict=True))
    kl = float(torch.nn.functional.kl_div(teacher_V, learner_V, log_target=True, reduction="sum"))
    assert mean == pytest.approx(-kl)
    assert mean < 0


def test_in_expectation_the_gradient_is_that_of_minus_the_kl_at_the_states_visited() -> None:
    """All answers of three tokens from a bigram policy. How a token changes the states behind it is not seen."""
    generator = torch.Generator().manual_seed(1)
    teacher_SV = torch.randn(4, 3, generator=generator).double().log_softmax(1)
    logits_SV = torch.randn(4, 3, generator=generator).double().requires_grad_()
    learner_SV = logits_SV.log_softmax(1)
    surrogate, visits_S = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for answer in itertools.product(range(3), repeat=3):
        states, tokens = torch.tensor([0, 1 + answer[0], 1 + answer[1]]), torch.tensor(answer)
        logp_T = learner_SV[states, tokens]
        gap = log_gap(Reading(logp_T.tolist()), Reading(teacher_SV[states, tokens].tolist()))
        probability = logp_T.detach().sum().exp()
        surrogate = surrogate + probability * (logp_T * torch.tensor(gap, dtype=torch.float64)).sum()
        visits_S.index_add_(0, states, probability.expand(3))
    kl_S = (learner_SV.exp() * (learner_SV - teacher_SV)).sum(1)
    (got,) = torch.autograd.grad(surrogate, logits_SV, retain_graph=True)
    (want,) = torch.autograd.grad(-(visits_S * kl_S).sum(), logits_SV)
    assert torch.allclose(got, want, atol=1e-14)
    assert float(got.abs().max()) > 0.1
