"""The gap between a learner and what sampled its rollouts: noted, bounded, and corrected for."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Algorithm, Sequences, Terms
from hacrl.algorithms.terms import mean_over_tokens
from hacrl.config import AgentConfig
from hacrl.decoder.packing import to_device
from hacrl.errors import UserError
from hacrl.learners.minibatch import Minibatch
from hacrl.learners.notes import RATIO_CLIPPED, RATIO_MEAN, Notes

MAX_CLIPPED_BEFORE_UPDATE = 0.05


def note_gap(batch: Minibatch, sequences: Sequences, terms: Terms, notes: Notes) -> None:
    """Note how far the recorded log-probabilities of own rollouts are from the learner's, before its first update."""
    recorded_NT = to_device(batch.recorded_NT, sequences.logp_NT.device)
    gap_NT = (sequences.logp_NT.detach() - recorded_NT).abs() * sequences.mask_NT
    ratio_N = terms.log_ratio_N.exp()
    clipped_N = (ratio_N < terms.lower_N) | (ratio_N > terms.upper_N)
    notes.note(gap=gap_NT.sum(), gap_max=gap_NT.max(), gap_tokens=batch.num_tokens)
    notes.note(gap_clipped=clipped_N.sum(), gap_rollouts=len(batch))


def note_gap_ahead(rollouts: Minibatch, algorithm: Algorithm, device: torch.device, notes: Notes) -> None:
    """Note the gap for rollouts that the learner scored right after sampling, because it has been updated since."""
    if rollouts.ahead_NT is None:
        return
    batch = rollouts.where(~rollouts.ahead_NT.isnan().any(1))
    assert batch.ahead_NT is not None
    mask_NT = torch.arange(batch.ahead_NT.shape[1]) < batch.length_N[:, None]
    sequences = batch.sequences(batch.ahead_NT.to(device), mask_NT.to(device))
    note_gap(batch, sequences, algorithm.terms(sequences, 0), notes)


def ahead_of(rollouts: Minibatch) -> dict[int, np.ndarray]:
    """The learner's log-probabilities of rollouts right after it sampled them, by row."""
    if rollouts.ahead_NT is None:
        return {}
    rows = zip(rollouts.row_N.tolist(), rollouts.completions, rollouts.ahead_NT.numpy(), strict=True)
    return {row: logp_T[: len(ids)] for row, ids, logp_T in rows if not np.isnan(logp_T).any()}


def importance_ratios(config: AgentConfig, difference_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return TRL's importance ratios, one for each token (N, T) or rollout (N, 1), and which were beyond the bounds.

    `difference_NT` is the learner's log-probability minus the sampler's, 0 after the last token.
    """
    mode = config.vllm_importance_sampling_mode
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    of_rollouts = mode.startswith("sequence")
    ratio = (difference_NT.sum(1, keepdim=True) if of_rollouts else difference_NT).exp()
    beyond = (ratio < (low or 0.0)) | (ratio > (math.inf if high is None else high))
    ratio = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(beyond, 0.0)
    return ratio, beyond


def correct_for_sampler(own: Minibatch, config: AgentConfig, notes: Notes) -> Minibatch:
    """Return own rollouts whose terms are multiplied by importance ratios, as TRL does after sampling with vLLM.

    Foreign rollouts need no correction: their ratio is taken to what their source's sampler recorded.
    """
    if not len(own):
        return own
    mask_NT = torch.arange(own.recorded_NT.shape[1]) < own.length_N[:, None]
    difference_NT = torch.where(mask_NT, own.old_logp_NT - own.recorded_NT, 0.0)
    ratio, beyond = importance_ratios(config, difference_NT, mask_NT)
    shown = torch.ones_like(ratio, dtype=torch.bool) if ratio.shape[1] == 1 else mask_NT
    notes.note(**{RATIO_MEAN: ratio[shown].sum(), RATIO_CLIPPED: beyond[shown].sum()}, ratios=int(shown.sum()))
    mean_N = mean_over_tokens(ratio.expand(mask_NT.shape), mask_NT)
    own = replace(own, mean_weight_N=own.mean_weight_N * mean_N)
    if ratio.shape[1] == 1:
        return own
    share_NT = torch.where(mean_N[:, None] > 0, ratio / mean_N[:, None], 0.0)
    return replace(own, token_weight_NT=torch.where(mask_NT, share_NT, 0.0))


def check_gap(config: AgentConfig, step: int, notes: Notes) -> None:
    """Raise UserError, before any update, if the sampler and the learner do not have the same policy."""
    found = notes.logprob_gap()
    gap, clipped = found.get("logprob_gap", 0.0), found.get("logprob_gap_clipped", 0.0)
    if gap > config.max_logprob_gap or clipped > MAX_CLIPPED_BEFORE_UPDATE:
        recompute = "" if config.recomputes_logprobs else "recompute_logprobs: true, or "
        raise UserError(
            f"Agent {config.id}, step {step}: the log-probabilities recorded while sampling differ from the learner's "
            f"by {gap:.2g} per token (max_logprob_gap is {config.max_logprob_gap}), and {clipped:.0%} of its own "
            f"rollouts are outside the clip before any update (at most {MAX_CLIPPED_BEFORE_UPDATE:.0%} may be): ratios "
            f"would be noise. Use dtype: float32, or {recompute}a wider algorithm.epsilon and epsilon_high."
        )
