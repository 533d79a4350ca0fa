"""Packs completions and their prompts into one row of tokens, without padding and with each distinct prompt once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hacrl.decoder.attention import Rule, causal_attention

Texts = Sequence[Sequence[int]]
"""Token ids of several prompts or completions."""


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

    @classmethod
    def build(cls, prompts: Texts, completions: Texts, device: torch.device) -> "Packed":
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        *starts, size = itertools.accumulate(map(len, distinct), initial=0)
        first_of = dict(zip(distinct, starts, strict=True))
        first_N = np.array([first_of[tuple(prompt)] for prompt in prompts])
        prompt_N, length_N = (np.array([len(text) for text in texts]) for texts in (prompts, completions))
        own_N = length_N - 1
        start_N = size + own_N.cumsum() - own_N
        N, T, R = len(prompts), int(length_N.max()), int((prompt_N + own_N).max())
        tokens = np.fromiter(itertools.chain.from_iterable(completions), np.int64, int(length_N.sum()))
        is_last = np.zeros(len(tokens), dtype=bool)
        is_last[length_N.cumsum() - 1] = True
        ids_S = np.concatenate([*(np.asarray(prompt, np.int64) for prompt in distinct), tokens[~is_last]])

        # The sequence of completion n: indices of its prompt, then its own.
        column_R = np.arange(R)
        inside_NR = column_R < (prompt_N + own_N)[:, None]
        in_prompt_NR = column_R < prompt_N[:, None]
        rows_NR = np.where(in_prompt_NR, first_N[:, None] + column_R, (start_N - prompt_N)[:, None] + column_R)
        rows_NR[~inside_NR] = 0  # nothing sees the padding after a sequence
        position_S, back_S = (np.empty(len(ids_S), dtype=np.int64) for _ in range(2))
        position_S[rows_NR[inside_NR]] = np.broadcast_to(column_R, (N, R))[inside_NR]
        back_S[rows_NR[inside_NR]] = np.flatnonzero(inside_NR)
        again_NR = inside_NR.copy()
        again_NR.reshape(-1)[back_S] = False
        # Token t of completion n is predicted from column prompt_n + t - 1.
        column_T = np.arange(T)
        token_NT = column_T < length_N[:, None]
        from_NT = rows_NR[np.arange(N)[:, None], np.minimum(prompt_N[:, None] + column_T - 1, R - 1)]
        arrays = (
            ids_S, position_S, from_NT[token_NT], tokens, np.flatnonzero(token_NT),
            rows_NR, back_S, np.flatnonzero(again_NR), rows_NR[again_NR],
        )  # fmt: skip
        moved: Any = [torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True) for array in arrays]
        return cls((N, T), *moved)

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
        query, key, value = (self._rows(x) for x in (query_BHSD, key_BKSD, value_BKSD))
        output_NHRD = causal_attention(query, key, value, rule)
        return output_NHRD.transpose(1, 2).flatten(0, 1).index_select(0, self.back_S)[None]

    def _rows(self, x_BHSD: Tensor) -> Tensor:
        x_SHD = x_BHSD[0].transpose(0, 1)
        spread: Tensor = _Spread.apply(x_SHD, self.rows_NR.flatten(), self.back_S, self.again_A, self.again_from_A)
        return spread.view(*self.rows_NR.shape, *spread.shape[1:]).transpose(1, 2)

    def table(self, values_M: Tensor) -> Tensor:
        """Arrange values of the completion tokens as an (N, T) table, 0 where there is no token."""
        N, T = self.shape
        return values_M.new_zeros(N * T).index_copy(0, self.at_M, values_M[: len(self.at_M)]).view(N, T)


class _Spread(torch.autograd.Function):
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
