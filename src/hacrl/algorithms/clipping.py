"""The clips of GRPO and GSPO, and HACPO's stepwise clip for other agents' rollouts."""

import torch
from torch import Tensor


def clipped_minimum(ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float) -> tuple[Tensor, Tensor]:
    """min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), and a mask of the elements that have a gradient.

    An element is a sequence in GSPO and a token in GRPO.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    too_high = (advantage > 0) & (ratio > 1 + epsilon_high)
    too_low = (advantage < 0) & (ratio < 1 - epsilon)
    return objective, ~too_high & ~too_low & (advantage != 0)


def stepwise_lower_bound(update: int, delta: float, delta_step: float) -> float:
    """lo_u = min(1 - delta + u * delta_step, 1), where u counts the updates already made in this step."""
    return min(1.0 - delta + update * delta_step, 1.0)


def stepwise_clip(ratio_N: Tensor, lower: float) -> tuple[Tensor, Tensor]:
    """clip(s, lo_u, 1), and a mask of the rollouts whose s lies in the band.

    A rollout outside the band has no gradient, whatever the sign of its advantage.
    """
    return ratio_N.clamp(lower, 1.0), (ratio_N >= lower) & (ratio_N <= 1.0)
