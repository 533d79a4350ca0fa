"""What docs/algorithm.md, section 18, proves about robust HACPO, checked on its code.

Policies that are not tables, and sources at several overlaps, are in test_alignment.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import GSPO, HACPO, RobustHACPO, Sequences, clipped_minimum

law = settings(max_examples=40, deadline=None, derandomize=True, database=None)
DOUBLE = torch.float64


def batch(seed: int, sizes: list[int], graded: bool, prompts: int = 4, tokens: int = 5) -> dict[str, torch.Tensor]:
    """Rewards and log-probabilities of `sizes[k]` rollouts of each agent on each prompt, as learner 0 sees them."""
    random = torch.Generator().manual_seed(seed)
    N = prompts * sum(sizes)
    rewards_N = torch.rand(N, generator=random, dtype=DOUBLE)
    return {
        "rewards_N": rewards_N if graded else (rewards_N < 0.5).to(DOUBLE),
        "prompt_N": torch.cat([torch.arange(prompts).repeat_interleave(size) for size in sizes]),
        "source_N": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) * prompts),
        "logp_NT": -torch.rand(N, tokens, generator=random, dtype=DOUBLE) * 2,
        "old_logp_N": -torch.rand(N, generator=random, dtype=DOUBLE) * 2 * tokens,
    }


def evaluate(algorithm: GSPO | HACPO | RobustHACPO, data: dict[str, torch.Tensor], capabilities: list[float]) -> dict:
    """Advantages, terms and the gradient by each log-probability, for learner 0."""
    omega_KK = algorithm.omega(list(capabilities))
    used = [n for n, j in enumerate(data["source_N"].tolist()) if algorithm.shares_rollouts or j == 0]
    rewards_N, prompt_N, source_N = (data[name][used] for name in ("rewards_N", "prompt_N", "source_N"))
    advantage_N = algorithm.advantages(rewards_N, prompt_N, source_N, 0, omega_KK).advantage_N
    logp_NT = data["logp_NT"][used].clone().requires_grad_()
    N, T = logp_NT.shape
    sequences = Sequences(
        logp_NT=logp_NT,
        mask_NT=torch.ones(N, T, dtype=torch.bool),
        old_logp_N=data["old_logp_N"][used],
        old_length_N=torch.full((N,), T, dtype=DOUBLE),
        bytes_N=torch.full((N,), T, dtype=DOUBLE),
        own_N=source_N == 0,
        advantage_N=advantage_N,
        omega_N=algorithm.coefficients(source_N, 0, omega_KK),
        old_logp_NT=torch.zeros(N, T, dtype=DOUBLE),
    )
    terms = algorithm.terms(sequences, 0)
    objective = (terms.objective_N * algorithm.mean_weights(source_N, 0)).sum()
    (gradient_NT,) = torch.autograd.grad(objective, logp_NT)
    return {"advantage_N": advantage_N, "source_N": source_N, "terms": terms, "gradient_NT": gradient_NT}


def foreign_advantages(rewards: list[float], n: int) -> torch.Tensor:
    """A of the source's rollouts on one prompt; the first n rewards are the learner's own."""
    source_N = torch.tensor([0] * n + [1] * (len(rewards) - n))
    prompt_N = torch.zeros(len(rewards), dtype=torch.long)
    result = RobustHACPO().advantages(torch.tensor(rewards, dtype=DOUBLE), prompt_N, source_N, 0, torch.ones(2, 2))
    return result.advantage_N[n:]


seeds, kinds = st.integers(0, 2**32 - 1), st.booleans()
groups = st.lists(st.integers(1, 8), min_size=2, max_size=4)


@given(seeds, kinds, groups)
@law
def test_the_own_part_is_gspo_to_the_bit(seed: int, graded: bool, sizes: list[int]) -> None:
    data = batch(seed, sizes, graded)
    alone, robust = (evaluate(algorithm, data, [0.5] * len(sizes)) for algorithm in (GSPO(), RobustHACPO()))
    own_N = robust["source_N"] == 0
    assert torch.equal(robust["advantage_N"][own_N], alone["advantage_N"])
    assert torch.equal(robust["gradient_NT"][own_N], alone["gradient_NT"])


@given(seeds, kinds, groups)
@law
def test_baselines_do_not_depend_on_foreign_rewards(seed: int, graded: bool, sizes: list[int]) -> None:
    data = batch(seed, sizes, graded)
    others = {**data, "rewards_N": torch.where(data["source_N"] == 0, data["rewards_N"], 1 - data["rewards_N"])}
    first, second = (
        RobustHACPO().advantages(d["rewards_N"], d["prompt_N"], d["source_N"], 0, torch.ones(len(sizes), len(sizes)))
        for d in (data, others)
    )
    assert torch.equal(first.baseline_N, second.baseline_N)


@given(seeds, kinds)
@law
def test_an_agent_without_right_answers_changes_nothing(seed: int, graded: bool) -> None:
    """Agent 2 has no reward above the learner's own mean on any prompt."""
    data = batch(seed, [3, 3, 3], graded)
    own_N, last_N = data["source_N"] == 0, data["source_N"] == 2
    own_mean_P = data["rewards_N"][own_N].view(-1, 3).mean(1)
    data["rewards_N"][last_N] *= own_mean_P[data["prompt_N"][last_N]]
    pair = {name: column[~last_N] for name, column in data.items()}
    three, two = evaluate(RobustHACPO(), data, [0.5, 0.4, 0.01]), evaluate(RobustHACPO(), pair, [0.5, 0.4])
    assert torch.equal(three["gradient_NT"][~last_N], two["gradient_NT"])
    assert not three["gradient_NT"][last_N].any()
    # Under HACPO the learner's own advantages change.
    published = [
        evaluate(HACPO(), rows, c)["advantage_N"] for rows, c in ((data, [0.5, 0.4, 0.01]), (pair, [0.5, 0.4]))
    ]
    if data["rewards_N"][own_N].any():
        assert not torch.allclose(published[0][~last_N], published[1])


