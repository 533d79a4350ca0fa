"""Rollouts in one learner's tokens, as tensors: those of a step, of one update, or of one pass through the model."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Sequences
from hacrl.decoder.packing import to_device
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout


@dataclass
class Texts:
    """N completions, each after its prompt, in the tokens of one model."""

    prompts: list[list[int]]
    completions: list[list[int]]
    prompt_N: Tensor
    """Number of each completion's prompt. Completions of one prompt share a pass, and the prompt's tokens in it."""
    row_N: Tensor
    """Position of each completion in the caller's list."""

    def __len__(self) -> int:
        return len(self.completions)

    def __getitem__(self, chosen: slice | Sequence[int]) -> Self:
        """Select some completions. Tensors with a token dimension are cut to the longest of them."""
        rows = list(range(len(self))[chosen]) if isinstance(chosen, slice) else list(chosen)
        longest = max((len(self.completions[row]) for row in rows), default=0)
        picked: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, list):
                picked[column.name] = [value[row] for row in rows]
            elif isinstance(value, Tensor):
                picked[column.name] = value[rows] if value.ndim == 1 else value[rows, :longest]
        return replace(self, **picked)

    @property
    def length_N(self) -> Tensor:
        return torch.tensor(list(map(len, self.completions)))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))

    def by_length(self) -> tuple[list[int], list[int]]:
        """Return an order for passes, and the tokens that each completion adds to a pass with those before it.

        Completions of one prompt stand together, and so do prompts with completions of similar length.
        """
        prompt_of, lengths = self.prompt_N.tolist(), list(map(len, self.completions))
        longest: defaultdict[int, int] = defaultdict(int)
        for prompt, length in zip(prompt_of, lengths, strict=True):
            longest[prompt] = max(longest[prompt], length)
        order = sorted(range(len(self)), key=lambda n: (longest[prompt_of[n]], prompt_of[n], lengths[n]))
        first = {prompt_of[n]: n for n in reversed(order)}  # its pass also takes the tokens of the prompt
        return order, [lengths[n] + (len(self.prompts[n]) if n == first[prompt_of[n]] else 0) for n in order]


def texts_of(prompts: Mapping[int, list[int]], prompt_of: Mapping[int, int], tokens: Mapping[int, list[int]]) -> Texts:
    """Completions by row, each after its prompt; `prompt_of` gives the prompt's number by row."""
    numbers = [prompt_of[row] for row in tokens]
    chosen = [prompts[number] for number in numbers]
    return Texts(chosen, list(tokens.values()), torch.tensor(numbers), torch.tensor(list(tokens)))


