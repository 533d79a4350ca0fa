"""Measures how far the log-probabilities recorded while sampling are from the learner's own."""

import math

import numpy as np
import torch

from hacrl.algorithms import Algorithm, Sequences, Terms
from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.learners.minibatch import Minibatch
from hacrl.learners.notes import Notes

MAX_CLIPPED_BEFORE_UPDATE = 0.05


def note(batch: Minibatch, sequences: Sequences, terms: Terms, notes: Notes) -> None:
    """Note how far the recorded log-probabilities of own rollouts are from the learner's, before its first update."""
    recorded_NT = batch.recorded_NT.to(sequences.logp_NT.device)
    gap_NT = (sequences.logp_NT.detach() - recorded_NT).abs() * sequences.mask_NT
    ratio_N = terms.log_ratio_N.exp()
    clipped_N = (ratio_N < terms.lower_N) | (ratio_N > terms.upper_N)
    notes.note(gap=gap_NT.sum(), gap_max=gap_NT.max(), gap_tokens=batch.num_tokens)
    notes.note(gap_clipped=clipped_N.sum(), gap_rollouts=len(batch))


def note_ahead(rollouts: Minibatch, algorithm: Algorithm, device: torch.device, notes: Notes) -> None:
    """Note the gap for rollouts that the learner scored right after sampling, because it has been updated since."""
    if rollouts.ahead_NT is None:
        return
    batch = rollouts.where(~rollouts.ahead_NT.isnan().any(1))
    assert batch.ahead_NT is not None
    mask_NT = torch.arange(batch.ahead_NT.shape[1]) < batch.length_N[:, None]
    sequences = batch.sequences(batch.ahead_NT.to(device), mask_NT.to(device))
    note(batch, sequences, algorithm.terms(sequences, 0), notes)


def ahead_of(rollouts: Minibatch) -> dict[int, np.ndarray]:
    """The learner's log-probabilities of rollouts right after it sampled them, by row."""
    if rollouts.ahead_NT is None:
        return {}
    rows = zip(rollouts.row_N.tolist(), rollouts.completions, rollouts.ahead_NT.numpy(), strict=True)
    return {row: logp_T[: len(ids)] for row, ids, logp_T in rows if not np.isnan(logp_T).any()}


def weigh(own: Minibatch, largest: float, notes: Notes) -> None:
    """Weigh own rollouts by their probability for the learner divided by that for the sampler, per token."""
    for n, ids in enumerate(own.completions):
        difference = (own.old_logp_NT[n, : len(ids)] - own.recorded_NT[n, : len(ids)]).numpy()
        ratio = min(math.exp(float(np.mean(difference))), largest)
        own.mean_weight_N[n] *= ratio
        notes.note(sampler_ratio=ratio, sampler_ratios=1)


def check(config: AgentConfig, step: int, notes: Notes) -> None:
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
