"""The unbiasedness theorem (4.1 of arXiv 2603.02604) by simulation, and where it stops to hold.

Agent j solves prompt q with probability p_j(q). If the ratio p_k(q) / p_j(q) is the same for all prompts and
omega is that ratio, then E[mu_k(q)] = p_k(q) on every prompt, and the numerator R - mu_k of an own advantage
has mean zero. One global omega does not have that property when the ratio differs from prompt to prompt: the
mean over the batch hides it, the root mean square over prompts less the sampling noise shows it.

All batches are seeded; the bounds are four to five standard errors of what is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hacrl.algorithms import Advantages, baseline_bias, capability_advantages, capability_ratios

PROMPTS = 12_000


def simulate(solve_PK: np.ndarray, groups: Sequence[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bernoulli rewards of `groups[j]` rollouts of each agent j on each prompt."""
    rng = np.random.default_rng(seed)
    rewards, prompts, sources = [], [], []
    for j, group in enumerate(groups):
        draws_PG = rng.random((len(solve_PK), group)) < solve_PK[:, j, None]
        rewards.append(draws_PG.astype(float).ravel())
        prompts.append(np.repeat(np.arange(len(solve_PK)), group))
        sources.append(np.full(len(solve_PK) * group, j))
    return (
        torch.from_numpy(np.concatenate(rewards)),
        torch.from_numpy(np.concatenate(prompts)),
        torch.from_numpy(np.concatenate(sources)),
    )


def unguarded(batch: tuple[Tensor, Tensor, Tensor], learner: int, omega_KK: Tensor) -> Advantages:
    # The theorem is about mu_k itself; the guard replaces it on some prompts.
    return capability_advantages(*batch, learner, omega_KK, baseline_guard=False)


def own_numerator_P(batch: tuple[Tensor, Tensor, Tensor], learner: int, got: Advantages) -> np.ndarray:
    """The mean of R - mu_k over the learner's rollouts of each prompt."""
    reward_N, prompt_N, source_N = batch
    own_N = source_N == learner
    numerator_N = (reward_N - got.baseline_N)[own_N].numpy()
    prompt_N = prompt_N[own_N].numpy()
    return np.bincount(prompt_N, numerator_N) / np.bincount(prompt_N)


