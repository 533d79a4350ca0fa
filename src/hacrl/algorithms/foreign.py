"""What the methods that share rollouts in other ways than HACPO have in common."""

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Sequences, Terms


def own_or_foreign(own_N: Tensor, own: Terms, foreign: Terms) -> Terms:
    """The first where the learner is the source, else the second."""
    return Terms(
        torch.where(own_N, own.objective_N, foreign.objective_N),
        torch.where(own_N, own.log_ratio_N, foreign.log_ratio_N),
        torch.where(own_N, own.lower_N, foreign.lower_N),
        torch.where(own_N, own.upper_N, foreign.upper_N),
        torch.where(own_N, own.kept_N, foreign.kept_N),
        torch.where(own_N, own.weight_N, foreign.weight_N),
    )


def unbounded(weight_N: Tensor, advantage_N: Tensor, log_ratio_N: Tensor) -> Terms:
    """weight x A without a band; the log-ratio is reported only."""
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
    """1, with the gradient of logp / len: the ratio to the learner itself, with no importance correction."""
    mean_logp_N = mean_over_tokens(sequences.logp_NT, sequences.mask_NT)
    return (mean_logp_N - mean_logp_N.detach()).exp()


def mean_of_each_source(source_N: Tensor) -> Tensor:
    """1 / N_j for a rollout of source j: the own mean plus one mean for each other source."""
    return (1 / torch.bincount(source_N).to(torch.float64).clamp(min=1))[source_N]
