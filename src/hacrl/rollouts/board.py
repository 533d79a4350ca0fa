"""The tensors through which the host and the CUDA graphs of the engine with blocks talk to each other."""

import torch
from torch import Tensor

from hacrl.decoder import paged_kernels as kernels
from hacrl.decoder.packing import to_device
from hacrl.decoder.paged import Block


class Columns:
    """What a token step needs of each row of the batch. Rows that only fill up a bucket hold the spare completion."""

    def __init__(self, rows: int, blocks: int, spare: int, unit: int, device: torch.device) -> None:
        self.token_B, self.position_B, self.completion_B, self.prompt_tokens_B, self.own_tokens_B = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(5)
        )
        self.table_BM = torch.zeros(rows, blocks, dtype=torch.long, device=device)
        self.spare, self.unit = spare, unit
        self.fill(0, rows)

    def all(self) -> tuple[Tensor, ...]:
        rows = (self.token_B, self.position_B, self.completion_B, self.prompt_tokens_B, self.own_tokens_B)
        return *rows, self.table_BM

    def fill(self, first: int, end: int) -> None:
        """Make these rows fillers."""
        if first == end:
            return
        for column in self.all():
            column[first:end] = 0
        self.completion_B[first:end] = self.spare
        self.table_BM[first:end, 0] = self.unit

    def keep(self, kept: list[int]) -> None:
        """Move these rows to the front, in this order."""
        if kept != list(range(len(kept))):
            index = to_device(torch.tensor(kept), self.token_B.device)
            for column in self.all():
                column[: len(kept)] = column[index]


class Board:
    """The tensors that CUDA graphs read and write, for N completions of at most T tokens."""

    def __init__(
        self, rows: int, N: int, T: int, L: int, P: int, spare: Block, stop_ids: list[int], device: torch.device
    ) -> None:
        prompt_blocks = -(-L // kernels.BLOCK)
        self.room = (rows, N, T, L, P)
        self.columns, self.idle = (
            Columns(rows, prompt_blocks + T // kernels.BLOCK + 1, N, spare.unit, device) for _ in range(2)
        )
        self.ids_PL = torch.zeros(P, L, dtype=torch.long, device=device)
        self.stored_P = torch.zeros(P, dtype=torch.long, device=device)
        self.table_PM = torch.zeros(P, prompt_blocks, dtype=torch.long, device=device)
        self.tokens_NT = torch.zeros(N + 1, T, dtype=torch.int32, device=device)
        self.logps_NT = torch.zeros(N + 1, T, device=device)
        self.length_N, self.finished_N = (torch.zeros(N + 1, dtype=torch.int32, device=device) for _ in range(2))
        self.limit, self.seed = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.stop_ids = torch.tensor(stop_ids, device=device)

    def reset(self, limit: int, seed: int, spare: Block) -> None:
        for columns in (self.columns, self.idle):
            columns.unit = spare.unit
            columns.fill(0, len(columns.token_B))
        self.length_N.zero_()
        self.finished_N.zero_()
        self.finished_N[-1] = 1
        self.limit.fill_(limit)
        self.seed.fill_(seed * 0x9E3779B97F4A7C15 % 2**62)
