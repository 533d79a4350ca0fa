"""Options that every algorithm has: how terms are averaged, CISPO's clip, and what advantages are divided by."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from algorithm_batches import (
    BINARY,
    GRADED,
    build,
    default_options,
    label,
    make_sequences,
    random_capabilities,
    random_rollouts,
    run,
    with_readings,
)

from hacrl.algorithms import (
    ALGORITHMS,
    GRPO,
    GSPO,
    HACPO,
    TOPR,
    Algorithm,
    Naive,
    RobustHACPO,
    SuccessGated,
    Swarm,
    capability_ratios,
    group_advantages,
)
from hacrl.config import parse_algorithm
from reference import Options, Rollout, objective

DOUBLE = torch.float64
CLIPPED = [name for name in ALGORITHMS if name != "topr"]
BY_SEQUENCE = [name for name in CLIPPED if name not in ("grpo", "opd")]
CAP = 1.0003
"""Of CISPO: between the own ratios of the random batches."""


def close(value: object) -> object:
    return pytest.approx(value, rel=1e-11, abs=1e-13)


VARIANTS = [
    replace(default_options(name), **changed)
    for name in ALGORITHMS
    for changed in (
        {"loss_type": "bnpo"},
        {"loss_type": "dapo", "beta": 0.03, "scale_rewards": "batch"},
        {"loss_type": "dr_grpo", "beta": 0.03, "scale_rewards": "none"},
        {"loss_type": "cispo", "beta": 0.03, "eps_high": CAP},
    )
    if name in CLIPPED or changed["loss_type"] != "cispo"
]
VARIANTS += [
    Options("naive", ratio="own", loss_type="cispo", eps_high=CAP),
    Options("swarm", share=0.3, loss_type="dapo"),
    Options("hacpo", cross_weight=0.3, loss_type="dapo", cross_baseline="source", scale_rewards="batch"),
    Options("hacpo_robust", foreign="all", ratio_unit="learner", scale_rewards="batch"),
    Options("hacpo_robust", foreign="all", ratio_unit="learner", scale_rewards="none", cross_weight=0.0),
]


@pytest.mark.parametrize("options", VARIANTS, ids=label)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_objective_and_gradient(options: Options, n: int) -> None:
    for seed in range(3):
        rng = random.Random(10 * n + seed)
        learner, update = seed % n, seed
        capabilities = random_capabilities(rng, n)
        rollouts = random_rollouts(rng, n, learner, GRADED if seed else BINARY)
        if options.algorithm == "opd":
            rollouts = with_readings(rng, rollouts, n - 1)
        want = objective(rollouts, learner, capabilities, options, update)
        got = run(build(options), rollouts, learner, capabilities, update)
        assert got.value == close(want.value)
        for gradient, expected in zip(got.gradient, want.gradient, strict=True):
            assert gradient == close(expected)
        if options.algorithm != "opd":  # a token has an advantage of its own there
            assert (got.terms.weight_N * got.sequences.advantage_N).tolist() == close(got.terms.objective_N.tolist())
        plain = run(build(replace(options, loss_type="grpo", scale_rewards="group")), rollouts, learner, capabilities)
        assert plain.gradient != got.gradient


# --- how terms are averaged --------------------------------------------------------------------------------


def test_by_hand_rollout_weights() -> None:
    source_N, length_N = torch.tensor([0, 1, 0, 1]), torch.tensor([1, 2, 3, 6])
    expected: list[tuple[Algorithm, list[float]]] = [
        # Own tokens 1 + 3, foreign ones 2 + 6, of which each counts half.
        (HACPO(cross_weight=0.5, loss_type="dapo"), [1 / 4, 1 / 8, 3 / 4, 3 / 8]),
        (RobustHACPO(loss_type="bnpo"), [1 / 4, 1 / 4, 3 / 4, 3 / 4]),
        # Two rollouts each, of at most 8 tokens.
        (HACPO(cross_weight=0.5, loss_type="dr_grpo"), [1 / 16, 2 / 32, 3 / 16, 6 / 32]),
        (SuccessGated(loss_type="cispo", epsilon_high=5.0), [1 / 4, 1 / 4, 3 / 4, 3 / 4]),
        # One mean over all 12 tokens, or over 4 rollouts of at most 8 tokens.
        (Naive(loss_type="dapo"), [1 / 12, 1 / 6, 1 / 4, 1 / 2]),
        (Naive(loss_type="dr_grpo"), [1 / 32, 2 / 32, 3 / 32, 6 / 32]),
        # Half of 4 own and half of 8 foreign tokens are trained on.
        (Swarm(loss_type="dapo"), [1 / 6, 2 / 6, 3 / 6, 6 / 6]),
    ]
    for algorithm, weights in expected:
        assert algorithm.rollout_weights(source_N, 0, length_N, 8).tolist() == close(weights)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_by_default_rollouts_count_alike(name: str) -> None:
    algorithm, source_N = ALGORITHMS[name](), torch.tensor([1, 0, 1, 2, 0, 1, 1])
    weight_N = algorithm.rollout_weights(source_N, 0, torch.tensor([5, 1, 2, 8, 3, 4, 7]), 8)
    assert weight_N.tolist() == algorithm.mean_weights(source_N, 0).tolist()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "dr_grpo"])
def test_with_equal_lengths_it_does_not_matter_what_counts_alike(name: str, loss_type: str) -> None:
    source_N, length_N = torch.tensor([1, 0, 1, 2, 0]), torch.full((5,), 6)
    plain_N = ALGORITHMS[name]().mean_weights(source_N, 0)
    got_N = ALGORITHMS[name](loss_type=loss_type).rollout_weights(source_N, 0, length_N, 8)
    assert got_N.tolist() == close((plain_N * (6 / 8 if loss_type == "dr_grpo" else 1)).tolist())


# --- CISPO -------------------------------------------------------------------------------------------------


def one_own(algorithm: Algorithm, rollout: Rollout, advantage: float) -> tuple[float, list[float]]:
    advantage_N, one_N = torch.tensor([advantage], dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    sequences = make_sequences([rollout], 0, advantage_N, one_N)
    terms = algorithm.terms(sequences, 0)
    assert terms.kept_N.tolist() == [advantage != 0]
    assert (terms.lower_N.tolist(), terms.upper_N.tolist()) == ([0.0], [math.inf])
    (gradient_NT,) = torch.autograd.grad(terms.objective_N.sum(), sequences.logp_NT)
    return float(terms.objective_N.detach()), gradient_NT[sequences.mask_NT].tolist()


def test_by_hand_cispo_tokens() -> None:
    # Ratios 1.5, 1.1, 0.5, the first cut to 1.2, each over three tokens; both signs of A have a gradient.
    rollout = Rollout(0, 0, 1.0, (-2.0, -2.0, -2.0), tuple(math.log(r) - 2 for r in (1.5, 1.1, 0.5)))
    for sign in (1.0, -1.0):
        value, gradient = one_own(GRPO(loss_type="cispo", epsilon_high=1.2), rollout, sign)
        assert value == close(sign * 2.8 / 3)
        assert gradient == close([sign * 0.4, sign * 1.1 / 3, sign * 0.5 / 3])


@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_by_hand_cispo_sequences(name: str) -> None:
    # Two tokens, each up by 0.001: s = 1.0010005001667084, cut to 1.0003; below the cap it stays.
    rollout = Rollout(0, 0, 1.0, (-1.0, -2.0), (-0.999, -1.999), num_bytes=7)
    for cap, weight in ((1.0003, 1.0003), (5.0, 1.0010005001667084)):
        for sign in (1.0, -1.0):
            value, gradient = one_own(ALGORITHMS[name](loss_type="cispo", epsilon_high=cap), rollout, sign)
            assert value == close(sign * weight)
            assert gradient == close([sign * weight / 2] * 2)


@pytest.mark.parametrize("name", CLIPPED)
def test_cispo_needs_its_own_bound(name: str) -> None:
    with pytest.raises(ValueError, match="epsilon_high is the largest ratio itself, as in TRL"):
        ALGORITHMS[name](loss_type="cispo")


def test_cispo_replaces_a_clip() -> None:
    with pytest.raises(ValueError, match="topr has no clip that cispo could replace"):
        TOPR(loss_type="cispo")


# --- what advantages are divided by ------------------------------------------------------------------------


def test_by_hand_scale_rewards() -> None:
    # Rewards 1, 0, 0 and 1, 1: all have mean 3/5 and variance (3 * 4/25 + 2 * 9/25) / 4 = 0.3.
    rewards_N, prompt_N = torch.tensor([1, 0, 0, 1, 1], dtype=DOUBLE), torch.tensor([0, 0, 0, 1, 1])
    centred = [2 / 3, -1 / 3, -1 / 3, 0, 0]
    assert group_advantages(rewards_N, prompt_N, "none").advantage_N.tolist() == close(centred)
    std = math.sqrt(0.3) + 1e-6
    assert group_advantages(rewards_N, prompt_N, "batch").advantage_N.tolist() == close([x / std for x in centred])


def test_by_hand_scale_rewards_of_a_pair() -> None:
    # Own 0, 0 and 1, 0; foreign 1, 0 and 1, 1. All of them: mean 1/2, variance 8 * 1/4 / 7. Own alone: mean 1/4,
    # variance (3 * 1/16 + 9/16) / 3 = 1/4. Own means are 0 and 1/2.
    prompt_N, source_N = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    rewards_N = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1], dtype=DOUBLE)
    for scale, own, pair in (("none", 1.0, 1.0), ("batch", 0.5 + 1e-6, math.sqrt(2 / 7) + 1e-6)):
        algorithm = RobustHACPO(scale_rewards=scale)
        got = algorithm.advantages(rewards_N, prompt_N, source_N, 0, capability_ratios([0.5, 0.5]))
        expected = [0, 0, 1 / pair, 0, 0.5 / own, -0.5 / own, 0.5 / pair, 0.5 / pair]
        assert got.advantage_N.tolist() == close(expected)


@pytest.mark.parametrize("name", BY_SEQUENCE)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_one_agent_is_gspo_with_every_option(name: str, loss_type: str, scale_rewards: str) -> None:
    common = {"loss_type": loss_type, "scale_rewards": scale_rewards, "epsilon_high": CAP}
    rollouts = random_rollouts(random.Random(5), 1, 0, GRADED)
    got, want = (run(algorithm(**common), rollouts, 0, [0.5]) for algorithm in (ALGORITHMS[name], GSPO))
    assert got.value == close(want.value)
    for gradient, expected in zip(got.gradient, want.gradient, strict=True):
        assert gradient == close(expected)


@pytest.mark.parametrize("name", ["swarm", "success_gated", "hacpo_robust"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_own_groups_do_not_see_foreign_rewards(name: str, scale_rewards: str) -> None:
    """Whose own rollouts are compared with each other alone has GSPO's advantages for them, whatever the scale."""
    rollouts = random_rollouts(random.Random(6), 3, 0, GRADED, dropped_share=0)
    got = run(ALGORITHMS[name](scale_rewards=scale_rewards), rollouts, 0, [0.5] * 3)
    want = run(GSPO(scale_rewards=scale_rewards), rollouts, 0, [0.5] * 3).advantages.advantage_N.tolist()
    own = got.advantages.advantage_N[got.sequences.own_N].tolist()
    assert all(a in (0.0, close(b)) for a, b in zip(own, want, strict=True))  # 0: a swarm took another's group
    assert own == close(want) or name == "swarm"


def test_scale_rewards_takes_what_trl_takes() -> None:
    for given, meant in ((True, "group"), (False, "none"), ("batch", "batch"), ("none", "none")):
        assert parse_algorithm({"name": "gspo", "scale_rewards": given}).scale_rewards == meant
    with pytest.raises(ValueError, match="scale_rewards"):
        parse_algorithm({"name": "gspo", "scale_rewards": "prompt"})
