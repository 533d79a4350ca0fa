"""The rows of the engine with blocks: completions on their way, and the prompts that they continue."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hacrl.decoder import paged_kernels as kernels
from hacrl.decoder.paged import Block
from hacrl.rollouts.board import Board


@dataclass(eq=False)
class Prompt:
    """A prompt that several rows continue. Its last token is not in its blocks."""

    tokens: list[int]
    blocks: list[Block] = field(default_factory=list)
    rows: int = 0
    """How many rows use its blocks now."""

    @property
    def stored(self) -> int:
        return len(self.tokens) - 1


@dataclass(eq=False)
class Row:
    """One completion on its way."""

    completion: int
    prompt: Prompt
    blocks: list[Block] = field(default_factory=list)
    sampled: int = 0
    """How many tokens it has sampled."""
    token: int = -1
    """Its last token, while it is paused."""
    saved: list[Tensor] = field(default_factory=list)
    """What its blocks held, while it is paused."""
    text: list[int] = field(default_factory=list)
    """Its tokens, if stop strings are looked for."""

    def blocks_until(self, sampled: int) -> int:
        """How many blocks hold so many sampled tokens, and the next one."""
        return sampled // kernels.BLOCK + 1


class Look:
    """Which of some rows are finished: asked of the GPU now, read later."""

    def __init__(self, board: Board, rows: list[Row]) -> None:
        self.rows = list(rows)
        finished_B = board.finished_N[board.columns.completion_B[: len(rows)]]
        self.finished_B = finished_B.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if finished_B.is_cuda else None
        if self.event is not None:
            self.event.record()

    def finished(self) -> list[Row]:
        if self.event is not None:
            self.event.synchronize()
        return [row for row, done in zip(self.rows, self.finished_B.tolist(), strict=True) if done]
