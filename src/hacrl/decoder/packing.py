"""Packs completions and their prompts into one row of tokens, without padding and with each distinct prompt once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hacrl.decoder.attention import Rule, causal_attention

Texts = Sequence[Sequence[int]]
"""Token ids of several prompts or completions."""


class Row:
    """Distinct prompts and then the completions' own tokens, one after the other, as arrays in the computer's memory.

    The last token of each completion is left out, because it predicts nothing.
    """

    def __init__(self, prompts: Texts, completions: Texts) -> None:
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        *starts, size = itertools.accumulate(map(len, distinct), initial=0)
        first_of = dict(zip(distinct, starts, strict=True))
        length_N = np.array([len(completion) for completion in completions])
        self.distinct_P, self.start_P = np.array([len(prompt) for prompt in distinct]), np.array(starts)
        self.first_N = np.array([first_of[tuple(prompt)] for prompt in prompts])
        self.prompt_N, self.own_N = np.array([len(prompt) for prompt in prompts]), length_N - 1
        self.start_N = size + self.own_N.cumsum() - self.own_N
        self.shape = len(prompts), int(length_N.max())
        self.target_M = np.fromiter(itertools.chain.from_iterable(completions), np.int64, int(length_N.sum()))
        is_last_M = np.zeros(len(self.target_M), dtype=bool)
        is_last_M[length_N.cumsum() - 1] = True
        self.ids_S = np.concatenate([*(np.asarray(prompt, np.int64) for prompt in distinct), self.target_M[~is_last_M]])
        # Where the token at index 0 of each prompt and completion would be, if all began at their sequence's start.
        begin = np.concatenate([self.start_P, self.start_N - self.prompt_N])
        self.position_S = np.arange(len(self.ids_S)) - begin.repeat(np.concatenate([self.distinct_P, self.own_N]))
        # The first token of a completion is predicted by its prompt's last, the others by the token before.
        column_T = np.arange(self.shape[1])
        token_NT = column_T < length_N[:, None]
        last_N1 = (self.first_N + self.prompt_N - 1)[:, None]
        self.from_M = np.where(column_T == 0, last_N1, self.start_N[:, None] + column_T - 1)[token_NT]
        self.at_M = np.flatnonzero(token_NT)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, on CUDA without waiting for what runs there."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


def arrays_to_device(device: torch.device, *arrays: np.ndarray) -> list[Any]:
    return [to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in arrays]


@dataclass
class Packed:
    """A batch of M completion tokens to predict, as one row of S tokens that holds each distinct prompt once."""

    shape: tuple[int, int]
    """(N, T): the number of completions, and of tokens in the longest."""
    ids_S: Tensor
    """The row, without the last token of each completion, which predicts nothing."""
    position_S: Tensor
    """Position of each token in its own sequence, prompt included."""
    from_M: Tensor
    """Index in the row of the hidden state that predicts each completion token."""
    target_M: Tensor
    at_M: Tensor
    """Index of each of the M tokens in a flattened (N, T) table of completions."""
    rows_NR: Tensor
    """Indices in the row of each completion's sequence, prompt first; padded on the right."""
    back_S: Tensor
    """Index in the flattened `rows_NR` from which the output of each token of the row is taken."""
    again_A: Tensor
    """Indices in the flattened `rows_NR` of repeated tokens, from prompts with several completions."""
    again_from_A: Tensor
    """Index in the row of each repeated token of `again_A`."""
    windowed: bool = False
    """Whether a layer has asked for a sliding window."""
    head_sizes: set[int] = field(default_factory=set)
    """Channels of the heads of queries, keys and values that layers have asked for."""

    @classmethod
    def build(cls, prompts: Texts, completions: Texts, device: torch.device) -> "Packed":
        row = Row(prompts, completions)
        length_N1 = (row.prompt_N + row.own_N)[:, None]
        # The sequence of completion n: indices of its prompt, then its own.
        column_R = np.arange(int(length_N1.max()))
        inside_NR, in_prompt_NR = column_R < length_N1, column_R < row.prompt_N[:, None]
        rows_NR = column_R + np.where(in_prompt_NR, row.first_N[:, None], (row.start_N - row.prompt_N)[:, None])
        rows_NR[~inside_NR] = 0  # nothing sees the padding after a sequence
        back_S = np.empty(len(row.ids_S), dtype=np.int64)
        back_S[rows_NR[inside_NR]] = np.flatnonzero(inside_NR)
        again_NR = inside_NR.copy()
        again_NR.reshape(-1)[back_S] = False
        arrays = (
            row.ids_S, row.position_S, row.from_M, row.target_M, row.at_M,
            rows_NR, back_S, np.flatnonzero(again_NR), rows_NR[again_NR],
        )  # fmt: skip
        return cls(row.shape, *arrays_to_device(device, *arrays))

    def padded(self, S: int, M: int, N: int, R: int, A: int) -> "Packed":
        """A copy padded to larger tensors, so that there are fewer shapes. R must leave a free place at each row's end.

        The added tokens, rows and predictions are never read and have no gradient.
        """

        def fill(x: Tensor, size: int, value: int = 0) -> Tensor:
            return torch.cat([x, x.new_full((size - len(x),), value)])

        height, width = self.rows_NR.shape
        rows_NR = self.rows_NR.new_zeros(N, R)
        rows_NR[:height, :width] = self.rows_NR
        back_S, again_A = (index // width * R + index % width for index in (self.back_S, self.again_A))
        free = R - 1  # the place at the end of the first row, whose gradient is 0
        return Packed(
            self.shape, fill(self.ids_S, S), fill(self.position_S, S), fill(self.from_M, M), fill(self.target_M, M),
            self.at_M, rows_NR, fill(back_S, S, free), fill(again_A, A, free), fill(self.again_from_A, A),
        )  # fmt: skip

    def attend(self, module: nn.Module, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
        """Attention with a row for each completion, prompt first. A prompt's outputs are taken from one of its rows."""
        self.windowed |= rule.window is not None
        self.head_sizes |= {x.shape[3] for x in (query_BHSD, key_BKSD, value_BKSD)}
        query, key, value = (self._rows(x) for x in (query_BHSD, key_BKSD, value_BKSD))
        output_NHRD = causal_attention(query, key, value, rule)
        return output_NHRD.transpose(1, 2).flatten(0, 1).index_select(0, self.back_S)[None]

    def _rows(self, x_BHSD: Tensor) -> Tensor:
        x_SHD = x_BHSD[0].transpose(0, 1)
        spread: Tensor = Spread.apply(x_SHD, self.rows_NR.flatten(), self.back_S, self.again_A, self.again_from_A)
        return spread.view(*self.rows_NR.shape, *spread.shape[1:]).transpose(1, 2)


class Spread(torch.autograd.Function):
    """Copies tokens into rows. The backward pass is mostly a lookup: only gradients of shared prompts are summed."""

    @staticmethod
    def forward(ctx: Any, x_SHD: Tensor, rows: Tensor, back_S: Tensor, again_A: Tensor, again_from_A: Tensor) -> Tensor:
        ctx.save_for_backward(back_S, again_A, again_from_A)
        return x_SHD.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back_S, again_A, again_from_A = ctx.saved_tensors
        grad_SHD = grad.index_select(0, back_S)
        if len(again_A):
            grad_SHD.index_add_(0, again_from_A, grad.index_select(0, again_A))
        return grad_SHD, None, None, None, None