def mean_and_error(values: np.ndarray | Tensor) -> tuple[float, float]:
    values = np.asarray(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def excess_and_error(bias_P: Tensor, noise_P: Tensor) -> tuple[float, float]:
    """Mean of bias^2 less the noise: what is estimated is the square of the bias on a prompt."""
    return mean_and_error(bias_P**2 - noise_P)


def batch_omega(batch: tuple[Tensor, Tensor, Tensor], n: int) -> Tensor:
    reward_N, _, source_N = batch
    return capability_ratios([float(reward_N[source_N == j].mean()) for j in range(n)])


def calibrated(seed: int, factors: Sequence[float]) -> np.ndarray:
    """p_j(q) = factor_j * (difficulty of q): hard and easy prompts, one ratio for all."""
    difficulty_P1 = np.random.default_rng(seed).uniform(0.1, 1.0, (PROMPTS, 1))
    return difficulty_P1 * np.asarray(factors)


def mismatched() -> tuple[np.ndarray, np.ndarray]:
    """Equal on average, each better than the other on half of the prompts; and the bias on each prompt."""
    solve_PK = np.tile([[0.8, 0.4], [0.2, 0.6]], (PROMPTS // 2, 1))
    # omega = 1 and equal groups: p_0 - (p_0 + p_1) / 2.
    return solve_PK, (solve_PK[:, 0] - solve_PK[:, 1]) / 2


@pytest.mark.parametrize(
    ("factors", "groups"),
    [((0.4, 0.8), (4, 4)), ((0.8, 0.4), (2, 6)), ((0.9, 0.3, 0.6), (3, 5, 2)), ((0.2, 0.8, 0.5, 0.7), (2, 2, 3, 4))],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_ratio_gives_an_unbiased_own_advantage(
    factors: tuple[float, ...], groups: tuple[int, ...], seed: int
) -> None:
    batch = simulate(calibrated(seed, factors), groups, seed + 100)
    # The true ratios: independent of the batch, as the theorem asks.
    omega_KK = capability_ratios(factors)
    for learner in range(len(factors)):
        numerator_P = own_numerator_P(batch, learner, unguarded(batch, learner, omega_KK))
        value, error = mean_and_error(numerator_P)
        assert abs(value) < 4 * error
        assert error < 0.01


def test_calibrated_ratio_is_unbiased_on_hard_and_on_easy_prompts() -> None:
    # The theorem holds for each prompt: no subset chosen by difficulty may show a bias.
    solve_PK = calibrated(3, (0.4, 0.8))
    batch = simulate(solve_PK, (4, 4), 7)
    numerator_P = own_numerator_P(batch, 0, unguarded(batch, 0, capability_ratios([0.4, 0.8])))
    for part in np.array_split(np.argsort(solve_PK[:, 0]), 5):
        value, error = mean_and_error(numerator_P[part])
        assert abs(value) < 4 * error


def test_a_wrong_ratio_is_biased() -> None:
    """The simulation can tell: without mechanism 1 the weaker agent's own advantages are negative on average."""
    batch = simulate(calibrated(0, (0.4, 0.8)), (4, 4), 5)
    numerator_P = own_numerator_P(batch, 0, unguarded(batch, 0, torch.ones(2, 2, dtype=torch.float64)))
    value, error = mean_and_error(numerator_P)
    # E = p_0 - (p_0 + p_1) / 2 = -p_0 / 2, and p_0 = 0.4 * 0.55 on average.
    assert value == pytest.approx(-0.11, abs=4 * error)
    assert value < -20 * error


@pytest.mark.parametrize(("factors", "groups"), [((0.4, 0.8), (4, 4)), ((0.9, 0.3, 0.6), (3, 5, 2))])
def test_calibrated_ratio_leaves_no_bias_beyond_the_noise(factors: tuple[float, ...], groups: tuple[int, ...]) -> None:
    batch = simulate(calibrated(2, factors), groups, 11)
    for learner in range(len(factors)):
        got = unguarded(batch, learner, capability_ratios(factors))
        assert got.bias_P is not None
        assert got.bias_noise_P is not None
        # A root mean square that is all noise: large by itself, nothing once the noise is taken off.
        assert float((got.bias_P**2).mean().sqrt()) > 0.05
        excess, error = excess_and_error(got.bias_P, got.bias_noise_P)
        assert abs(excess) < 4 * error
        assert error < 1e-2


@pytest.mark.parametrize("fitted", [True, False])
def test_mismatch_hides_in_the_batch_mean_and_shows_in_the_excess(fitted: bool) -> None:
    solve_PK, bias_P = mismatched()
    batch = simulate(solve_PK, (8, 8), 13)
    omega_KK = batch_omega(batch, 2) if fitted else torch.ones(2, 2, dtype=torch.float64)
    got = unguarded(batch, 0, omega_KK)
    assert got.bias_P is not None
    assert got.bias_noise_P is not None
    value, error = mean_and_error(got.bias_P)
    assert abs(value) < 4 * error
    excess, error = excess_and_error(got.bias_P, got.bias_noise_P)
    assert float((bias_P**2).mean()) == pytest.approx(0.04)
    assert excess == pytest.approx(0.04, abs=4 * error)
    assert excess > 20 * error


def test_fitting_omega_to_the_batch_makes_the_batch_mean_vanish_by_construction() -> None:
    # Whatever the agents are: sum of omega_kj R_j over j's rollouts is then G times k's mean, for each j.
    rng = np.random.default_rng(0)
    batch = simulate(rng.uniform(0.2, 1, (50, 3)), (4, 4, 4), 1)
    for learner in range(3):
        got = unguarded(batch, learner, batch_omega(batch, 3))
        assert got.bias_P is not None
        assert float(got.bias_P.mean()) == pytest.approx(0, abs=1e-14)


def test_noise_is_the_variance_of_the_bias_on_one_prompt() -> None:
    """The estimate of the noise against the spread over many repetitions of the same prompt."""
    for p, groups in (((0.3, 0.7), (4, 4)), ((0.6, 0.5, 0.2), (2, 3, 6))):
        batch = simulate(np.tile(p, (PROMPTS, 1)), groups, 17)
        omega_K = torch.tensor([1.0, 0.5, 2.0][: len(p)], dtype=torch.float64)
        bias_P, noise_P = baseline_bias(*batch, 0, omega_K)
        # By hand: sum over the rewards of c^2 p (1 - p), with c = [own] / G_k - omega / N.
        total = sum(groups)
        exact = sum(
            group * ((1 / groups[0] if j == 0 else 0) - float(omega_K[j]) / total) ** 2 * p[j] * (1 - p[j])
            for j, group in enumerate(groups)
        )
        value, error = mean_and_error(noise_P)
        assert value == pytest.approx(exact, abs=5 * error)
        assert float(bias_P.var()) == pytest.approx(exact, rel=0.05)


def test_bias_by_hand_on_one_prompt() -> None:
    # Own 1, 0, 1; the other 1, 0: with omega = 1/2, mu = (2 + 1/2) / 5 = 1/2 and the bias is 2/3 - 1/2 = 1/6.
    # c is 1/3 - 1/5 = 2/15 for own and -1/10 for foreign rewards; variances 1/3 and 1/2:
    # 3 * (2/15)^2 / 3 + 2 * (1/10)^2 / 2 = 4/225 + 1/100 = 1/36.
    bias_P, noise_P = baseline_bias(
        torch.tensor([1, 0, 1, 1, 0], dtype=torch.float64),
        torch.zeros(5, dtype=torch.long),
        torch.tensor([0, 0, 0, 1, 1]),
        0,
        torch.tensor([1.0, 0.5], dtype=torch.float64),
    )
    assert bias_P.tolist() == pytest.approx([1 / 6], abs=1e-15)
    assert noise_P.tolist() == pytest.approx([1 / 36], abs=1e-15)


def test_bias_leaves_out_prompts_whose_noise_is_unknown() -> None:
    # Prompt 0: one own reward. 1: one foreign reward. 2: own rewards only. 3: none of its own. 4: two of each.
    rows = [(0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (2, 0), (2, 0), (3, 1), (3, 1)]
    rows += [(4, 0), (4, 0), (4, 1), (4, 1)]
    prompt_N = torch.tensor([q for q, _ in rows])
    source_N = torch.tensor([j for _, j in rows])
    reward_N = torch.arange(len(rows), dtype=torch.float64) % 3
    bias_P, noise_P = baseline_bias(reward_N, prompt_N, source_N, 0, torch.ones(2, dtype=torch.float64))
    assert len(bias_P) == len(noise_P) == 2
    # Alone, and with omega = 1, the baseline is the own mean: prompt 2 has neither bias nor noise.
    assert (float(bias_P[0]), float(noise_P[0])) == (0, 0)


def test_one_agent_has_no_bias() -> None:
    batch = simulate(calibrated(0, (0.5,))[:100], (4,), 0)
    got = unguarded(batch, 0, torch.ones(1, 1, dtype=torch.float64))
    assert got.bias_P is not None
    assert got.bias_noise_P is not None
    assert len(got.bias_P) == 100
    assert float(got.bias_P.abs().max()) < 1e-15
    assert float(got.bias_noise_P.abs().max()) < 1e-15
