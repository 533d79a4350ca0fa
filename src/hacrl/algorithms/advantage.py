"""Group-relative advantages, plain and capability-aware.

Rollouts are flat tensors: `rewards_N` has the rewards, `prompt_N` and `source_N` the prompt and the source agent of
each. Groups may have any size, and an agent any share of them. Prompts are numbered from 0. Callers leave out
rollouts without a reward.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SIGMA_EPSILON = 1e-6
EDGE = 1e-9

ScaleRewards = Literal["group", "batch", "none"]
"""What centred rewards are divided by, as in TRL: the standard deviation within the prompt, within the batch, or 1."""


@dataclass(frozen=True)
class Advantages:
    advantage_N: Tensor
    baseline_N: Tensor
    """The value subtracted from each rollout's reward."""
    guarded_share: float = 0.0
    """Share of the prompts with unequal rewards whose baseline was outside the range of rewards and was replaced."""
    bias_P: Tensor | None = None
    """Mean own reward minus mu_k before the guard, for each prompt whose `bias_noise_P` can be estimated."""
    bias_noise_P: Tensor | None = None
    """Variance of `bias_P` that comes from sampling alone."""


def sum_by(values_N: Tensor, index_N: Tensor, size: int) -> Tensor:
    return values_N.new_zeros(size).index_add_(0, index_N, values_N)


def mean_by(values_N: Tensor, index_N: Tensor, size: int) -> Tensor:
    """Mean of the values at each index; 0 where there are no values."""
    return sum_by(values_N, index_N, size) / sum_by(torch.ones_like(values_N), index_N, size).clamp(min=1)


def _variance_by(values_N: Tensor, index_N: Tensor, size: int) -> Tensor:
    """Unbiased variance (ddof = 1) at each index; 0 where there are fewer than two values."""
    centred_N = values_N - mean_by(values_N, index_N, size)[index_N]
    count = sum_by(torch.ones_like(values_N), index_N, size)
    return sum_by(centred_N**2, index_N, size) / (count - 1).clamp(min=1)


