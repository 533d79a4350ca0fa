"""Whether foreign rollouts point the learner's way, in exact expectation: docs/algorithm.md, section 18.

The policies are small enough to list every answer, so nothing is sampled: k is the learner, j the source, J the mean
reward of k, g(y) the gradient of log p_k(y). "Right" answers have a reward above J, "wrong" ones do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import RobustHACPO

law = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ALGORITHM = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
OVERLAPS = (1.0, 0.97, 0.9, 0.65, 0.47)
PAIRS = 60


class Policies:
    """All answers of T tokens from V words, each token drawn from the softmax of one row of a table of logits.

    `by_position` gives each position a row of its own: the tokens of an answer are independent. Otherwise the row is
    that of the token before: tokens depend on each other, and all positions share the parameters.
    """

    def __init__(self, T: int, V: int, by_position: bool) -> None:
        self.T, self.V = T, V
        self.answers_NT = np.array(list(itertools.product(range(V), repeat=T)))
        self.rows_NT = np.array([range(T) if by_position else (V, *y[:-1]) for y in self.answers_NT.tolist()])
        self.shape = (self.rows_NT.max() + 1, V)
        N = len(self.answers_NT)
        self.count_NCV = np.zeros((N, *self.shape))
        np.add.at(self.count_NCV, (np.arange(N)[:, None], self.rows_NT, self.answers_NT), 1)

    def logp(self, logits_CV: np.ndarray) -> np.ndarray:
        """Log-probability of every answer."""
        return self.count_NCV.reshape(len(self.answers_NT), -1) @ log_softmax(logits_CV).ravel()

    def score(self, logits_CV: np.ndarray) -> np.ndarray:
        """The gradient of each log-probability with respect to the logits."""
        expected_NCV = self.count_NCV.sum(2, keepdims=True) * np.exp(log_softmax(logits_CV))
        return (self.count_NCV - expected_NCV).reshape(len(self.answers_NT), -1)

    def gradient(self, logits_CV: np.ndarray, reward_N: np.ndarray) -> np.ndarray:
        """The gradient of the mean reward."""
        p_N = np.exp(self.logp(logits_CV))
        return (p_N * (reward_N - p_N @ reward_N)) @ self.score(logits_CV)


def log_softmax(logits_CV: np.ndarray) -> np.ndarray:
    return logits_CV - np.log(np.exp(logits_CV).sum(1, keepdims=True))


FAMILIES = {"independent tokens": Policies(6, 4, by_position=True), "bigram": Policies(6, 4, by_position=False)}


def pairs(policies: Policies, count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Logits of a learner and of a source, both drawn around one target, and how many tokens each answer has right."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        target_T = random.integers(0, policies.V, policies.T)
        matches_N = (policies.answers_NT == target_T).sum(1)
        rows_T = policies.rows_NT[matches_N.argmax()]
        both_2CV = random.normal(0, 1, (2, *policies.shape))
        for logits_CV in both_2CV:
            logits_CV[rows_T, target_T] += random.uniform(0.5, 2.5)
        yield 1.5 * both_2CV[0], 1.5 * both_2CV[1], matches_N


def rewards(matches_N: np.ndarray) -> dict[str, np.ndarray]:
    T = matches_N.max()
    return {"binary": (matches_N >= T - 1).astype(float), "graded": matches_N / T}


def ratios(policies: Policies, learner_CV: np.ndarray, source_CV: np.ndarray) -> tuple[np.ndarray, ...]:
    """Probabilities of every answer under learner and source, and s."""
    k_N, j_N = policies.logp(learner_CV), policies.logp(source_CV)
    return np.exp(k_N), np.exp(j_N), np.exp((k_N - j_N) / policies.T)


@cache
def at_overlap(policies: Policies, overlap: float) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs with all sources moved towards their learners, by one share, until the mean of s is `overlap`."""
    drawn = list(pairs(policies, PAIRS))

    def mean_s(share: float) -> float:
        mixed = (ratios(policies, k_CV, k_CV + share * (j_CV - k_CV)) for k_CV, j_CV, _ in drawn)
        return float(np.mean([j_N @ s_N for _, j_N, s_N in mixed]))

    near, far = 0.0, 1.5
    for _ in range(16):
        middle = (near + far) / 2
        near, far = (middle, far) if mean_s(middle) > overlap else (near, middle)
    assert mean_s(near) == pytest.approx(overlap, abs=1e-3)
    return [(k_CV, k_CV + near * (j_CV - k_CV), matches_N) for k_CV, j_CV, matches_N in drawn]


