"""What an objective is made of: rollouts as a learner sees them, their importance ratios, clips and terms."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 10.0


@dataclass
class Sequences:
    """N rollouts as one learner sees them at one update."""

    logp_NT: Tensor
    """The learner's log-probability of each completion token, at its temperature."""
    mask_NT: Tensor
    """True at the positions that are tokens of the completion."""
    old_logp_N: Tensor
    """Log-probability of the completion that its source recorded when it sampled, summed over the source's tokens. With
    `Algorithm.rescores_foreign`: the learner's own sum before its first update of the step."""
    old_length_N: Tensor
    """The number of tokens in the sum `old_logp_N`."""
    bytes_N: Tensor
    """Length of the completion's text in UTF-8 bytes."""
    own_N: Tensor
    """True for rollouts that the learner itself sampled."""
    advantage_N: Tensor
    omega_N: Tensor
    """The coefficient omega(j, k) = C_j / C_k of `Algorithm.coefficients`; 1 for own rollouts."""
    old_logp_NT: Tensor
    """Token log-probabilities at sampling; with another tokenizer, the source's sum spread evenly over tokens."""
    token_advantage_NT: Tensor | None = None
    """Added to `advantage_N` at each token, 0 after the last token; None adds nothing."""
    token_weight_NT: Tensor | None = None
    """Factor of each token's term, 1 on average over a rollout; None: 1. It corrects for what sampled each token. Only
    algorithms with a term for each token use it, because the weight of whole rollouts is corrected elsewhere."""

    @property
    def advantage_NT(self) -> Tensor:
        """The advantage of each token, or one column (N, 1) if all tokens of a rollout share it."""
        advantage_N1 = self.advantage_N[:, None]
        return advantage_N1 if self.token_advantage_NT is None else advantage_N1 + self.token_advantage_NT

    @property
    def mean_advantage_N(self) -> Tensor:
        """The mean advantage over each rollout's tokens."""
        if self.token_advantage_NT is None:
            return self.advantage_N
        return self.advantage_N + self.token_advantage_NT.sum(1) / self.length_N.clamp(min=1)

    @property
    def logp_N(self) -> Tensor:
        return torch.where(self.mask_NT, self.logp_NT, 0.0).sum(1)

    @property
    def length_N(self) -> Tensor:
        return self.mask_NT.sum(1)

    @property
    def log_ratio_N(self) -> Tensor:
        """log s, in tokens of the learner and of the source."""
        return sequence_log_ratio(self.logp_N, self.length_N, self.old_logp_N, self.old_length_N)


@dataclass
class Terms:
    """Each rollout's term of the objective, and the quantities it is computed from."""

    objective_N: Tensor
    """The terms to maximise: the only tensor here with a gradient."""
    log_ratio_N: Tensor
    lower_N: Tensor
    upper_N: Tensor
    kept_N: Tensor
    """True for rollouts whose gradient passes the clip."""
    weight_N: Tensor
    """The factor of the advantage in the objective."""


def sequence_log_ratio(logp_N: Tensor, length_N: Tensor, old_logp_N: Tensor, old_length_N: Tensor) -> Tensor:
    """log s = logp_k(y) / len_k(y) - logp_j_old(y) / len_j(y), clamped to [-10, 10].

    Each side is divided by its own length: in tokens, as published, or in bytes of the text, of which both sides have
    the same number. For own rollouts this is GSPO's ratio.
    """
    return (logp_N / length_N - old_logp_N / old_length_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def has_gradient(log_ratio_N: Tensor) -> Tensor:
    """True where the clamp of `sequence_log_ratio` lets a gradient through."""
    return log_ratio_N.abs() < LOG_RATIO_LIMIT


def k3_kl(logp_NT: Tensor, reference_logp_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """KL(policy || reference) of each rollout: the k3 estimator, mean over its tokens."""
    log_ratio_NT = torch.where(mask_NT, reference_logp_NT - logp_NT, 0.0)
    return mean_over_tokens(log_ratio_NT.exp() - log_ratio_NT - 1, mask_NT)


def own_or_foreign(own_N: Tensor, own: Terms, foreign: Terms) -> Terms:
    """Merge two sets of terms: `own` for the learner's own rollouts, `foreign` for all others."""
    return Terms(**{name: torch.where(own_N, mine, vars(foreign)[name]) for name, mine in vars(own).items()})


def banded(
    objective_N: Tensor, log_ratio_N: Tensor, lower: float, upper: float, kept_N: Tensor, weight_N: Tensor
) -> Terms:
    """Terms with the same band for all rollouts."""
    lower_N, upper_N = torch.full_like(log_ratio_N, lower), torch.full_like(log_ratio_N, upper)
    return Terms(objective_N, log_ratio_N.detach(), lower_N, upper_N, kept_N, weight_N.detach())


def unbounded(weight_N: Tensor, advantage_N: Tensor, log_ratio_N: Tensor) -> Terms:
    """The terms weight x A, without a band; the log-ratio is only reported."""
    objective_N = weight_N * advantage_N
    return banded(objective_N, log_ratio_N, 0.0, torch.inf, objective_N.detach() != 0, weight_N)


def mean_over_tokens(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    return torch.where(mask_NT, values_NT, 0.0).sum(1) / mask_NT.sum(1).clamp(min=1)


def as_if_on_policy(sequences: Sequences) -> Tensor:
    """Ratio of the learner to itself: its value is 1, its gradient that of logp / len. No importance correction."""
    mean_logp_N = mean_over_tokens(sequences.logp_NT, sequences.mask_NT)
    return (mean_logp_N - mean_logp_N.detach()).exp()
