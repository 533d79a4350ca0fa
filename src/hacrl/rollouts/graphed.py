"""The built-in decoder on CUDA: a token step is one CUDA graph, and nothing waits for the host between tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder import Backbone, kernels
from hacrl.decoder.attention import Rule, SharedCache
from hacrl.decoder.scoring import bucket, capturing
from hacrl.rollouts.engine import SamplingParams, length_at_stop, require_finite, restrict
from hacrl.rollouts.native import Batch, NativeEngine, Sampled

LOOK_EVERY = 16
"""How many tokens are decoded between two checks for finished rows. Each check waits for the GPU."""


@dataclass
class GraphDecode:
    """The attention plan of a token step. Everything that changes from step to step is in tensors."""

    cache: SharedCache
    slot_B: Tensor
    prompt_B: Tensor
    length_P: Tensor
    step: Tensor

    def attend(self, module: nn.Module, query_BH1D: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, rule: Rule) -> Tensor:
        prompt, own = self.cache.prompts[module], self.cache.store(True, module, key_BK1D, value_BK1D)
        output_BHD = kernels.decode_attention(
            query_BH1D[:, :, 0], key_BK1D[:, :, 0], value_BK1D[:, :, 0], prompt, own,
            self.slot_B, self.prompt_B, self.length_P, self.step, rule.scale, rule.softcap, rule.window,
        )  # fmt: skip
        return output_BHD[:, None]


class Board:
    """The tensors that CUDA graphs read and write. The last slot is for rows that only fill up a bucket."""

    def __init__(self, P: int, L: int, slots: int, T: int, stop_ids: Sequence[int], device: torch.device) -> None:
        rows, zeros = slots - 1, partial(torch.zeros, dtype=torch.long, device=device)
        self.ids_PL, self.length_P = zeros(P, L), zeros(P)
        self.token_B, self.position_B, self.slot_B, self.prompt_B = (zeros(rows) for _ in range(4))
        self.place_B, self.step, self.seed = torch.arange(rows, device=device), zeros(1), zeros(1)
        # One entry for each slot: its sampled tokens, whether it is finished, and which completion it holds.
        self.tokens_NT, self.logps_NT = zeros(slots, T, dtype=torch.int32), zeros(slots, T, dtype=torch.float32)
        self.length_N, self.finished_N = (zeros(slots, dtype=torch.int32) for _ in range(2))
        self.row_N = zeros(slots)
        self.stop_ids = torch.tensor(stop_ids, device=device)
        self.checked: list[int] = []

    def reset(self) -> None:
        """Remove all completions, so that every row is a filler."""
        spare = len(self.length_N) - 1
        self.slot_B.fill_(spare)
        for tensor in (self.prompt_B, self.token_B, self.position_B, self.step, self.length_N, self.finished_N):
            tensor.zero_()
        self.finished_N[spare] = 1
        self.checked = [0] * spare

    def place(self, slots: Tensor, prompts: Tensor, tokens: Tensor, positions: Tensor, B: int) -> None:
        """Write these rows first, and fillers after them up to row B."""
        columns, rows = (self.slot_B, self.prompt_B, self.token_B, self.position_B), (slots, prompts, tokens, positions)
        spare = len(self.length_N) - 1
        for column, values, fill in zip(columns, rows, (spare, 0, 0, 0), strict=True):
            column[: len(values)] = values
            column[len(values) : B] = fill


class GraphedEngine(NativeEngine):
    def __init__(
        self, backbone: Backbone, tokenizer: Tokenizer, stop_ids: Sequence[int], batch_size: int, who: str = "Sampling"
    ) -> None:
        super().__init__(backbone, tokenizer, stop_ids, batch_size, who)
        self.board: Board | None = None
        self.moved, self.pool = backbone.moved, torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self.run_before: set[tuple[object, ...]] = set()

    def release(self) -> None:
        """Give back the memory of the cache, and of the graphs that write to it, until the next sampling."""
        super().release()
        self.board = None
        self.graphs.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def _decode(self, batch: Batch, params: SamplingParams, seed: int) -> Sampled:
        T, N, (P, L), device = params.max_completion_length, len(batch.row_N), batch.ids_PL.shape, self.backbone.device
        B, room_P, room_L = bucket(N), bucket(P), -(-L // 32) * 32
        board = self._board(room_P, room_L, B, T)
        board.ids_PL[:P, :L] = batch.ids_PL.to(device)
        board.length_P.fill_(1)
        board.length_P[:P] = batch.length_P.to(device)
        board.row_N[:N] = torch.tensor(batch.row_N).to(device)
        board.seed.fill_(seed * 0x9E3779B97F4A7C15 % 2**62)
        logits_PV = self._prefill(board, room_P, room_L)
        require_finite(logits_PV[:P])
        graph = self._step_graph(board, B, params)

        slot_N, prompt_N = torch.arange(N, device=device), batch.prompt_N.to(device)
        board.place(slot_N, prompt_N, torch.zeros_like(slot_N), board.length_P[prompt_N] - 1, B)
        board.step.zero_()
        self._choose(board, logits_PV, board.prompt_B, B, params)
        stopped: set[int] = set()
        counted = 0
        for t in range(1, T):
            graph.replay()
            if t % LOOK_EVERY:
                continue
            if params.stop:
                self._stop(board, t + 1, params.stop, stopped, N)
            running = (board.finished_N[board.slot_B[:B]] == 0).nonzero().squeeze(1)
            self._count(N - len(running) - counted)
            counted = N - len(running)
            if len(running) == 0:
                break
            if bucket(len(running)) < B:
                B = bucket(len(running))
                slots, prompts = board.slot_B[running], board.prompt_B[running]
                board.place(slots, prompts, board.token_B[running], board.position_B[running], B)
                graph = self._step_graph(board, B, params)
        self._count(N - counted)
        if params.stop:
            self._stop(board, T, params.stop, stopped, N)
        return Sampled(board.tokens_NT[:N].cpu(), board.logps_NT[:N].cpu(), board.length_N[:N].cpu(), stopped)

    def _board(self, P: int, L: int, rows: int, T: int) -> Board:
        """Return tensors for this batch. Existing ones are used again if they are large enough."""
        moved, self.moved = self.moved != self.backbone.moved, self.backbone.moved
        if self.cache.reserve(P, L, rows + 1, T) or moved or self.board is None:
            self.graphs.clear()
            self.pool = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph
            P, L, slots, T = self.cache.room
            self.board = Board(P, L, slots, T, self.stop_ids, self.backbone.device)
        self.board.reset()
        return self.board

    def _prefill(self, board: Board, P: int, L: int) -> Tensor:
        """Return the logits after each prompt. A shape is captured as a graph when it occurs for the second time."""
        key, read = ("prefill", P, L), partial(self._read, board.ids_PL[:P, :L], board.length_P[:P])
        if key not in self.graphs:
            if key not in self.run_before:
                self.run_before.add(key)
                return read()
            self.graphs[key] = self._captured(read)
        graph, logits_PV = self.graphs[key]
        graph.replay()
        assert logits_PV is not None
        return logits_PV

    def _step_graph(self, board: Board, B: int, params: SamplingParams) -> torch.cuda.CUDAGraph:
        key = ("step", B, params.temperature, params.top_p, params.top_k)
        if key not in self.graphs:
            if not any(known[0] == "step" for known in self.graphs):
                self._token_step(board, B, params)  # loads kernels; nothing is placed yet, so it writes the spare slot
            self.graphs[key] = self._captured(lambda: self._token_step(board, B, params))
        return self.graphs[key][0]

    def _token_step(self, board: Board, B: int, params: SamplingParams) -> None:
        plan = GraphDecode(self.cache, board.slot_B[:B], board.prompt_B[:B], board.length_P, board.step)
        hidden_B1D = self.backbone.hidden(board.token_B[:B, None], board.position_B[:B, None], plan)
        logits_BV = self.backbone.head.logits(hidden_B1D[:, 0])
        board.step.add_(1)
        self._choose(board, logits_BV, board.place_B, B, params)

    def _choose(self, board: Board, logits_RV: Tensor, from_B: Tensor, B: int, params: SamplingParams) -> None:
        """Choose the next token of each row. `from_B` says which row of the logits it is sampled from."""
        source_RV = logits_RV
        if params.top_k or params.top_p < 1:
            allowed_RV = restrict((logits_RV / (params.temperature or 1.0)).log_softmax(1), params.top_p, params.top_k)
            source_RV = logits_RV.masked_fill(allowed_RV == -torch.inf, -torch.inf)
        kernels.sample_tokens(
            logits_RV, source_RV, from_B[:B], board.slot_B[:B], board.token_B[:B], board.position_B[:B],
            board.finished_N, board.row_N, board.step, board.seed,
            board.tokens_NT, board.logps_NT, board.length_N, board.stop_ids, params.temperature,
        )  # fmt: skip

    def _stop(self, board: Board, until: int, stops: Sequence[str], stopped: set[int], N: int) -> None:
        """End the rows that have a stop string in their first `until` tokens."""
        lengths = board.length_N[:N].tolist()
        for n, tokens in enumerate(board.tokens_NT[:N, :until].tolist()):
            if n in stopped or lengths[n] <= board.checked[n]:
                continue
            length = length_at_stop(self.tokenizer, tokens[: lengths[n]], board.checked[n], stops)
            board.checked[n] = lengths[n]
            if length is not None and not (length == lengths[n] and tokens[length - 1] in self.stop_ids):
                stopped.add(n)
                board.length_N[n] = length
                board.finished_N[n] = 1

    def _captured(self, work: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool, self.backbone.device):
            result = work()
        return graph, result