@given(seeds, kinds, st.integers(1, 8), st.integers(1, 8))
@law
def test_weights_and_advantages_are_bounded(seed: int, graded: bool, n: int, m: int) -> None:
    data = batch(seed, [n, m], graded)
    result = evaluate(RobustHACPO(), data, [0.2, 0.8])
    foreign_N = result["source_N"] == 1
    advantage_N, weight_N = result["advantage_N"][foreign_N], result["terms"].weight_N[foreign_N]
    assert (weight_N <= 1).all()
    assert (weight_N > 0).all()
    assert (advantage_N >= 0).all()
    assert (advantage_N <= math.sqrt((1 + 1 / n) * (n + m - 1) if graded else n + m)).all()
    assert (advantage_N.view(-1, m).mean(1) <= math.sqrt((1 / n + 1 / m) * (n + m - 1))).all()
    # d term / d logp_t = w A / len, so the norm by the mean log-probability is w A.
    slope_N = result["gradient_NT"][foreign_N].sum(1) * int(foreign_N.sum())
    torch.testing.assert_close(slope_N, weight_N * advantage_N)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (4, 4), (8, 8), (3, 5), (6, 2)])
def test_the_bounds_on_advantages_are_reached(n: int, m: int) -> None:
    """Own rewards 0; the source's: one right answer among wrong ones, among half-right ones, and all of them right."""
    binary = foreign_advantages([0.0] * n + [1.0] + [0.0] * (m - 1), n)
    graded = foreign_advantages([0.0] * n + [1.0] + [1 / (n + 1)] * (m - 1), n)
    assert float(binary.max()) == pytest.approx(math.sqrt(n + m), rel=1e-5)
    assert float(graded.max()) == pytest.approx(math.sqrt((1 + 1 / n) * (n + m - 1)), rel=1e-5)
    if n == m:
        assert float(graded.max()) == pytest.approx(math.sqrt(2 * n + 1 - 1 / n), rel=1e-5)
    mean = float(foreign_advantages([0.0] * n + [1.0] * m, n).mean())
    assert mean == pytest.approx(math.sqrt((1 / n + 1 / m) * (n + m - 1)), rel=1e-5)


