"""`hacrl.algorithms` against numbers worked out by hand, and against the float64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from algorithm_batches import (
    BINARY,
    GRADED,
    RIVAL_OPTIONS,
    Outcome,
    build,
    default_options,
    label,
    make_sequences,
    random_capabilities,
    random_rollouts,
    run,
    seen_by,
)

from hacrl import algorithms as hacrl_algorithms
from hacrl.algorithms import (
    ALGORITHMS,
    GRPO,
    GSPO,
    HACPO,
    CapabilityOptions,
    CapabilityTracker,
    Naive,
    capability_ratios,
    clipped_minimum,
    exponential_ratio,
    group_advantages,
    k3_kl,
    sequence_log_ratio,
    stepwise_clip,
    stepwise_lower_bound,
)
from reference import (
    Options,
    Result,
    Rollout,
    advantages_for,
    byte_log_ratio,
    capability_advantages,
    capability_baseline,
    capability_history,
    clipped_surrogate,
    foreign_term,
    lower_bound,
    objective,
    omega,
    performance,
)
from reference import exponential_ratio as reference_exponential_ratio
from reference import group_advantages as reference_group_advantages
from reference import k3 as reference_k3
from reference import sequence_log_ratio as reference_log_ratio

DOUBLE = torch.float64


def close(value: float | Sequence[float]) -> object:
    return pytest.approx(value, rel=1e-11, abs=1e-13)


def assert_same(outcome: Outcome, expected: Result) -> None:
    assert outcome.value == close(expected.value)
    for got, want in zip(outcome.gradient, expected.gradient, strict=True):
        assert got == close(want)


# ------------------------------------------------------------------------------------------------------------
# By hand. Two agents, one prompt, two completions each: the learner has rewards 1 and 0, the other 1 and 1.
# ------------------------------------------------------------------------------------------------------------


def two_by_two(capabilities: list[float | None], algorithm: HACPO | None = None) -> hacrl_algorithms.Advantages:
    algorithm = algorithm or HACPO()
    return algorithm.advantages(
        torch.tensor([1, 0, 1, 1], dtype=DOUBLE),
        torch.tensor([0, 0, 0, 0]),
        torch.tensor([0, 0, 1, 1]),
        0,
        algorithm.omega(capabilities),
    )


def test_by_hand_capability_baseline() -> None:
    # omega(0, 1) = 0.4 / 0.8 = 1/2, so mu = (1 + 0 + 1/2 + 1/2) / 4 = 1/2.
    # sigma of 1, 0, 1, 1: mean 3/4, (3 * 1/16 + 9/16) / 3 = 1/4, root 1/2.
    # A = (R - 1/2) / (1/2 + 1e-6) = +-0.999998000004
    got = two_by_two([0.4, 0.8])
    assert got.baseline_N.tolist() == [0.5, 0.5, 0.5, 0.5]
    a = 0.999998000003999992
    assert got.advantage_N.tolist() == pytest.approx([a, -a, a, a], abs=1e-15)
    assert got.guarded_share == 0


def test_by_hand_source_baseline() -> None:
    # omega(1, 0) = 2: mu_1 = (2 * 1 + 2 * 0 + 1 + 1) / 4 = 1. It is the largest reward and not above it, so
    # the guard lets it stand, and the two foreign rollouts have A = 0. The learner's keep mu_0 = 1/2.
    got = two_by_two([0.4, 0.8], HACPO(cross_baseline="source"))
    assert got.baseline_N.tolist() == [0.5, 0.5, 1.0, 1.0]
    a = 0.999998000003999992
    assert got.advantage_N.tolist() == pytest.approx([a, -a, 0, 0], abs=1e-15)


def test_by_hand_guard() -> None:
    # omega(0, 1) = 0.8 / 0.2 = 4: mu = (1 + 0 + 4 + 4) / 4 = 2.25, above the largest reward.
    # With the guard, the mean of the learner's own rewards: (1 + 0) / 2.
    assert two_by_two([0.8, 0.2]).baseline_N.tolist() == [0.5] * 4
    assert two_by_two([0.8, 0.2]).guarded_share == 1
    unguarded = two_by_two([0.8, 0.2], HACPO(baseline_guard=False))
    assert unguarded.baseline_N.tolist() == [2.25] * 4
    assert unguarded.guarded_share == 0


def test_by_hand_guard_lets_the_edge_of_the_range_stand() -> None:
    # omega(0, 1) = 2; own rewards 0 and 0, foreign 1 and 1: mu = (0 + 0 + 2 + 2) / 4 = 1, the largest reward.
    got = HACPO().advantages(
        torch.tensor([0, 0, 1, 1], dtype=DOUBLE),
        torch.zeros(4, dtype=torch.long),
        torch.tensor([0, 0, 1, 1]),
        0,
        capability_ratios([0.5, 0.25]),
    )
    assert got.baseline_N.tolist() == [1.0] * 4
    assert got.guarded_share == 0


def test_by_hand_joint_baseline() -> None:
    # (1 + 0 + 1 + 1) / 4, whatever the capabilities.
    assert two_by_two([0.8, 0.2], HACPO(baseline="joint")).baseline_N.tolist() == [0.75] * 4


def test_by_hand_group_advantages() -> None:
    # Rewards 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.57735; the other prompt is flat.
    got = group_advantages(torch.tensor([1, 0, 0, 1, 1], dtype=DOUBLE), torch.tensor([0, 0, 0, 1, 1]))
    std = 0.5773502691896258
    a = [(2 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), 0, 0]
    assert got.advantage_N.tolist() == pytest.approx(a, abs=1e-15)


def test_by_hand_capability_window() -> None:
    # K = 5, steps 0.1 .. 0.6: (0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5 = 0.4 with the current step, 0.3 without.
    # The second agent had no valid reward in steps 2 to 6: its window holds 0.8 alone.
    for include_current, first in ((True, 0.4), (False, 0.3)):
        tracker = CapabilityTracker(2, CapabilityOptions(include_current=include_current))
        for step in range(1, 7):
            tracker.update([step / 10, 0.8 if step == 1 else None])
        assert tracker.capabilities() == pytest.approx([first, 0.8], abs=1e-15)


def test_by_hand_omega() -> None:
    # 0.2 / 0.8 = 1/4; 0 is floored to 1e-8, and 0.2 / 1e-8 is clamped to 10.
    got = capability_ratios([0.2, 0.8, 0.0])
    assert got.tolist() == [[1, 0.25, 10], [4, 1, 10], [0.1, 0.1, 1]]
    # Twice as able: its rollouts count double in the update, and half in the learner's baseline.
    source_N = torch.tensor([0, 1])
    coefficient_N = HACPO().coefficients(source_N, 0, capability_ratios([0.3, 0.6]))
    assert coefficient_N.tolist() == [1.0, 2.0]


def one_foreign(advantage: float, weight: float, num_bytes: int = 10) -> hacrl_algorithms.Sequences:
    # The learner has 3 tokens of -1.1 on average, the source 2 tokens of -1: log s = -0.1.
    rollout = Rollout(1, 0, 1.0, (-0.5, -1.5), (-1.0, -1.1, -1.2), num_bytes)
    return make_sequences([rollout], 0, torch.tensor([advantage], dtype=DOUBLE), torch.tensor([weight], dtype=DOUBLE))


def value_and_gradient(
    algorithm: hacrl_algorithms.Algorithm, sequences: hacrl_algorithms.Sequences, update: int = 0
) -> tuple[float, list[float]]:
    terms = algorithm.terms(sequences, update)
    (gradient_NT,) = torch.autograd.grad(terms.objective_N.sum(), sequences.logp_NT)
    return float(terms.objective_N.sum().detach()), gradient_NT[sequences.mask_NT].tolist()


def test_by_hand_foreign_term_inside_the_band() -> None:
    # s = exp(-0.1) = 0.9048 lies in [0.8, 1]; s * s^1 * omega * A = exp(-0.2) * 2 * 0.5.
    # Gradient by each token: stopgrad(s) * omega * A * ds = exp(-0.1) * 1 * exp(-0.1) / 3.
    value, gradient = value_and_gradient(HACPO(), one_foreign(0.5, 2.0))
    assert value == pytest.approx(0.8187307530779818, abs=1e-15)
    assert gradient == pytest.approx([0.2729102510259939] * 3, abs=1e-15)


def test_by_hand_foreign_term_below_the_band() -> None:
    # After 5 updates lo = 0.8 + 5 * 0.025 = 0.925 > s: 0.925^2 * 2 * 0.5, and no gradient. A < 0 likewise.
    for sign in (1, -1):
        value, gradient = value_and_gradient(HACPO(), one_foreign(sign * 0.5, 2.0), update=5)
        assert value == pytest.approx(sign * 0.855625, abs=1e-15)
        assert gradient == [0, 0, 0]


def test_by_hand_foreign_term_without_band() -> None:
    # alpha = 2: s * s^2 = exp(-0.3) = 0.7408182206817179, though update 5 would have closed the band on it.
    value, gradient = value_and_gradient(HACPO(alpha=2, cross_clip=False), one_foreign(1.0, 1.0), update=5)
    assert value == pytest.approx(0.7408182206817179, abs=1e-15)
    assert gradient == pytest.approx([0.7408182206817179 / 3] * 3, abs=1e-15)


def test_by_hand_byte_ratio() -> None:
    # 10 bytes: (-3.3 + 2.0) / 10 = -0.13; alpha = 1: exp(-0.26) = 0.7710515858035663, by each token / 10.
    value, gradient = value_and_gradient(HACPO(ratio_unit="byte"), one_foreign(1.0, 1.0))
    assert value == pytest.approx(0.7710515858035663, abs=1e-15)
    assert gradient == pytest.approx([0.07710515858035663] * 3, abs=1e-15)


@pytest.mark.parametrize(
    "algorithm", [GSPO(), HACPO(), HACPO(ratio_unit="byte"), Naive()], ids=["gspo", "hacpo", "byte", "naive"]
)
def test_by_hand_own_term(algorithm: hacrl_algorithms.Algorithm) -> None:
    # Two tokens, each up by 0.001: s = exp(0.001) = 1.0010005001667084, above 1.0004. Up is clipped for
    # A = 1, and not for A = -1, where it has the gradient -s / 2 by each token.
    rollout = Rollout(0, 0, 1.0, (-1.0, -2.0), (-0.999, -1.999), num_bytes=7)
    up, down = (
        value_and_gradient(
            algorithm,
            make_sequences([rollout], 0, torch.tensor([a], dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)),
        )
        for a in (1.0, -1.0)
    )
    assert up == (pytest.approx(1.0004, abs=1e-15), [0, 0])
    assert down[0] == pytest.approx(-1.0010005001667084, abs=1e-15)
    assert down[1] == pytest.approx([-0.5005002500833542] * 2, abs=1e-15)


def test_by_hand_grpo_tokens() -> None:
    # Ratios 1.5, 1.1, 0.5. A = 1: (1.28 + 1.1 + 0.5) / 3 = 0.96. A = -1: -(1.5 + 1.1 + 0.8) / 3.
    ratios = (1.5, 1.1, 0.5)
    rollout = Rollout(0, 0, 1.0, (-2.0, -2.0, -2.0), tuple(math.log(r) - 2 for r in ratios))
    up, down = (
        value_and_gradient(
            GRPO(), make_sequences([rollout], 0, torch.tensor([a], dtype=DOUBLE), torch.ones(1, dtype=DOUBLE))
        )
        for a in (1.0, -1.0)
    )
    assert up[0] == pytest.approx(0.96, abs=1e-15)
    assert up[1] == pytest.approx([0, 1.1 / 3, 0.5 / 3], abs=1e-15)
    assert down[0] == pytest.approx(-3.4 / 3, abs=1e-15)
    assert down[1] == pytest.approx([-0.5, -1.1 / 3, 0], abs=1e-15)


def test_by_hand_k3() -> None:
    # The reference twice and half as likely: 2 - ln 2 - 1 = 0.3069 and 1/2 + ln 2 - 1 = 0.1931; mean 1/4.
    ln2 = math.log(2)
    kl_N = k3_kl(
        torch.tensor([[-1.0, -2.0, 0.0]], dtype=DOUBLE),
        torch.tensor([[ln2 - 1.0, -ln2 - 2.0, 5.0]], dtype=DOUBLE),
        torch.tensor([[True, True, False]]),
    )
    assert kl_N.tolist() == pytest.approx([0.25], abs=1e-15)


def test_by_hand_means() -> None:
    # Two own rollouts, four of agent 1, one of agent 2: 1/2, 0.5/4 and 0.5/1.
    source_N = torch.tensor([1, 0, 1, 2, 0, 1, 1])
    weights = HACPO(cross_weight=0.5).mean_weights(source_N, 0)
    assert weights.tolist() == [0.125, 0.5, 0.125, 0.5, 0.5, 0.125, 0.125]
    assert Naive().mean_weights(source_N, 0).tolist() == [1 / 7] * 7


def test_by_hand_lower_bound() -> None:
    bounds = [stepwise_lower_bound(u, 0.2, 0.025) for u in range(10)]
    assert bounds == pytest.approx([0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1, 1], abs=1e-15)


def test_published_defaults() -> None:
    hacpo = HACPO()
    assert (hacpo.alpha, hacpo.delta, hacpo.delta_step, hacpo.cross_weight) == (1, 0.2, 0.025, 1)
    assert (hacpo.baseline, hacpo.cross_baseline, hacpo.ratio_unit) == ("capability", "learner", "token")
    assert hacpo.baseline_guard
    assert hacpo.cross_omega
    assert hacpo.cross_clip
    assert not hacpo.allow_closed_band
    assert (hacpo.reward_min, hacpo.beta) == (0, 0)
    for algorithm in (hacpo, *[ALGORITHMS[name]() for name in ("gspo", "naive", *RIVAL_OPTIONS)]):
        assert (algorithm.epsilon, algorithm.epsilon_high) == (3e-4, 4e-4)
    assert (GRPO().epsilon, GRPO().epsilon_high) == (0.2, 0.28)
    capability = hacpo.capability
    assert (capability.window, capability.include_current, capability.metric) == (5, True, "mean_reward")
    assert (capability.ratio_min, capability.ratio_max) == (0.1, 10)


# ------------------------------------------------------------------------------------------------------------
# Against the reference: the pieces
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_current", [True, False])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_capability_over_time(n: int, window: int, include_current: bool) -> None:
    rng = random.Random(100 * n + window)
    steps = [[None if rng.random() < 0.3 else rng.random() for _ in range(n)] for _ in range(15)]
    # One agent fails all the time, so the floor and the clamps are met.
    steps = [[0.0 if agent == 3 and p is not None else p for agent, p in enumerate(step)] for step in steps]
    expected = capability_history(steps, window, include_current)
    tracker = CapabilityTracker(n, CapabilityOptions(window=window, include_current=include_current))
    for step, want in zip(steps, expected, strict=True):
        tracker.update(step)
        got = tracker.capabilities()
        for c, c_want in zip(got, want, strict=True):
            assert (c is None) == (c_want is None)
            assert c is None or c == close(c_want or 0.0)
        pairs = [[omega(want, k, j) for j in range(n)] for k in range(n)]
        for row, row_want in zip(HACPO().omega(got).tolist(), pairs, strict=True):
            assert row == close(row_want)


@pytest.mark.parametrize("metric", ["mean_reward", "positive_rate"])
@pytest.mark.parametrize("reward_min", [0.0, -1.0, 0.1, -0.35])
def test_performance(metric: str, reward_min: float) -> None:
    rng = random.Random(1)
    hacpo = HACPO(reward_min=reward_min, capability=CapabilityOptions(metric=metric))
    for size in (1, 2, 7):
        rewards = [rng.choice([reward_min, reward_min + rng.random()]) for _ in range(size)]
        want = performance(rewards, metric, reward_min)
        assert hacpo.performance(torch.tensor(rewards, dtype=DOUBLE)) == close(want or 0.0)


ADVANTAGE_OPTIONS = [
    Options(),
    Options(baseline_guard=False),
    Options(cross_baseline="source"),
    Options(cross_baseline="source", baseline_guard=False),
    Options(baseline="joint"),
    Options(baseline="joint", cross_baseline="source"),
]


@pytest.mark.parametrize("options", ADVANTAGE_OPTIONS, ids=label)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("rewards", [BINARY, GRADED, (0.4, 0.5, 1.0), (-1.0, 0.0, 1.0)])
def test_advantages(options: Options, n: int, rewards: tuple[float, ...]) -> None:
    options = replace(options, reward_min=min(0.0, *rewards))
    for seed in range(4):
        rng = random.Random(seed)
        learner = seed % n
        capabilities = random_capabilities(rng, n)
        rollouts = random_rollouts(rng, n, learner, rewards, dropped_share=0)
        want = capability_advantages(rollouts, learner, capabilities, options)
        got = run(build(options), rollouts, learner, capabilities)
        assert got.advantages.advantage_N.tolist() == close([a for a in want if a is not None])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_group_advantages(n: int) -> None:
    for seed in range(4):
        rollouts = random_rollouts(random.Random(seed), n, 0, GRADED)
        valid = [r for r in rollouts if r.reward is not None]
        got = group_advantages(
            torch.tensor([r.reward for r in valid], dtype=DOUBLE), torch.tensor([r.prompt for r in valid])
        )
        want = reference_group_advantages(rollouts)
        assert got.advantage_N.tolist() == close([a for a in want if a is not None])


def test_guard_falls_back_on_the_group_mean_without_own_rewards() -> None:
    # The learner, three times as able, has nothing valid on this prompt: omega * R leaves the range.
    rewards, sources = [1.0, 1.0, 0.0], [1, 1, 1]
    want = capability_baseline(sources, rewards, 0, [0.9, 0.3])
    assert want == close(2 / 3)
    got = HACPO().advantages(
        torch.tensor(rewards, dtype=DOUBLE),
        torch.zeros(3, dtype=torch.long),
        torch.tensor(sources),
        0,
        capability_ratios([0.9, 0.3]),
    )
    assert got.baseline_N.tolist() == close([want] * 3)


def test_guard_acts_below_the_range_too() -> None:
    # omega(0, 1) = 0.1: mu = (0.5 + 0.05 + 0.1) / 3 = 0.217, below every reward; own mean 0.5.
    got = HACPO().advantages(
        torch.tensor([0.5, 0.5, 1.0], dtype=DOUBLE),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([0, 1, 1]),
        0,
        capability_ratios([0.05, 0.9]),
    )
    assert got.baseline_N.tolist() == close([0.5] * 3)


def test_log_ratios() -> None:
    rng = random.Random(3)
    rows = []
    for _ in range(50):
        scale = rng.choice([0.1, 1, 30])
        logps = [-scale * rng.random() for _ in range(rng.randint(1, 5))]
        old_logps = [-scale * rng.random() for _ in range(rng.randint(1, 5))]
        rows.append((logps, old_logps, rng.randint(1, 9)))
    logp_N = torch.tensor([sum(r[0]) for r in rows], dtype=DOUBLE)
    old_logp_N = torch.tensor([sum(r[1]) for r in rows], dtype=DOUBLE)
    length_N = torch.tensor([len(r[0]) for r in rows])
    old_length_N = torch.tensor([len(r[1]) for r in rows])
    bytes_N = torch.tensor([r[2] for r in rows])
    got = sequence_log_ratio(logp_N, length_N, old_logp_N, old_length_N)
    assert got.tolist() == close([reference_log_ratio(r[0], r[1]) for r in rows])
    assert {10.0, -10.0} <= set(got.tolist())
    got = sequence_log_ratio(logp_N, bytes_N, old_logp_N, bytes_N)
    assert got.tolist() == close([byte_log_ratio(*r) for r in rows])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_exponential_ratio(alpha: float) -> None:
    ratios = [1e-4, 0.3, 0.99, 1.0, 1.01, 3.0, math.exp(10)]
    s_N = torch.tensor(ratios, dtype=DOUBLE, requires_grad=True)
    got_N = exponential_ratio(s_N, alpha)
    assert got_N.tolist() == close([reference_exponential_ratio(s, alpha) for s in ratios])
    (slope_N,) = torch.autograd.grad(got_N.sum(), s_N)
    assert slope_N.tolist() == close([min(s, 1.0) ** alpha for s in ratios])


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28)])
def test_clipped_minimum(low: float, high: float) -> None:
    ratios = [1e-4, 0.7, 1 - 2 * low, 1 - low / 2, 1.0, 1 + high / 2, 1 + 2 * high, 1.5, 20.0]
    for advantage in (-2.0, -0.1, 0.1, 2.0):
        s_N = torch.tensor(ratios, dtype=DOUBLE, requires_grad=True)
        got_N, kept_N = clipped_minimum(s_N, torch.full_like(s_N, advantage), low, high)
        want = [clipped_surrogate(s, advantage, 1 - low, 1 + high) for s in ratios]
        (slope_N,) = torch.autograd.grad(got_N.sum(), s_N)
        assert got_N.tolist() == close([value for value, _ in want])
        assert slope_N.tolist() == close([slope for _, slope in want])
        assert kept_N.tolist() == [slope != 0 for _, slope in want]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("u", [0, 3, 7, 8, 20])
def test_stepwise_clip(alpha: float, u: int) -> None:
    options = Options(alpha=alpha)
    low = stepwise_lower_bound(u, options.delta, options.delta_step)
    assert low == close(lower_bound(u, options.delta, options.delta_step))
    ratios = [0.01, 0.79, 0.81, 0.9, 0.95, 0.99, 1.0, 1.01, 2.0]
    s_N = torch.tensor(ratios, dtype=DOUBLE, requires_grad=True)
    clipped_N, kept_N = stepwise_clip(s_N, low)
    got_N = exponential_ratio(clipped_N, alpha)
    want = [foreign_term(s, s, 1.0, 1.0, u, options) for s in ratios]
    (slope_N,) = torch.autograd.grad(got_N.sum(), s_N)
    assert got_N.tolist() == close([value for value, _ in want])
    assert slope_N.tolist() == close([slope for _, slope in want])
    assert kept_N.tolist() == [slope != 0 for _, slope in want]


def test_k3_and_its_gradient() -> None:
    rng = random.Random(0)
    pairs = [(-rng.random(), -rng.random()) for _ in range(8)]
    logp_NT = torch.tensor([[p for p, _ in pairs]], dtype=DOUBLE, requires_grad=True)
    ref_NT = torch.tensor([[r for _, r in pairs]], dtype=DOUBLE)
    got = k3_kl(logp_NT, ref_NT, torch.ones(1, 8, dtype=torch.bool))
    want = [reference_k3(p, r) for p, r in pairs]
    assert got.tolist() == close([sum(value for value, _ in want) / 8])
    (slope_NT,) = torch.autograd.grad(got.sum(), logp_NT)
    assert slope_NT[0].tolist() == close([slope / 8 for _, slope in want])


# ------------------------------------------------------------------------------------------------------------
# Against the reference: whole objectives and their gradients
# ------------------------------------------------------------------------------------------------------------

VARIANTS = [
    *[default_options(name) for name in ("grpo", "gspo", "naive", "hacpo")],
    *[replace(default_options(name), beta=0.03) for name in ("grpo", "gspo", "naive", "hacpo")],
    Options("gspo", eps_low=1e-3, eps_high=2e-4),
    Options("naive", ratio="own"),
    Options("naive", ratio="own", beta=0.03, eps_low=1e-3),
    # The ablations, each one option.
    Options(baseline="joint"),
    Options(cross_omega=False),
    Options(alpha=0.0),
    Options(alpha=2.0),
    Options(alpha=3.0),
    Options(cross_clip=False),
    Options(cross_clip=False, alpha=0.0),
    Options(delta_step=0.0),
    # The other readings, and some of all this together.
    Options(delta=0.1, delta_step=0.01),
    Options(baseline_guard=False),
    Options(cross_baseline="source"),
    Options(ratio_unit="byte"),
    Options(ratio_unit="byte", cross_clip=False, alpha=0.5),
    Options(cross_weight=0.0),
    Options(cross_weight=0.3, beta=0.1, cross_baseline="source", alpha=2.0, delta=0.4),
    # The other methods that share rollouts.
    *[default_options(name) for name in RIVAL_OPTIONS],
    *[replace(default_options(name), beta=0.03, eps_low=1e-3) for name in RIVAL_OPTIONS],
    Options("swarm", share=0.0),
    Options("swarm", share=0.3),
    Options("swarm", share=1.0),
    Options("ftis", cap=1.0, kl_max=0.05),
    Options("ftis", cap=0.5, kl_max=0.0),
    Options("success_gated", transfer_weight=0.0),
    Options("success_gated", transfer_weight=2.5),
    Options("luffy", gamma=1.0),
    Options("topr"),
    Options("topr", beta=0.03),
    *[
        Options("hacpo_robust", **{"ratio_unit": "learner", **changed})
        for changed in (
            {"foreign": "all"},
            {"foreign": "centred"},
            {"foreign": "exact"},
            {"truncate": False},
            {"cross_omega": False},
            {"ratio_unit": "token"},
            {"cross_weight": 0.3, "foreign": "all", "truncate": False},
        )
    ],
]


@pytest.mark.parametrize("options", VARIANTS, ids=label)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_objective_and_gradient(options: Options, n: int) -> None:
    for seed in range(3):
        rng = random.Random(10 * n + seed)
        learner, update = seed % n, seed
        capabilities = random_capabilities(rng, n)
        rollouts = random_rollouts(rng, n, learner, GRADED if seed else BINARY)
        want = objective(rollouts, learner, capabilities, options, update)
        got = run(build(options), rollouts, learner, capabilities, update)
        assert_same(got, want)


@pytest.mark.parametrize("options", [Options(), Options(cross_baseline="source"), Options(baseline="joint")])
def test_objective_with_negative_rewards(options: Options) -> None:
    options = replace(options, reward_min=-1.0)
    for seed in range(3):
        rng = random.Random(seed)
        rollouts = random_rollouts(rng, 3, 1, (-1.0, -0.5, 0.0, 1.0))
        capabilities = random_capabilities(rng, 3)
        got = run(build(options), rollouts, 1, capabilities)
        assert_same(got, objective(rollouts, 1, capabilities, options))


@pytest.mark.parametrize("name", ["gspo", "naive", "hacpo"])
def test_objective_far_off_policy(name: str) -> None:
    # Log-ratios far beyond the clamp, on both sides of it: own, foreign, without the band.
    options = replace(default_options(name), cross_clip=False)
    for seed in range(3):
        rng = random.Random(seed)
        rollouts = random_rollouts(rng, 2, 0, own_spread=20, foreign_spread=20)
        got = run(build(options), rollouts, 0, [0.5, 0.7])
        assert_same(got, objective(rollouts, 0, [0.5, 0.7], options))
        assert float(got.terms.log_ratio_N.abs().max()) == 10


def test_missing_agents_and_empty_groups() -> None:
    # In turn, an agent has no valid reward in the whole batch, the learner included.
    for absent in range(3):
        for options in (Options(), Options(cross_baseline="source"), *map(default_options, ("naive", *RIVAL_OPTIONS))):
            rng = random.Random(absent)
            rollouts = random_rollouts(rng, 3, 0)
            rollouts = [replace(r, reward=None) if r.source == absent else r for r in rollouts]
            capabilities = random_capabilities(rng, 3)
            got = run(build(options), rollouts, 0, capabilities)
            assert_same(got, objective(rollouts, 0, capabilities, options))


@pytest.mark.parametrize("include_current", [True, False])
@pytest.mark.parametrize("metric", ["mean_reward", "positive_rate"])
def test_a_short_training_run(include_current: bool, metric: str) -> None:
    """Rewards to capabilities to objectives, several steps and mini-batches in a row, for every learner."""
    n, rng = 3, random.Random(8)
    options = Options(reward_min=-0.5)
    capability = CapabilityOptions(metric=metric, window=2, include_current=include_current)
    hacpo = HACPO(reward_min=-0.5, capability=capability)
    tracker = hacpo.tracker(n)
    history: list[list[float | None]] = []
    for step in range(4):
        rollouts = random_rollouts(rng, n, 0, (-0.5, 0.0, 1.0), prompts=4)
        if step == 1:
            rollouts = [replace(r, reward=None) if r.source == 2 else r for r in rollouts]
        rewards = [[r.reward for r in rollouts if r.source == j] for j in range(n)]
        history.append([performance(rewards[j], metric, -0.5) for j in range(n)])
        valid = [[r for r in rewards[j] if r is not None] for j in range(n)]
        tracker.update([hacpo.performance(torch.tensor(v, dtype=DOUBLE)) if v else None for v in valid])
        capabilities = capability_history(history, window=2, include_current=include_current)[-1]
        for learner in range(n):
            view = [seen_by(learner, rng, r) for r in rollouts]
            for update, prompts in enumerate(((0, 2), (1, 3))):
                part = [replace(r, prompt=prompts.index(r.prompt)) for r in view if r.prompt in prompts]
                got = run(hacpo, part, learner, tracker.capabilities(), update)
                assert_same(got, objective(part, learner, capabilities, options, update))


def test_single_precision_stays_close() -> None:
    # A trainer has float32 log-probabilities: the clip of 3e-4 must survive that.
    rng = random.Random(2)
    rollouts = random_rollouts(rng, 2, 0, own_spread=3e-3)
    capabilities = [0.4, 0.6]
    want = run(HACPO(), rollouts, 0, capabilities)
    s = want.sequences
    logp_NT = s.logp_NT.detach().float().requires_grad_()
    single = hacrl_algorithms.Sequences(
        logp_NT, s.mask_NT, s.old_logp_N.float(), s.old_length_N, s.bytes_N, s.own_N,
        s.advantage_N.float(), s.omega_N.float(), s.old_logp_NT.float(),
    )  # fmt: skip
    terms = HACPO().terms(single, 0)
    assert terms.objective_N.tolist() == pytest.approx(want.terms.objective_N.tolist(), abs=2e-6)
    assert terms.kept_N.tolist() == want.terms.kept_N.tolist()


# ------------------------------------------------------------------------------------------------------------
# What is reported beside the objective
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *map(default_options, ("gspo", "naive", "topr", *RIVAL_OPTIONS)),
        Options("naive", ratio="own"),
        Options(),
        Options(alpha=3.0),
        Options(cross_clip=False),
        Options("ftis", kl_max=0.02),
        Options("success_gated", transfer_weight=0.0),
    ],
    ids=label,
)
def test_terms_describe_themselves(options: Options) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        rollouts = random_rollouts(rng, 3, 0)
        got = run(build(options), rollouts, 0, random_capabilities(rng, 3), update=2)
        terms, advantage_N = got.terms, got.sequences.advantage_N
        assert (terms.weight_N * advantage_N).tolist() == close(terms.objective_N.tolist())
        for name in ("log_ratio_N", "lower_N", "upper_N", "kept_N", "weight_N"):
            assert not getattr(terms, name).requires_grad
        for row, i in enumerate(got.used):
            rollout = rollouts[i]
            expected = reference_log_ratio(rollout.logps, rollout.old_logps)
            if options.ratio == "own" and rollout.source != 0:
                expected = reference_log_ratio(rollout.logps, rollout.own_old_logps or ())
            if options.algorithm == "hacpo_robust" and rollout.source != 0:
                expected = (math.fsum(rollout.logps) - math.fsum(rollout.old_logps)) / len(rollout.logps)
            assert float(terms.log_ratio_N[row]) == close(expected)
            if float(advantage_N[row]) != 0:
                assert bool(terms.kept_N[row]) == any(got.gradient[i])
            has_band = options.cross_clip and options.algorithm not in (*RIVAL_OPTIONS, "topr")
            foreign_band = (0.85, 1.0) if has_band else (0.0, math.inf)
            own = (rollout.source == 0 or options.algorithm == "naive") and options.algorithm != "topr"
            band = (1 - 3e-4, 1 + 4e-4) if own else foreign_band
            assert (float(terms.lower_N[row]), float(terms.upper_N[row])) == close(band)


def test_grpo_terms_describe_themselves() -> None:
    rng = random.Random(0)
    rollouts = random_rollouts(rng, 1, 0, own_spread=0.3)
    got = run(GRPO(), rollouts, 0, [0.5])
    assert (got.terms.weight_N * got.sequences.advantage_N).tolist() == close(got.terms.objective_N.tolist())
    for row, i in enumerate(got.used):
        if float(got.sequences.advantage_N[row]) != 0:
            assert bool(got.terms.kept_N[row]) == any(got.gradient[i])


@pytest.mark.parametrize("learner", [0, 1])
def test_guarded_share_counts_prompts_with_spread(learner: int) -> None:
    # Rewards are 0 or 1, so only the abler agent's baseline can leave the range.
    capabilities: list[float | None] = [0.3, 0.9]
    total = 0
    for seed in range(6):
        rollouts = random_rollouts(random.Random(seed), 2, learner, none_share=0, prompts=8)
        spread = guarded = 0
        for q in range(8):
            valid = [r for r in rollouts if r.prompt == q and r.reward is not None]
            rewards, sources = [r.reward or 0.0 for r in valid], [r.source for r in valid]
            if len(set(rewards)) > 1:
                spread += 1
                guarded += capability_baseline(sources, rewards, learner, capabilities, guard=False) > 1
        got = run(HACPO(), rollouts, learner, capabilities)
        assert got.advantages.guarded_share == pytest.approx(guarded / max(spread, 1), abs=1e-6)
        total += guarded
    assert (total > 0) == (learner == 1)


def test_the_random_batches_reach_every_branch() -> None:
    """Agreement on batches that stay inside all bands would prove little."""
    seen: set[str] = set()
    for seed in range(6):
        rng = random.Random(seed)
        capabilities = random_capabilities(rng, 3)
        rollouts = random_rollouts(rng, 3, 0)
        advantages = advantages_for(rollouts, 0, capabilities, Options())
        got = run(HACPO(), rollouts, 0, capabilities)
        seen.update(["guarded"] * (got.advantages.guarded_share > 0))
        seen.update(["unguarded"] * (got.advantages.guarded_share < 1))
        for r, a in zip(rollouts, advantages, strict=True):
            if a is None:
                seen.add("no reward")
            elif r.dropped:
                seen.add("dropped")
            else:
                s = math.exp(reference_log_ratio(r.logps, r.old_logps))
                low, high = (1 - 3e-4, 1 + 4e-4) if r.source == 0 else (0.8, 1.0)
                side = "below" if s < low else "above" if s > high else "inside"
                sign = "zero" if a == 0 else "good" if a > 0 else "bad"
                seen.add(f"{'own' if r.source == 0 else 'foreign'} {side} {sign}")
    cells = {
        f"{whose} {side} {sign}"
        for whose in ("own", "foreign")
        for side in ("below", "inside", "above")
        for sign in ("good", "bad", "zero")
    }
    assert cells | {"guarded", "unguarded", "no reward", "dropped"} <= seen


def test_guard_does_not_depend_on_the_order_of_the_agents() -> None:
    """mu = (2 + 7/3 * 6) / 16 = 1, the edge of the range: inside, in whatever order the sum is rounded."""
    own, foreign, omega_KK = [1.0] * 2 + [0.0] * 6, [1.0] * 6 + [0.0] * 2, capability_ratios([7 / 16, 3 / 16])
    baselines = []
    for rewards, sources in ((own + foreign, [0] * 8 + [1] * 8), (foreign + own, [1] * 8 + [0] * 8)):
        rewards_N, prompt_N = torch.tensor(rewards, dtype=torch.float64), torch.zeros(16, dtype=torch.long)
        baselines.append(HACPO().advantages(rewards_N, prompt_N, torch.tensor(sources), 0, omega_KK).baseline_N)
    assert baselines[0].tolist() == pytest.approx([1.0] * 16, abs=1e-12)
    assert baselines[1].tolist() == pytest.approx([1.0] * 16, abs=1e-12)