@dataclass
class Minibatch(Texts):
    """N rollouts as one learner sees them, without its current log-probabilities."""

    source_N: Tensor
    own_N: Tensor
    """Whether the learner is the source."""
    advantage_N: Tensor
    omega_N: Tensor
    bytes_N: Tensor
    teaches_N: Tensor
    """Whether a rollout, or one of its tokens, has an advantage other than 0."""
    old_logp_N: Tensor
    """Sum of the log-probabilities that ratios are taken to; NaN: the source did not record any."""
    old_length_N: Tensor
    """Number of tokens in `old_logp_N`, the sum of log-probabilities that ratios are taken to."""
    old_logp_NT: Tensor
    """Old log-probabilities by token; their sum spread evenly if the source's tokens are not the learner's."""
    recorded_NT: Tensor
    """Log-probabilities that the sampler recorded for own rollouts; 0 for others."""
    ahead_NT: Tensor | None
    """The learner's log-probabilities of own rollouts right after sampling, before later updates; NaN: unknown."""
    token_advantage_NT: Tensor | None
    """Values added to `advantage_N` for each token; None: nothing is added."""
    mean_weight_N: Tensor
    """Factor of each rollout's term in the objective of the update."""
    length_factor_N: Tensor
    """Weight of each own rollout's KL that depends on its length."""
    token_weight_NT: Tensor | None = None
    """Factor of each token's term, 1 on average over a rollout, for algorithms with a term for each token; None: 1."""
    kl_weight: float = 0.0
    """Weight of the sum of KL divergences to the starting model."""
    entropy_weight: float = 0.0
    """Weight of the entropy of one token."""
    seen: bool = False
    """Whether a pass without gradients has recorded these rollouts in this update."""

    @classmethod
    def of(cls, lesson: Lesson, prompts: Mapping[int, list[int]], tokens: dict[int, list[int]], learner: int) -> Self:
        """Make a minibatch of the rollouts that the learner can use: those with `tokens`, by row."""
        rows, completions = list(tokens), list(tokens.values())
        rollouts = [lesson.rollouts[row] for row in rows]
        own, added = [rollout.source == learner for rollout in rollouts], lesson.token_advantages
        teaches_N = lesson.advantage_N[rows] != 0
        if added is not None:
            teaches_N = teaches_N | torch.tensor([bool(added[row].any()) for row in rows], dtype=torch.bool)
        ahead = [r.learner_logps if mine else None for r, mine in zip(rollouts, own, strict=True)]
        old = list(map(_old_logps, rollouts, completions))
        recorded = [rollout.logps if mine else [] for rollout, mine in zip(rollouts, own, strict=True)]
        sums = [math.nan if rollout.logp_sum is None else rollout.logp_sum for rollout in rollouts]
        zeros_N = torch.zeros(len(rows), dtype=torch.float64)
        return cls(
            prompts=[prompts[rollout.prompt_index] for rollout in rollouts],
            completions=completions,
            prompt_N=torch.tensor([rollout.prompt_index for rollout in rollouts], dtype=torch.long),
            row_N=torch.tensor(rows, dtype=torch.long),
            source_N=torch.tensor([rollout.source for rollout in rollouts], dtype=torch.long),
            own_N=torch.tensor(own, dtype=torch.bool),
            advantage_N=lesson.advantage_N[rows].double(),
            omega_N=lesson.omega_N[rows].double(),
            bytes_N=torch.tensor([rollout.num_bytes for rollout in rollouts], dtype=torch.float64),
            teaches_N=teaches_N,
            old_logp_N=torch.tensor(sums, dtype=torch.float64),
            old_length_N=torch.tensor([rollout.num_tokens for rollout in rollouts], dtype=torch.float64),
            old_logp_NT=_padded(old, completions),
            recorded_NT=_padded(recorded, completions),
            ahead_NT=_padded(ahead, completions) if any(ahead) else None,
            token_advantage_NT=None if added is None else _padded([added[row] for row in rows], completions),
            mean_weight_N=zeros_N,
            length_factor_N=zeros_N,
        )

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Places of the rollouts of these prompts."""
        chosen = set(positions)
        return [n for n, prompt in enumerate(self.prompt_N.tolist()) if prompt in chosen]

    def where(self, chosen_N: Tensor) -> Self:
        """The rollouts for which `chosen_N` is true."""
        return self[chosen_N.nonzero().flatten().tolist()]

    def set_old(self, logps: dict[int, np.ndarray]) -> None:
        """Use these log-probabilities, given by row, as the old ones, in place of those recorded while sampling."""
        for n, row in enumerate(self.row_N.tolist()):
            if row in logps:
                self.old_logp_N[n], self.old_length_N[n] = float(logps[row].sum()), len(logps[row])
                self.old_logp_NT[n, : len(logps[row])] = torch.from_numpy(logps[row])

    def sequences(self, logp_NT: Tensor, mask_NT: Tensor) -> Sequences:
        """The input of an algorithm's terms, given the learner's log-probabilities.

        Where the source did not record log-probabilities, the learner's own take their place, so that s is 1.
        """
        device, added = mask_NT.device, self.token_advantage_NT
        table = [self.old_logp_N, self.old_length_N, self.bytes_N, self.own_N.double(), self.advantage_N, self.omega_N]
        old_logp_N, old_length_N, bytes_N, own_N, advantage_N, omega_N = to_device(
            torch.stack(table), device
        )  # one transfer
        old_logp_NT, own_N = to_device(self.old_logp_NT, device), own_N.bool()
        if self.old_logp_N.isnan().any():
            unknown_N, current_NT = old_logp_N.isnan(), torch.where(mask_NT, logp_NT.detach(), 0.0)
            old_logp_N = torch.where(unknown_N, current_NT.sum(1), old_logp_N)
            old_length_N = torch.where(unknown_N, mask_NT.sum(1).double(), old_length_N)
            old_logp_NT = torch.where(unknown_N[:, None], current_NT, old_logp_NT)
        per_rollout = old_logp_N, old_length_N, bytes_N, own_N, advantage_N, omega_N
        of_tokens = (
            None if table_NT is None else to_device(table_NT, device) for table_NT in (added, self.token_weight_NT)
        )
        return Sequences(logp_NT, mask_NT, *per_rollout, old_logp_NT, *of_tokens)


def _old_logps(rollout: Rollout, token_ids: list[int]) -> Sequence[float] | None:
    """The source's log-probabilities by the learner's tokens: their sum is spread evenly unless the tokens are equal
    up to the end of turn."""
    if rollout.logp_sum is None or (rollout.token_ids and token_ids[:-1] == rollout.token_ids[:-1]):
        return rollout.logps
    return [rollout.logp_sum / len(token_ids)] * len(token_ids)


def _padded(rows: Sequence[Sequence[float] | np.ndarray | None], completions: list[list[int]]) -> Tensor:
    """Numbers by token, padded with 0. A row that is None becomes NaN."""
    padded_NT = np.zeros((len(rows), max(map(len, completions), default=0)))
    for n, values in enumerate(rows):
        padded_NT[n, : None if values is None else len(values)] = np.nan if values is None else values
    return torch.from_numpy(padded_NT)
