"""What docs/algorithm.md, section 18, says of robust HACPO, and why wrong foreign answers are left out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import GSPO, HACPO, RobustHACPO, Sequences

law = settings(max_examples=40, deadline=None, derandomize=True, database=None)
DOUBLE = torch.float64


def batch(seed: int, agents: int, prompts: int = 4, size: int = 3, tokens: int = 5) -> dict[str, torch.Tensor]:
    """Rewards and log-probabilities of every agent's rollouts, as learner 0 sees them."""
    random = torch.Generator().manual_seed(seed)
    N = agents * prompts * size
    return {
        "rewards_N": (torch.rand(N, generator=random) < 0.5).to(DOUBLE),
        "prompt_N": torch.arange(prompts).repeat_interleave(size).repeat(agents),
        "source_N": torch.arange(agents).repeat_interleave(prompts * size),
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


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@law
def test_the_own_part_is_gspo_to_the_bit(seed: int, agents: int) -> None:
    data = batch(seed, agents)
    alone, robust = (evaluate(algorithm, data, [0.5] * agents) for algorithm in (GSPO(), RobustHACPO()))
    own_N = robust["source_N"] == 0
    assert torch.equal(robust["advantage_N"][own_N], alone["advantage_N"])
    assert torch.equal(robust["gradient_NT"][own_N], alone["gradient_NT"])


@given(st.integers(0, 2**32 - 1))
@law
def test_an_agent_without_right_answers_changes_nothing(seed: int) -> None:
    data = batch(seed, agents=3)
    data["rewards_N"][data["source_N"] == 2] = 0.0
    pair = {name: column[data["source_N"] < 2] for name, column in data.items()}
    three, two = evaluate(RobustHACPO(), data, [0.5, 0.4, 0.01]), evaluate(RobustHACPO(), pair, [0.5, 0.4])
    others_N = three["source_N"] < 2
    assert torch.equal(three["gradient_NT"][others_N], two["gradient_NT"])
    assert not three["gradient_NT"][~others_N].any()
    # Under HACPO the learner's own advantages change.
    published = [
        evaluate(HACPO(), rows, c)["advantage_N"] for rows, c in ((data, [0.5, 0.4, 0.01]), (pair, [0.5, 0.4]))
    ]
    if data["rewards_N"][data["source_N"] == 0].any():
        assert not torch.allclose(published[0][others_N], published[1])


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
@law
def test_weights_and_advantages_are_bounded(seed: int, size: int) -> None:
    data = batch(seed, agents=2, size=size)
    result = evaluate(RobustHACPO(), data, [0.2, 0.8])
    foreign_N = result["source_N"] == 1
    advantage_N, weight_N = result["advantage_N"][foreign_N], result["terms"].weight_N[foreign_N]
    assert (weight_N <= 1).all()
    assert (weight_N > 0).all()
    assert (advantage_N >= 0).all()
    assert (advantage_N <= math.sqrt(2 * size)).all()
    # d term / d logp_t = w A / len, so the norm by the mean log-probability is w A.
    slope_N = result["gradient_NT"][foreign_N].sum(1) * int(foreign_N.sum())
    torch.testing.assert_close(slope_N, weight_N * advantage_N)


def test_the_bound_on_advantages_is_reached() -> None:
    """One right answer of the source among 2 G."""
    rewards_N = torch.tensor([0.0] * 4 + [1.0, 0.0, 0.0, 0.0], dtype=DOUBLE)
    source_N = torch.tensor([0] * 4 + [1] * 4)
    result = RobustHACPO().advantages(rewards_N, torch.zeros(8, dtype=torch.long), source_N, 0, torch.ones(2, 2))
    assert result.advantage_N.max() == pytest.approx(math.sqrt(8), rel=1e-5)


def test_hacpos_baseline_is_biased_where_agents_are_good_at_different_things() -> None:
    """Equal capabilities, each able on half of the prompts: mu_k is 1/2 everywhere, k's success rate nowhere."""
    random = torch.Generator().manual_seed(0)
    P, G = 400, 8
    rate_KP = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=DOUBLE).repeat_interleave(P // 2, 1)
    prompt_N = torch.arange(P).repeat_interleave(G).repeat(2)
    source_N = torch.arange(2).repeat_interleave(P * G)
    rewards_N = (torch.rand(2 * P * G, generator=random, dtype=DOUBLE) < rate_KP[source_N, prompt_N]).to(DOUBLE)
    true_N = rate_KP[0, prompt_N]
    easy_N = prompt_N < P // 2
    errors = {}
    for algorithm in (HACPO(), RobustHACPO()):
        result = algorithm.advantages(rewards_N, prompt_N, source_N, 0, algorithm.omega([0.5, 0.5]))
        errors[algorithm.name] = float((result.baseline_N - true_N)[easy_N].mean())
    assert errors["hacpo"] == pytest.approx(-0.4, abs=0.02)
    assert errors["hacpo_robust"] == pytest.approx(0.0, abs=0.02)


# ------------------------------------------------------------------------------------------------------------
# Alignment: exact expectations for policies over sequences of T tokens, each position with its own softmax
# ------------------------------------------------------------------------------------------------------------

T, V = 6, 4
ANSWERS = np.array(list(itertools.product(range(V), repeat=T)))


def log_probabilities(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every answer, and its gradient by the logits, flat."""
    table = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    gradient = np.tile(-np.exp(table), (len(ANSWERS), 1, 1))
    gradient[np.arange(len(ANSWERS))[:, None], np.arange(T), ANSWERS] += 1
    return table[np.arange(T), ANSWERS].sum(1), gradient.reshape(len(ANSWERS), -1)


def alignments(pairs: int) -> dict[str, np.ndarray]:
    """Cosine of each foreign part with the true gradient of the learner's success rate, for random pairs."""
    random = np.random.default_rng(0)
    cosines: dict[str, list[float]] = {}
    for _ in range(pairs):
        target = random.integers(0, V, T)
        right = (target == ANSWERS).sum(1) >= T - 1
        logps, gradients = [], []
        for logits in random.normal(0, 1, (2, T, V)):
            logits[np.arange(T), target] += random.uniform(0.5, 2.5)
            logp, gradient = log_probabilities(1.5 * logits)
            logps.append(logp)
            gradients.append(gradient)
        learner, source = np.exp(logps[0]), np.exp(logps[1])
        success = learner[right].sum()
        truth = (learner * (right - success)) @ gradients[0]
        s, exact = np.exp((logps[0] - logps[1]) / T), learner / source
        band = (s >= 0.8) & (s <= 1)
        parts = {
            "right": np.minimum(s, 1) * right,
            "wrong": np.minimum(s, 1) * ~right,
            "wrong, band": s * band * ~right,
            "wrong, exact ratio": np.minimum(exact, 1) * ~right,
        }
        for name, weight in parts.items():
            foreign = (source * weight * (right - success)) @ gradients[0]
            cosine = foreign @ truth / max(np.linalg.norm(foreign) * np.linalg.norm(truth), 1e-300)
            cosines.setdefault(name, []).append(cosine)
    return {name: np.array(values) for name, values in cosines.items()}


def test_right_foreign_answers_point_the_learners_way_and_wrong_ones_do_not() -> None:
    found = alignments(300)
    assert found["right"].mean() == pytest.approx(0.75, abs=0.05)
    assert (found["right"] < 0).mean() < 0.05
    for name in ("wrong", "wrong, band", "wrong, exact ratio"):
        assert found[name].mean() < 0
        assert (found[name] < 0).mean() > 0.6


def test_own_answers_need_no_such_care() -> None:
    """On-policy both parts point the learner's way: the score has mean 0, so each is the other's complement."""
    random = np.random.default_rng(1)
    for _ in range(20):
        target = random.integers(0, V, T)
        right = (target == ANSWERS).sum(1) >= T - 1
        logits = random.normal(0, 1, (T, V))
        logits[np.arange(T), target] += 1
        logp, gradient = log_probabilities(logits)
        learner = np.exp(logp)
        success = learner[right].sum()
        truth = (learner * (right - success)) @ gradient
        for part in (right, ~right):
            own = (learner * part * (right - success)) @ gradient
            assert own @ truth > 0.99 * np.linalg.norm(own) * np.linalg.norm(truth)


@given(st.integers(0, 2**32 - 1))
@law
def test_in_the_natural_gradient_right_answers_never_harm(seed: int) -> None:
    """A softmax over answers: dJ along F^-1 (sum of u(y) grad log p(y)) is (1 - J) sum u for u on right answers."""
    random = np.random.default_rng(seed)
    n = 12
    p = random.dirichlet(np.ones(n))
    right = random.random(n) < 0.5
    u = random.random(n) * right
    score = np.eye(n) - p  # row y: gradient of log p(y) by the logits
    fisher = (p[:, None] * score).T @ score
    success = p[right].sum()
    truth = (p * (right - success)) @ score
    derivative = truth @ np.linalg.pinv(fisher) @ (u @ score)
    assert derivative == pytest.approx((1 - success) * u.sum(), abs=1e-8)