@pytest.mark.parametrize("G", [2, 4, 8])
def test_the_variance_of_the_foreign_part_is_that_of_prompts_not_of_rollouts(G: int) -> None:
    """All rollouts of a prompt alike, the gradient of a prompt +1 or -1: the bound (4 - 2 / G) L^2 / P is reached."""
    P = 3
    source_N = torch.arange(2).repeat_interleave(P * G)
    data = {
        "rewards_N": source_N.to(DOUBLE),
        "prompt_N": torch.arange(P).repeat_interleave(G).repeat(2),
        "source_N": source_N,
        "logp_NT": torch.zeros(len(source_N), 5, dtype=DOUBLE),
        "old_logp_N": torch.zeros(len(source_N), dtype=DOUBLE),
    }
    slope_P = evaluate(RobustHACPO(), data, [0.5, 0.5])["gradient_NT"].view(2, P, -1)[1].sum(1)
    directions_SP = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=P)), dtype=DOUBLE)
    variance = float((directions_SP @ slope_P).var(correction=0))
    assert variance == pytest.approx((4 - 2 / G) / P, rel=1e-5)
    assert variance > 2 * G / (P * G)  # 2 G L^2 / N, which would hold if all N rollouts were independent


def test_hacpos_baseline_is_biased_where_agents_are_good_at_different_things() -> None:
    """Equal capabilities, each able on half of the prompts: mu_k is 1/2 everywhere, k's success rate nowhere.

    Baselines are linear in the rewards, so success rates in their place give the exact expectations.
    """
    P, G = 4, 8
    rate_KP = torch.tensor([[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]], dtype=DOUBLE)
    prompt_N = torch.arange(P).repeat_interleave(G).repeat(2)
    source_N = torch.arange(2).repeat_interleave(P * G)
    rates_N = rate_KP[source_N, prompt_N]
    expected = {HACPO(): [-0.4, -0.4, 0.4, 0.4], RobustHACPO(): [0.0] * 4}
    for algorithm, error_P in expected.items():
        result = algorithm.advantages(rates_N, prompt_N, source_N, 0, algorithm.omega([0.5, 0.5]))
        error_N = result.baseline_N - rate_KP[0, prompt_N]
        torch.testing.assert_close(error_N, torch.tensor(error_P, dtype=DOUBLE)[prompt_N])


def test_a_biased_baseline_turns_the_sign_of_graded_rewards_and_not_of_binary_ones() -> None:
    """Own rewards 0.7 and 1 beside two of 0.1: HACPO rates the 0.7 above average, which for the learner it is not."""
    prompt_N, source_N = torch.zeros(4, dtype=torch.long), torch.tensor([0, 0, 1, 1])
    for rewards, published, robust in (([0.7, 1.0, 0.1, 0.1], 1, -1), ([0.0, 1.0, 0.0, 0.0], -1, -1)):
        for algorithm, sign in ((HACPO(), published), (RobustHACPO(), robust)):
            rewards_N = torch.tensor(rewards, dtype=DOUBLE)
            result = algorithm.advantages(rewards_N, prompt_N, source_N, 0, algorithm.omega([0.5, 0.5]))
            assert result.advantage_N[0].sign() == sign


@given(seeds, groups)
@law
def test_hacpo_never_turns_the_sign_of_binary_rewards(seed: int, sizes: list[int]) -> None:
    """The guard keeps mu within the range of the rewards."""
    data = batch(seed, sizes, graded=False)
    capabilities = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)) + 0.05
    advantage_N = evaluate(HACPO(), data, capabilities.tolist())["advantage_N"]
    right_N = data["rewards_N"] == 1
    assert (advantage_N[right_N] >= 0).all()
    assert (advantage_N[~right_N] <= 0).all()


def test_gspos_clip_stops_wrong_answers_below_its_band_and_right_ones_above() -> None:
    """What `naive` does to foreign rollouts, most of which have s below the band."""
    ratio_N = torch.tensor([0.3, 0.9, 1.0, 1.1, 3.0], dtype=DOUBLE)
    for sign, kept in ((1.0, [True, True, True, False, False]), (-1.0, [False, False, True, True, True])):
        _, kept_N = clipped_minimum(ratio_N, torch.full_like(ratio_N, sign), GSPO.epsilon, GSPO.epsilon_high)
        assert kept_N.tolist() == kept