def foreign_gradients(
    policies: Policies, learner_CV: np.ndarray, source_CV: np.ndarray, reward_N: np.ndarray
) -> dict[str, np.ndarray]:
    """E_j[w (R - J) g] for four choices of the weight w."""
    k_N, j_N, s_N = ratios(policies, learner_CV, source_CV)
    advantage_N = reward_N - k_N @ reward_N
    weights = {
        "right": np.minimum(s_N, 1) * (advantage_N > 0),
        "both": np.minimum(s_N, 1),
        "wrong": np.minimum(s_N, 1) * (advantage_N <= 0),
        "both, exact ratio": k_N / j_N,
    }
    score_ND = policies.score(learner_CV)
    return {name: (j_N * weight_N * advantage_N) @ score_ND for name, weight_N in weights.items()}


def cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    return float(a_D @ b_D / max(np.linalg.norm(a_D) * np.linalg.norm(b_D), 1e-300))


@pytest.mark.parametrize("family", FAMILIES)
def test_alignment_at_five_overlaps(family: str) -> None:
    """The table of the docs, row by row; and what the text says about it."""
    policies = FAMILIES[family]
    found: dict[tuple[str, str], list[list[float]]] = {}
    for overlap in OVERLAPS:
        cosines: dict[tuple[str, str], list[float]] = {}
        for learner_CV, source_CV, matches_N in at_overlap(policies, overlap):
            for kind, reward_N in rewards(matches_N).items():
                truth_D = policies.gradient(learner_CV, reward_N)
                for part, foreign_D in foreign_gradients(policies, learner_CV, source_CV, reward_N).items():
                    cosines.setdefault((kind, part), []).append(cosine(foreign_D, truth_D))
        for key, values in cosines.items():
            found.setdefault(key, []).append(values)
    for (kind, part), values in found.items():
        if part == "both, exact ratio":
            assert np.min(values) > 1 - 1e-9
            continue
        line = f"| {family}, {kind} | {part} | {' | '.join(f'{np.mean(column):.2f}' for column in values)} |"
        assert f"{line}\n" in ALGORITHM, line
    opposed = {key: [np.mean(np.array(column) < 0) for column in values] for key, values in found.items()}
    assert max(opposed["binary", "right"]) <= 0.05
    assert max(opposed["graded", "right"]) <= 0.2
    assert max(opposed["binary", "both"] + opposed["graded", "both"]) <= 0.2
    assert min(opposed["binary", "wrong"][2:]) > 0.5


