"""Functions shared by the algorithms that use foreign rollouts."""

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Sequences, Terms


def own_or_foreign(own_N: Tensor, own: Terms, foreign: Terms) -> Terms:
    """Merge two sets of terms: `own` for the learner's own rollouts, `foreign` for all others."""
    return Terms(
        torch.where(own_N, own.objective_N, foreign.objective_N),
        torch.where(own_N, own.log_ratio_N, foreign.log_ratio_N),
        torch.where(own_N, own.lower_N, foreign.lower_N),
        torch.where(own_N, own.upper_N, foreign.upper_N),
        torch.where(own_N, own.kept_N, foreign.kept_N),
        torch.where(own_N, own.weight_N, foreign.weight_N),
    )


def unbounded(weight_N: Tensor, advantage_N: Tensor, log_ratio_N: Tensor) -> Terms:
    """The terms weight x A, without a band; the log-ratio is only reported."""
    objective_N = weight_N * advantage_N
    return Terms(
        objective_N,
        log_ratio_N,
        torch.zeros_like(log_ratio_N),
        torch.full_like(log_ratio_N, torch.inf),
        objective_N.detach() != 0,
        weight_N.detach(),
    )


def mean_over_tokens(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    return torch.where(mask_NT, values_NT, 0.0).sum(1) / mask_NT.sum(1).clamp(min=1)


def as_if_on_policy(sequences: Sequences) -> Tensor:
    """Ratio of the learner to itself: its value is 1, its gradient that of logp / len. No importance correction."""
    mean_logp_N = mean_over_tokens(sequences.logp_NT, sequences.mask_NT)
    return (mean_logp_N - mean_logp_N.detach()).exp()


def mean_of_each_source(source_N: Tensor) -> Tensor:
    """1 / N_j for each rollout of source j, so that the objective is a sum of one mean per source."""
    return (1 / torch.bincount(source_N).to(torch.float64).clamp(min=1))[source_N]
