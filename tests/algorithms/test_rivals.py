"""The other methods that share rollouts: numbers worked out by hand, and laws. The golden tests have them too."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from algorithm_batches import BINARY, GRADED, RIVAL_OPTIONS, make_sequences, random_rollouts, run
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import ALGORITHMS, FTIS, GSPO, LUFFY, TOPR, Algorithm, Naive, SuccessGated, Swarm, Terms
from reference import Rollout

law = settings(max_examples=30, deadline=None, derandomize=True, database=None)

DOUBLE = torch.float64
seeds = st.integers(0, 2**32 - 1)
names = st.sampled_from(sorted(RIVAL_OPTIONS))
# Two rewards, 1 and 0: mean 1/2, standard deviation sqrt(1/2).
PAIR = 0.5 / (math.sqrt(0.5) + 1e-6)


def advantages(
    algorithm: Algorithm, groups: list[list[list[float]]], learner: int = 0
) -> tuple[list[list[list[float]]], torch.Tensor]:
    """A for rewards given by prompt and agent, in the same shape; and the source of each rollout."""
    flat = [(q, j, r) for q, agents in enumerate(groups) for j, rewards in enumerate(agents) for r in rewards]
    prompt_N, source_N = (torch.tensor([row[column] for row in flat]) for column in (0, 1))
    rewards_N = torch.tensor([row[2] for row in flat], dtype=DOUBLE)
    omega_KK = algorithm.omega([0.5] * len(groups[0]))
    values = iter(algorithm.advantages(rewards_N, prompt_N, source_N, learner, omega_KK).advantage_N.tolist())
    return [[[next(values) for _ in rewards] for rewards in agents] for agents in groups], source_N


def one_term(algorithm: Algorithm, rollout: Rollout, advantage: float) -> tuple[Terms, list[float]]:
    """A single rollout's term for learner 0, and its gradient."""
    advantage_N, one_N = torch.tensor([advantage], dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    sequences = make_sequences([rollout], 0, advantage_N, one_N, by_token=isinstance(algorithm, FTIS))
    terms = algorithm.terms(sequences, 0)
    (gradient_NT,) = torch.autograd.grad(terms.objective_N.sum(), sequences.logp_NT)
    return terms, gradient_NT[sequences.mask_NT].tolist()


def foreign(logps: tuple[float, ...], old_logps: tuple[float, ...] = (-1.0, -2.0)) -> Rollout:
    return Rollout(1, 0, 1.0, old_logps, logps)


# ------------------------------------------------------------------------------------------------------------
# By hand
# ------------------------------------------------------------------------------------------------------------


def test_by_hand_swarm_advantages() -> None:
    # A share of 1/2 takes prompts 1 and 3 from the other agent, whose group has no spread on prompt 3.
    groups = [[[1.0, 0.0], [0.0, 1.0]]] * 3 + [[[1.0, 0.0], [1.0, 1.0]]]
    got, source_N = advantages(Swarm(), groups)
    own, other, nothing = [PAIR, -PAIR], [-PAIR, PAIR], [0.0, 0.0]
    want = [[own, nothing], [nothing, other], [own, nothing], [nothing, nothing]]
    for prompt, want_prompt in zip(got, want, strict=True):
        for group, want_group in zip(prompt, want_prompt, strict=True):
            assert group == pytest.approx(want_group, abs=1e-15)
    # 16 rollouts are there, 8 are used.
    assert Swarm().mean_weights(source_N, 0).tolist() == [1 / 8] * 16


def test_by_hand_swarm_turns() -> None:
    # The second of three agents, from others alone: the first, the third, the first, the third.
    got, _ = advantages(Swarm(share=1.0), [[[1.0, 0.0]] * 3] * 4, learner=1)
    assert [[j for j, group in enumerate(prompt) if any(group)] for prompt in got] == [[0], [2], [0], [2]]


def test_by_hand_swarm_and_success_gated_terms() -> None:
    # Three tokens, as if on-policy: the ratio is 1, whatever the source said, with the gradient of the mean.
    rollout = foreign((-1.0, -5.0, -0.3))
    for algorithm, weight in ((Swarm(), 1.0), (SuccessGated(transfer_weight=0.5), 0.5)):
        terms, gradient = one_term(algorithm, rollout, -1.2)
        assert float(terms.objective_N.detach()) == pytest.approx(-1.2 * weight, abs=1e-15)
        assert gradient == pytest.approx([-0.4 * weight] * 3, abs=1e-15)
        assert (float(terms.lower_N), float(terms.upper_N), float(terms.weight_N)) == (0, math.inf, weight)


def test_by_hand_ftis() -> None:
    # Ratios 3 and 1/2, the first cut to 2: (2 + 1/2) / 2 = 1.25, by the tokens 2 / 2 and (1/2) / 2.
    # k3: ((3 - ln 3 - 1) + (1/2 + ln 2 - 1)) / 2 = (0.901388 + 0.193147) / 2 = 0.547267.
    rollout = foreign((math.log(3) - 1, -math.log(2) - 1), (-1.0, -1.0))
    terms, gradient = one_term(FTIS(), rollout, 1.0)
    assert float(terms.objective_N.detach()) == pytest.approx(1.25, abs=1e-15)
    assert gradient == pytest.approx([1.0, 0.25], abs=1e-15)
    assert terms.kept_N.tolist() == [True]
    # Wrong and too far away: left out; with a limit just above the estimate it is used.
    terms, gradient = one_term(FTIS(kl_max=0.5472), rollout, -1.0)
    assert (float(terms.objective_N.detach()), gradient, terms.kept_N.tolist()) == (0, [0, 0], [False])
    terms, gradient = one_term(FTIS(kl_max=0.5473), rollout, -1.0)
    assert gradient == pytest.approx([-1.0, -0.25], abs=1e-15)
    # Other tokens: the source's sum of -2 is -1 for each of two, so both ratios are 1.
    terms, gradient = one_term(FTIS(), foreign((-1.0, -1.0), (-2.0,)), 1.0)
    assert gradient == pytest.approx([0.5, 0.5], abs=1e-15)


def test_by_hand_success_gated_advantages() -> None:
    # Prompt 0: nothing right of its own. 0, 0, 1, 0 have mean 1/4 and standard deviation 1/2, so A = 3/4 / (1/2 + 1e-6)
    # for the other's right one. Prompt 1: one of its own is right, so nothing is transferred.
    groups = [[[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]]
    got, source_N = advantages(SuccessGated(), groups)
    assert got[0][0] == [0, 0]
    assert got[0][1] == pytest.approx([1.499997000006, 0], abs=1e-12)
    assert got[1][0] == pytest.approx([PAIR, -PAIR], abs=1e-15)
    assert got[1][1] == [0, 0]
    assert SuccessGated().mean_weights(source_N, 0).tolist() == [1 / 4] * 8


def test_by_hand_luffy_advantages() -> None:
    # The group is 1, 0 and the right one of the other: mean 2/3, variance (1/9 + 4/9 + 1/9) / 2 = 1/3.
    got, _ = advantages(LUFFY(), [[[1.0, 0.0], [1.0, 0.0]]])
    std = math.sqrt(1 / 3) + 1e-6
    assert got[0][0] == pytest.approx([1 / 3 / std, -2 / 3 / std], abs=1e-14)
    assert got[0][1] == pytest.approx([1 / 3 / std, 0], abs=1e-14)


def test_by_hand_luffy_term() -> None:
    # Probabilities 0.1 and 0.9: f = 0.5 and 0.9, mean 0.7; p f'(p) = 0.1 * 0.1 / 0.04 and 0.9 * 0.1 / 1, each / 2.
    terms, gradient = one_term(LUFFY(), foreign((math.log(0.1), math.log(0.9))), 2.0)
    assert float(terms.objective_N.detach()) == pytest.approx(1.4, abs=1e-15)
    assert gradient == pytest.approx([0.25, 0.09], abs=1e-15)


def test_by_hand_topr_term() -> None:
    # The whole answer is exp(-4 + 3) as likely for the learner as for its source: what a wrong one weighs, own or not.
    for source in (0, 1):
        rollout = Rollout(source, 0, 1.0, (-1.0, -2.0), (-1.5, -2.5))
        assert one_term(TOPR(), rollout, -2.0)[1] == pytest.approx([-math.exp(-1)] * 2, abs=1e-15)
        assert one_term(TOPR(), rollout, 2.0)[1] == [1, 1]
    # Where it is likelier for the learner, the weight is 1.
    assert one_term(TOPR(), foreign((-0.5, -0.5)), -2.0)[1] == [-1, -1]


# ------------------------------------------------------------------------------------------------------------
# Laws
# ------------------------------------------------------------------------------------------------------------


@law
@given(seed=seeds, name=names, update=st.integers(0, 5))
def test_one_agent_is_gspo(seed: int, name: str, update: int) -> None:
    rollouts = random_rollouts(random.Random(seed), 1, 0, GRADED)
    rival, gspo = (run(algorithm, rollouts, 0, [0.5], update) for algorithm in (ALGORITHMS[name](), GSPO()))
    assert rival.value == pytest.approx(gspo.value, abs=1e-14)
    for got, want in zip(rival.gradient, gspo.gradient, strict=True):
        assert got == pytest.approx(want, abs=1e-14)
    assert rival.terms.kept_N.tolist() == gspo.terms.kept_N.tolist()


@law
@given(seed=seeds, name=names, n=st.integers(2, 4))
def test_own_terms_are_those_of_gspo(seed: int, name: str, n: int) -> None:
    """Whatever the advantages: the methods differ in what they do with foreign rollouts."""
    rollouts = [r for r in random_rollouts(random.Random(seed), n, 0) if r.source == 0]
    advantage_N = torch.linspace(-2, 2, len(rollouts), dtype=DOUBLE)
    sequences = make_sequences(rollouts, 0, advantage_N, torch.ones_like(advantage_N))
    got, want = (algorithm.terms(sequences, 1) for algorithm in (ALGORITHMS[name](), GSPO()))
    for field in vars(want):
        assert getattr(got, field).tolist() == getattr(want, field).tolist()


@law
@given(name=names, advantage=st.sampled_from([-1.0, 1.0]), logp=st.floats(-1e4, 0), old_logp=st.floats(-1e4, 0))
def test_nothing_explodes_however_far_apart_the_policies_are(
    name: str, advantage: float, logp: float, old_logp: float
) -> None:
    terms, gradient = one_term(ALGORITHMS[name](), foreign((logp,), (old_logp,)), advantage)
    assert abs(float(terms.objective_N.detach())) <= 2
    assert math.isfinite(gradient[0])
    assert abs(gradient[0]) <= 2
    assert float(terms.objective_N.detach()) == float(terms.weight_N) * advantage


@law
@given(
    share=st.sampled_from([0.0, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9, 1.0]),
    prompts=st.integers(1, 60),
    agents=st.integers(2, 5),
    data=st.data(),
)
def test_swarm_takes_its_share_of_the_prompts_from_the_others_in_turn(
    share: float, prompts: int, agents: int, data: st.DataObject
) -> None:
    learner = data.draw(st.integers(0, agents - 1))
    got, source_N = advantages(Swarm(share=share), [[[1.0, 0.0]] * agents] * prompts, learner)
    used = [[j for j, group in enumerate(prompt) if any(group)] for prompt in got]
    assert all(len(sources) == 1 for sources in used)
    taken = Counter(sources[0] for sources in used)
    of_others = [taken[j] for j in range(agents) if j != learner]
    assert sum(of_others) == math.floor(prompts * share + 1e-9)
    assert max(of_others) - min(of_others) <= 1
    # As many rollouts as alone, and one mean over them.
    assert Swarm(share=share).rollouts_used(2, [2] * (agents - 1)) == 2
    weights = Swarm(share=share).mean_weights(source_N, learner)
    assert weights.tolist() == pytest.approx([1 / (2 * prompts)] * len(source_N), rel=1e-12)


@law
@given(seed=seeds, n=st.integers(2, 4))
def test_swarm_without_a_share_is_gspo(seed: int, n: int) -> None:
    rollouts = random_rollouts(random.Random(seed), n, 0, GRADED)
    got, want = (run(algorithm, rollouts, 0, [0.5] * n) for algorithm in (Swarm(share=0.0), GSPO()))
    assert got.value == pytest.approx(want.value, abs=1e-14)
    for gradient, expected in zip(got.gradient, want.gradient, strict=True):
        assert gradient == pytest.approx(expected, abs=1e-14)


def test_swarm_keeps_its_own_group_where_the_one_in_turn_has_none() -> None:
    got, _ = advantages(Swarm(share=1.0), [[[1.0, 0.0], []], [[1.0, 0.0], [1.0, 0.0]]])
    assert got[0][0] == pytest.approx([PAIR, -PAIR])
    assert got[1][0] == [0, 0]


@law
@given(
    seed=seeds,
    cap=st.sampled_from([0.3, 1.0, 2.0, 5.0]),
    kl_max=st.sampled_from([0.0, 0.1, 0.5, 10.0]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_ftis_weights_are_bounded_and_only_wrong_ones_are_left_out(
    seed: int, cap: float, kl_max: float, spread: float
) -> None:
    rollouts = random_rollouts(random.Random(seed), 3, 0, foreign_spread=spread)
    got = run(FTIS(cap=cap, kl_max=kl_max), rollouts, 0, [0.5] * 3)
    foreign_N, advantage_N = ~got.sequences.own_N, got.sequences.advantage_N
    weight_N = got.terms.weight_N[foreign_N]
    assert ((weight_N >= 0) & (weight_N <= cap + 1e-12)).all()
    assert got.terms.kept_N[foreign_N & (advantage_N > 0)].all()
    left_out_N = foreign_N & (advantage_N != 0) & ~got.terms.kept_N
    assert (advantage_N[left_out_N] < 0).all()
    # One group of all agents, as in naive sharing.
    naive = run(Naive(), rollouts, 0, [0.5] * 3)
    assert advantage_N.tolist() == naive.sequences.advantage_N.tolist()


@law
@given(seed=seeds)
def test_ftis_between_equal_policies_is_the_plain_policy_gradient(seed: int) -> None:
    rollouts = [replace(r, logps=r.old_logps) for r in random_rollouts(random.Random(seed), 2, 0)]
    got = run(FTIS(), rollouts, 0, [0.5] * 2)
    for row, i in enumerate(got.used):
        length = len(rollouts[i].logps)
        slope = float(got.sequences.advantage_N[row]) / length / len(got.used)
        assert got.gradient[i] == pytest.approx([slope] * length, abs=1e-14)


@law
@given(seed=seeds, n=st.integers(2, 4), rewards=st.sampled_from([BINARY, GRADED]))
def test_success_gated_is_gspo_where_every_own_group_has_a_right_one(
    seed: int, n: int, rewards: tuple[float, ...]
) -> None:
    rng = random.Random(seed)
    rollouts = random_rollouts(rng, n, 0, rewards)
    first = {q: next(i for i, r in enumerate(rollouts) if (r.prompt, r.source) == (q, 0)) for q in range(5)}
    rollouts = [replace(r, reward=1.0) if i in first.values() else r for i, r in enumerate(rollouts)]
    got, want = (run(algorithm, rollouts, 0, [0.5] * n) for algorithm in (SuccessGated(), GSPO()))
    assert got.value == pytest.approx(want.value, abs=1e-14)
    for gradient, expected in zip(got.gradient, want.gradient, strict=True):
        assert gradient == pytest.approx(expected, abs=1e-14)


@law
@given(seed=seeds, n=st.integers(2, 4), name=st.sampled_from(["success_gated", "luffy"]))
def test_nothing_wrong_is_taken_from_others(seed: int, n: int, name: str) -> None:
    rollouts = random_rollouts(random.Random(seed), n, 0, BINARY)
    got = run(ALGORITHMS[name](), rollouts, 0, [0.5] * n)
    taken = [r for r, g in zip(rollouts, got.gradient, strict=True) if r.source != 0 and any(g)]
    assert all(r.reward == 1 for r in taken)
    # And it makes them likelier.
    assert all(min(g) >= 0 for r, g in zip(rollouts, got.gradient, strict=True) if r.source != 0)
    if name == "success_gated":
        solved = {r.prompt for r in rollouts if r.source == 0 and r.reward == 1}
        assert not solved & {r.prompt for r in taken}


@law
@given(gamma=st.sampled_from([0.01, 0.1, 1.0]), logps=st.lists(st.floats(-30, 0), min_size=2, max_size=2, unique=True))
def test_luffy_turns_the_gradient_towards_unlikely_tokens(gamma: float, logps: list[float]) -> None:
    """Per unit of the plain gradient p it is gamma / (p + gamma)^2: up to 1 / gamma, the more the rarer the token."""
    terms, gradient = one_term(LUFFY(gamma=gamma), foreign(tuple(sorted(logps))), 1.0)
    assert 0 < float(terms.weight_N) < 1
    rare, common = (2 * g / math.exp(logp) for g, logp in zip(gradient, sorted(logps), strict=True))
    assert gamma / (1 + gamma) ** 2 * (1 - 1e-9) <= common <= rare * (1 + 1e-9)
    assert rare <= 1 / gamma * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swarm", {"share": 1.2}),
        ("swarm", {"share": -0.1}),
        ("ftis", {"cap": 0.0}),
        ("ftis", {"kl_max": -1.0}),
        ("success_gated", {"transfer_weight": -1.0}),
        ("luffy", {"gamma": 0.0}),
        ("luffy", {"gamma": math.inf}),
    ],
)
def test_senseless_options_are_refused_by_name(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ALGORITHMS[name](**options)