def right_and_all(policy_TV: np.ndarray, learner_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """E[right g], E[g] and the chance of a right answer under `policy_TV`, for independent tokens of any number.

    An answer is right if at most one token is not word 0; g belongs to `learner_TV`.
    """
    hit_T = policy_TV[:, 0]
    others_hit_T = np.exp(np.log(hit_T).sum() - np.log(hit_T))
    odds_T = (1 - hit_T) / hit_T
    joint_TV = policy_TV * others_hit_T[:, None]
    joint_TV[:, 0] *= 1 + odds_T.sum() - odds_T
    right = float(hit_T.prod() * (1 + odds_T.sum()))
    return (joint_TV - right * learner_TV).ravel(), (policy_TV - learner_TV).ravel(), right


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def long_pairs(T: int, lead: float, overlap: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token probabilities of learners and sources that prefer word 0, moved together as in `at_overlap`.

    Only learners with a success rate of 0.2 to 0.5 are taken.
    """
    random = np.random.default_rng(0)
    logits_N2TV = random.normal(0, 1, (300, 2, T, 4))
    logits_N2TV[..., 0] += lead + random.uniform(-1, 1, (300, 2, 1))
    drawn = [(k_TV, j_TV) for k_TV, j_TV in 1.5 * logits_N2TV if 0.2 < right_and_all(*2 * [softmax(k_TV)])[2] < 0.5]
    assert len(drawn) > 30
    k_NTV, j_NTV = (np.array(side) for side in zip(*drawn, strict=True))

    def mean_s(share: float) -> float:
        return float(tilted(softmax(k_NTV), softmax(k_NTV + share * (j_NTV - k_NTV))).sum(2).prod(1).mean())

    near, far = 0.0, 2.0
    for _ in range(16):
        middle = (near + far) / 2
        near, far = (middle, far) if mean_s(middle) > overlap else (near, middle)
    assert mean_s(near) == pytest.approx(overlap, abs=1e-3)
    return list(zip(softmax(k_NTV), softmax(k_NTV + near * (j_NTV - k_NTV)), strict=True))


def tilted(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """s p_j of independent tokens, a product over the T tokens of the last but one dimension as p_j is."""
    T = p.shape[-2]
    return q ** (1 - 1 / T) * p ** (1 / T)


def long_cosines(p_TV: np.ndarray, q_TV: np.ndarray) -> tuple[float, float]:
    """Cosines of E_j[s (R - J) g] with the gradient of J, over right answers and over both."""
    tilted_TV = tilted(p_TV, q_TV)
    right_D, all_D, _ = right_and_all(tilted_TV / tilted_TV.sum(1, keepdims=True), p_TV)
    truth_D, _, success = right_and_all(p_TV, p_TV)
    return cosine(right_D, truth_D), cosine(right_D - success * all_D, truth_D)


def test_alignment_of_longer_answers_at_one_overlap() -> None:
    """The second table of the docs: a mean s of 0.9, from 6 to 96 tokens."""
    columns = []
    for T, lead in ((6, 1.5), (12, 2.2), (24, 2.8), (48, 3.4), (96, 4.0)):
        drawn = long_pairs(T, lead, 0.9)
        divergence = np.mean([(q_TV * np.log(q_TV / p_TV)).sum() for p_TV, q_TV in drawn])
        columns.append((divergence, *np.mean([long_cosines(p_TV, q_TV) for p_TV, q_TV in drawn], axis=0)))
    for name, digits, values in zip(("KL divergence", "right", "both"), (1, 2, 2), np.transpose(columns), strict=True):
        line = f"| {name} | {' | '.join(f'{value:.{digits}f}' for value in values)} |"
        assert f"{line}\n" in ALGORITHM, line


def test_the_closed_form_for_long_answers_is_the_sum_over_all_answers() -> None:
    policies = FAMILIES["independent tokens"]
    reward_N = ((policies.answers_NT == 0).sum(1) >= 5).astype(float)
    for p_TV, q_TV in long_pairs(6, 1.5, 0.9)[:5]:
        k_N, j_N, s_N = ratios(policies, np.log(p_TV), np.log(q_TV))
        truth_D, score_ND = policies.gradient(np.log(p_TV), reward_N), policies.score(np.log(p_TV))
        advantage_N = reward_N - k_N @ reward_N
        expected = [cosine((j_N * s_N * part_N * advantage_N) @ score_ND, truth_D) for part_N in (reward_N, 1)]
        assert list(long_cosines(p_TV, q_TV)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_exact_ratio_foreign_rollouts_give_the_true_gradient(family: str) -> None:
    """E_j[p_k / p_j (R - b) g] = E_k[(R - b) g] for every b; for binary rewards each sign alone is a multiple of it."""
    policies = FAMILIES[family]
    for learner_CV, source_CV, matches_N in pairs(policies, 10):
        k_N, j_N, _ = ratios(policies, learner_CV, source_CV)
        score_ND = policies.score(learner_CV)
        for kind, reward_N in rewards(matches_N).items():
            truth_D = policies.gradient(learner_CV, reward_N)
            success = k_N @ reward_N
            for baseline in (0.0, success, 1.0):
                foreign_D = (j_N * (k_N / j_N) * (reward_N - baseline)) @ score_ND
                np.testing.assert_allclose(foreign_D, truth_D, atol=1e-12)
            if kind == "binary":
                for sign_N, share in ((reward_N == 1, 1 - success), (reward_N == 0, success)):
                    foreign_D = (j_N * (k_N / j_N) * sign_N * (reward_N - success)) @ score_ND
                    np.testing.assert_allclose(foreign_D, share * truth_D, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_baseline_error_moves_foreign_gradients_and_not_own_ones(family: str) -> None:
    """E_j[(R - b) g] = Cov_j(R, g) + (E_j[R] - b) E_j[g], and E_k[g] = 0."""
    policies = FAMILIES[family]
    for learner_CV, source_CV, matches_N in pairs(policies, 10):
        k_N, j_N, _ = ratios(policies, learner_CV, source_CV)
        score_ND = policies.score(learner_CV)
        for reward_N in rewards(matches_N).values():
            own_D = (k_N * (reward_N - 0.4)) @ score_ND
            np.testing.assert_allclose(own_D, policies.gradient(learner_CV, reward_N), atol=1e-12)
            foreign_D = (j_N * (reward_N - 0.4)) @ score_ND
            mean_D = j_N @ score_ND
            covariance_D = (j_N * (reward_N - j_N @ reward_N)) @ (score_ND - mean_D)
            np.testing.assert_allclose(foreign_D, covariance_D + (j_N @ reward_N - 0.4) * mean_D, atol=1e-12)
            assert np.linalg.norm(mean_D) > 0.1


@given(st.integers(1, 4), st.integers(1, 4), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
@law
def test_groups_and_their_deviation_leave_the_direction_alone(n: int, m: int, own: float, foreign: float) -> None:
    """Binary rewards: E[A | R] = c (R - J_k) with one c > 0 for both rewards, over all outcomes of n + m rollouts."""
    outcomes_PN = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n + m)), dtype=torch.float64)
    P = len(outcomes_PN)
    source_N = torch.tensor([0] * n + [1] * m).repeat(P)
    prompt_N = torch.arange(P).repeat_interleave(n + m)
    result = RobustHACPO(foreign="all").advantages(outcomes_PN.ravel(), prompt_N, source_N, 0, torch.ones(2, 2))
    advantage_P, reward_P = result.advantage_N.view(P, -1)[:, n], outcomes_PN[:, n]
    rate_N = torch.tensor([own] * n + [foreign] * m, dtype=torch.float64)
    chance_P = torch.where(outcomes_PN > 0, rate_N, 1 - rate_N).prod(1)
    right, wrong = ((chance_P * advantage_P)[reward_P == r].sum() / chance_P[reward_P == r].sum() for r in (1, 0))
    assert float(right / (1 - own)) == pytest.approx(float(wrong / -own), rel=1e-9)
    assert right > 0


def natural_derivative(policies: Policies, logits_CV: np.ndarray, reward_N: np.ndarray, u_N: np.ndarray) -> float:
    """The derivative of the mean reward along F^-1 (sum of u(y) g(y)), F the Fisher matrix."""
    p_N, score_ND = np.exp(policies.logp(logits_CV)), policies.score(logits_CV)
    fisher_DD = (p_N[:, None] * score_ND).T @ score_ND
    return float(policies.gradient(logits_CV, reward_N) @ np.linalg.pinv(fisher_DD) @ (u_N @ score_ND))


@given(st.integers(0, 2**32 - 1), st.booleans())
@law
def test_in_the_natural_gradient_right_answers_never_harm_a_table(seed: int, graded: bool) -> None:
    """One softmax over whole answers: the derivative is the sum of u (R - J), so (1 - J) sum u for binary rewards."""
    random = np.random.default_rng(seed)
    table = Policies(1, 12, by_position=True)
    logits_CV = random.normal(0, 1, table.shape)
    reward_N = random.random(12) if graded else (random.random(12) < 0.5).astype(float)
    advantage_N = reward_N - np.exp(table.logp(logits_CV)) @ reward_N
    u_N = random.random(12) * (advantage_N > 0)
    derivative = natural_derivative(table, logits_CV, reward_N, u_N)
    assert derivative == pytest.approx(u_N @ advantage_N, abs=1e-8)
    assert derivative >= 0


def test_in_the_natural_gradient_a_right_answer_harms_two_bits() -> None:
    """Two independent bits, each 1 with probability 0.9, right if equal: the right answer (0, 0) is a step back."""
    bits = Policies(2, 2, by_position=True)
    logits_CV = np.log([[0.1, 0.9], [0.1, 0.9]])
    reward_N = (bits.answers_NT[:, 0] == bits.answers_NT[:, 1]).astype(float)
    only_zeros_N = (bits.answers_NT.sum(1) == 0).astype(float)
    assert natural_derivative(bits, logits_CV, reward_N, only_zeros_N) == pytest.approx(-1.44)
    success = np.exp(bits.logp(logits_CV)) @ reward_N
    assert 1 - success == pytest.approx(0.18)  # what a table would give
    assert bits.gradient(logits_CV, reward_N) @ (only_zeros_N @ bits.score(logits_CV)) < 0  # the plain gradient too


@pytest.mark.parametrize(
    ("family", "start", "right", "both"), [("independent tokens", 0.13, 0.61, 0.65), ("bigram", 0.08, 0.16, 0.16)]
)
def test_repeated_exact_updates_lose_nothing_with_wrong_answers(
    family: str, start: float, right: float, both: float
) -> None:
    """Own and foreign gradient added up, both agents learning from each other, from a mean s of 0.9, binary rewards."""
    policies = FAMILIES[family]
    success: dict[str, list[float]] = {"start": [], "right": [], "both": []}
    for learner_CV, source_CV, matches_N in at_overlap(policies, 0.9)[:6]:
        reward_N = rewards(matches_N)["binary"]
        for part, updates in (("start", 0), ("right", 40), ("both", 40)):
            agents = [learner_CV, source_CV]
            for _ in range(updates):
                steps = [
                    policies.gradient(own_CV, reward_N) + foreign_gradients(policies, own_CV, other_CV, reward_N)[part]
                    for own_CV, other_CV in (agents, agents[::-1])
                ]
                agents = [
                    agent_CV + 0.5 * step.reshape(policies.shape) for agent_CV, step in zip(agents, steps, strict=True)
                ]
            success[part] += [float(np.exp(policies.logp(agent_CV)) @ reward_N) for agent_CV in agents]
    means = {part: np.mean(values) for part, values in success.items()}
    assert means == pytest.approx({"start": start, "right": right, "both": both}, abs=0.006)
