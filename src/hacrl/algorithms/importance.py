"""Sequence-level importance ratios between a learner and the source of a rollout."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 10.0


def sequence_log_ratio(logp_N: Tensor, length_N: Tensor, old_logp_N: Tensor, old_length_N: Tensor) -> Tensor:
    """log s = logp_k(y) / len_k(y) - logp_j_old(y) / len_j(y), clamped to [-10, 10].

    Each side is divided by its own length: in tokens, as published, or in bytes of the text, of which both sides have
    the same number. For own rollouts this is GSPO's ratio.
    """
    log_ratio_N = logp_N / length_N - old_logp_N / old_length_N
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def has_gradient(log_ratio_N: Tensor) -> Tensor:
    """True where the clamp of `sequence_log_ratio` lets a gradient through."""
    return log_ratio_N.abs() < LOG_RATIO_LIMIT


def exponential_ratio(ratio_N: Tensor, alpha: float) -> Tensor:
    """s * stopgrad(min(s, 1))^alpha: the less likely an answer is for the learner, the less the learner moves.

    This is HACPO's exponential importance sampling. If there is a band, s is already clipped to it.
    """
    return ratio_N * ratio_N.detach().clamp(max=1.0) ** alpha


def k3_kl(logp_NT: Tensor, reference_logp_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """KL(policy || reference) of each rollout: the k3 estimator, mean over its tokens."""
    log_ratio_NT = torch.where(mask_NT, reference_logp_NT - logp_NT, 0.0)
    k3_NT = log_ratio_NT.exp() - log_ratio_NT - 1
    return (k3_NT * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1)