def _range_by(values_N: Tensor, index_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    low = values_N.new_full((size,), torch.inf).scatter_reduce_(0, index_N, values_N, "amin")
    return low, values_N.new_full((size,), -torch.inf).scatter_reduce_(0, index_N, values_N, "amax")


def num_prompts(prompt_N: Tensor) -> int:
    return int(prompt_N.max()) + 1 if len(prompt_N) else 0


def divisors(rewards_N: Tensor, prompt_N: Tensor, scale_rewards: ScaleRewards, batch_N: Tensor | None = None) -> Tensor:
    """The number that each centred reward is divided by. `batch_N` numbers the batches if there are several."""
    if scale_rewards == "none":
        return torch.ones_like(rewards_N)
    index_N = prompt_N
    if scale_rewards == "batch":
        index_N = torch.zeros_like(prompt_N) if batch_N is None else batch_N
    return _variance_by(rewards_N, index_N, num_prompts(index_N)).sqrt()[index_N] + SIGMA_EPSILON


def group_advantages(
    rewards_N: Tensor, prompt_N: Tensor, scale_rewards: ScaleRewards = "group", batch_N: Tensor | None = None
) -> Advantages:
    """A = (R - mean) / (std + 1e-6) within each prompt; 0 where all rewards are equal."""
    P = num_prompts(prompt_N)
    low_P, high_P = _range_by(rewards_N, prompt_N, P)
    baseline_N = mean_by(rewards_N, prompt_N, P)[prompt_N]
    advantage_N = (rewards_N - baseline_N) / divisors(rewards_N, prompt_N, scale_rewards, batch_N)
    return Advantages(advantage_N * (high_P > low_P)[prompt_N], baseline_N)


def capability_advantages(
    rewards_N: Tensor,
    prompt_N: Tensor,
    source_N: Tensor,
    learner: int,
    omega_KK: Tensor,
    cross_baseline: Literal["learner", "source"] = "learner",
    baseline_guard: bool = True,
    scale_rewards: ScaleRewards = "group",
) -> Advantages:
    """A_k(R) = (R - mu_k) / (sigma + 1e-6), mu_k the mean of all rewards, each times omega(k, j).

    sigma is the standard deviation of the unscaled rewards of the prompt; `scale_rewards` changes the divisor. With the
    guard, a mu_k outside the range of the prompt's rewards is replaced by the mean of k's own rewards on the prompt, or
    by the plain mean if k has none. `cross_baseline="source"` gives a foreign rollout its source's mu_j instead of the
    learner's mu_k.
    """
    P, K = num_prompts(prompt_N), len(omega_KK)
    low_P, high_P = _range_by(rewards_N, prompt_N, P)
    spread_P = high_P > low_P
    mu_KP, guarded_KP = [], []
    for k in range(K):
        mu_P = mean_by(omega_KK[k, source_N] * rewards_N, prompt_N, P)
        # A mu_k on the edge counts as inside, however its sum was rounded.
        edge_P = EDGE * (high_P - low_P)
        outside_P = (mu_P < low_P - edge_P) | (mu_P > high_P + edge_P)
        guarded_KP.append(outside_P & spread_P & baseline_guard)
        if baseline_guard:
            own_N = source_N == k
            has_own_P = sum_by(own_N.to(rewards_N), prompt_N, P) > 0
            own_mean_P = mean_by(rewards_N[own_N], prompt_N[own_N], P)
            fallback_P = torch.where(has_own_P, own_mean_P, mean_by(rewards_N, prompt_N, P))
            mu_P = torch.where(outside_P, fallback_P, mu_P)
        mu_KP.append(mu_P)
    whose_N = source_N if cross_baseline == "source" else torch.full_like(source_N, learner)
    baseline_N = torch.stack(mu_KP)[whose_N, prompt_N]
    advantage_N = (rewards_N - baseline_N) / divisors(rewards_N, prompt_N, scale_rewards)
    guarded_share = float(guarded_KP[learner].sum() / spread_P.sum().clamp(min=1))
    bias = baseline_bias(rewards_N, prompt_N, source_N, learner, omega_KK[learner])
    return Advantages(advantage_N * spread_P[prompt_N], baseline_N, guarded_share, *bias)


def baseline_bias(
    rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_K: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean own reward minus mu_k for each prompt, and the variance of this difference from sampling alone.

    The difference is a sum over independent rewards, b = sum_i c_i R_i with c = [own] / G_k - omega / N. Its variance,
    the noise, is sum_i c_i^2 var_j, where var_j is the variance of agent j's rewards on that prompt. The batch mean of
    b is always close to zero, because omega is fitted to the same batch. The mean of b^2 minus the noise is the error
    that one global omega makes on each prompt. Prompts where an agent has exactly one reward, or the learner fewer than
    two, are left out: their noise cannot be estimated.
    """
    P, K = num_prompts(prompt_N), len(omega_K)
    cell_N = prompt_N * K + source_N
    count_PK = sum_by(torch.ones_like(rewards_N), cell_N, P * K).view(P, K)
    var_PK = _variance_by(rewards_N, cell_N, P * K).view(P, K)
    mean_PK = mean_by(rewards_N, cell_N, P * K).view(P, K)
    total_P1 = count_PK.sum(1, keepdim=True).clamp(min=1)
    own_PK = torch.zeros_like(count_PK)
    own_PK[:, learner] = 1 / count_PK[:, learner].clamp(min=1)
    coefficient_PK = own_PK - omega_K / total_P1
    bias_P = (coefficient_PK * count_PK * mean_PK).sum(1)
    noise_P = (coefficient_PK**2 * count_PK * var_PK).sum(1)
    usable_P = (count_PK[:, learner] >= 2) & ((count_PK >= 2) | (count_PK == 0)).all(1)
    return bias_P[usable_P], noise_P[usable_P]
