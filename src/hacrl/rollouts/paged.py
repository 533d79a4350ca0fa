"""The built-in decoder on CUDA: rows join and leave while others run, and a token step is one CUDA graph.

The last token of a prompt is the first that a row reads in a token step, so reading prompts needs no logits. The host
reads which rows are finished while the GPU decodes the next tokens. Random numbers belong to a completion and a
position: what is sampled does not depend on which rows run beside each other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder import Backbone
from hacrl.decoder import paged_kernels as kernels
from hacrl.decoder.packing import Texts, to_device
from hacrl.decoder.paged import BlockCache, PagedDecode, PagedPrefill
from hacrl.decoder.scoring import bucket, capturing
from hacrl.rollouts.board import Board, Columns
from hacrl.rollouts.engine import (
    LocalEngine,
    OneDoesNotFit,
    SamplingParams,
    length_at_stop,
    require_finite,
    restrict,
)
from hacrl.rollouts.rollout import Completion, FinishReason
from hacrl.rollouts.rows import Look, Prompt, Row

LOOK_EVERY = 8
"""How many tokens are decoded between two looks for finished rows. A look is read while the next tokens are decoded, so
that the GPU does not wait for the host."""
PREFILL_TOKENS = 1 << 14
"""How many prompt tokens, padding included, are read at once."""
CAPTURED_TOKENS = 1 << 12
"""Most prompt tokens of a pass that becomes a graph. A larger one keeps the GPU busy without."""
MARGIN = 1 << 29
"""Bytes of free memory that the cache leaves to others, besides what a pass needs."""


def fine_bucket(n: int) -> int:
    """Round up to the next of 1, 2, 4, 8, 16, ..., 64, 72, 80, ..., 128, 144, ...: at most an eighth is filled up.

    With hundreds of rows, matrix products take time for each of them.
    """
    size = max(1 << max(n.bit_length() - 4, 0), 8)
    return min(bucket(n), -(-n // size) * size)


class PagedEngine(LocalEngine):
    def __init__(
        self,
        backbone: Backbone,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        batch_size: int,
        who: str = "Sampling",
        most_bytes: int | None = None,
    ) -> None:
        """`batch_size` bounds how many rows run at once, `most_bytes` the memory of the cache (None: what is free)."""
        super().__init__(tokenizer, stop_ids, batch_size, who)
        self.backbone, self.most_bytes = backbone, most_bytes
        self.cache: BlockCache | None = None
        self.board: Board | None = None
        self.moved, self.pool = backbone.moved, torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self.run_before: set[tuple[object, ...]] = set()
        self.margin = MARGIN
        """Bytes of free memory that the cache leaves to others, besides what a pass needs."""
        self.pauses = 0
        """How often a row was paused for lack of memory."""

    def release(self) -> None:
        """Do nothing: the cache is given back after each sampling. Graphs are kept, because to capture them anew takes
        seconds; they hold the activations of one token step."""

    def forget(self) -> None:
        """Give back the memory of captured graphs, and leave more to others from now on."""
        self.board = None
        self._drop_graphs()
        self.margin = min(2 * self.margin, 4 * MARGIN)

    def _sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        G, limit = params.num_generations, params.max_completion_length
        known: dict[tuple[int, ...], Prompt] = {}
        rows = [
            Row(i * G + g, known.setdefault(tuple(prompt), Prompt(list(prompt))))
            for i, prompt in enumerate(prompts)
            for g in range(G)
        ]
        order = {prompt: place for place, prompt in enumerate(sorted(known.values(), key=lambda p: len(p.tokens)))}
        waiting = deque(sorted(rows, key=lambda row: order[row.prompt]))
        with self.backbone.driven():
            self.cache = self.cache or BlockCache(self.backbone, self.most_bytes)
            try:
                board = self._board(len(rows), limit, max(len(prompt) for prompt in prompts), seed)
                stopped = self._run(board, waiting, params)
                results = list(self._results(board, len(rows)))
            finally:
                self.cache.release()
        completions = [self._completion(*result, n in stopped) for n, result in enumerate(results)]
        return [completions[i * G : (i + 1) * G] for i in range(len(prompts))]

    def _completion(self, tokens: list[int], logps: list[float], stopped: bool) -> Completion:
        ended = tokens[-1] in self.stop_ids
        reason: FinishReason = "stop" if ended or stopped else "length"
        return Completion(tokens, logps, reason, ended)

    def _results(self, board: Board, N: int) -> Iterator[tuple[list[int], list[float]]]:
        """Yield tokens and log-probabilities of each completion."""
        lengths = board.length_N[:N].tolist()
        require_finite(board.logps_NT[:N, :1])
        columns = (x[:N, : max(lengths)].cpu() for x in (board.tokens_NT, board.logps_NT))
        for length, tokens_T, logps_T in zip(lengths, *columns, strict=True):
            yield tokens_T[:length].tolist(), logps_T[:length].tolist()

    # --- rows come and go ------------------------------------------------------------------------------

    def _run(self, board: Board, waiting: deque[Row], params: SamplingParams) -> set[int]:
        """Decode all rows; returns the completions that a stop string ended."""
        running, stopped, limit = list[Row](), set[int](), params.max_completion_length
        looks = deque[Look]()
        while waiting or running:
            while not self._extend(board, running, limit):
                if looks:  # rows that are finished give blocks back
                    running = self._remove(board, running, looks.popleft().finished())
                else:
                    self._pause(board, running, waiting)
            running += self._admit(board, running, waiting, limit)
            if not running:
                break
            steps = min(LOOK_EVERY, max(limit - row.sampled for row in running))
            B = fine_bucket(len(running))
            board.columns.fill(len(running), B)
            graph = self._step_graph(board, B, params)
            for _ in range(steps):
                graph.replay()
            if params.stop:
                self._stop(board, running, steps, params.stop, stopped)
            for row in running:
                row.sampled = min(row.sampled + steps, limit)
            looks.append(Look(board, running))
            # Stop strings are looked for on the host, and nothing runs ahead of that.
            unread = 0 if params.stop or steps == 0 else 1
            while len(looks) > unread:
                running = self._remove(board, running, looks.popleft().finished())
        return stopped

    def _remove(self, board: Board, running: list[Row], finished: list[Row]) -> list[Row]:
        """End these rows, unless they have ended before; returns those that still run."""
        gone = {row.completion for row in finished}
        going = [place for place, row in enumerate(running) if row.completion not in gone]
        for row in running:
            if row.completion in gone:
                self._leave(row)
        self._count(len(running) - len(going))
        board.columns.keep(going)
        return [running[place] for place in going]

    def _leave(self, row: Row) -> None:
        """Give a row's blocks back, and those of its prompt if no other row uses them."""
        assert self.cache is not None
        self.cache.give(row.blocks)
        row.blocks = []
        row.prompt.rows -= 1
        if row.prompt.rows == 0:
            self.cache.give(row.prompt.blocks)
            row.prompt.blocks = []

    def _extend(self, board: Board, running: list[Row], limit: int) -> bool:
        """Give rows the blocks that they need until the next look; returns False if there is no memory for all."""
        assert self.cache is not None
        new, enough = list[tuple[int, int, int]](), True
        for place, row in enumerate(running):
            missing = row.blocks_until(min(row.sampled + LOOK_EVERY, limit)) - len(row.blocks)
            blocks = self.cache.take(missing) if missing > 0 else []
            if blocks is None:
                enough = False
                break
            first = len(row.prompt.blocks) + len(row.blocks)
            new += [(place, first + i, block.unit) for i, block in enumerate(blocks)]
            row.blocks += blocks
        if new:
            rows, columns, units = self._there(new).T
            board.columns.table_BM[rows, columns] = units
        return enough

    def _pause(self, board: Board, running: list[Row], waiting: deque[Row]) -> None:
        """Move the keys and values of the row that joined last to host memory."""
        assert self.cache is not None
        row = running.pop()
        if not running:
            raise OneDoesNotFit(
                f"{self.who}: the cache of one completion with {row.sampled} tokens takes "
                f"{len(row.blocks) * self.cache.block_bytes >> 20} MiB, and there is no memory for more."
            )
        row.token = int(board.columns.token_B[len(running)])
        row.saved = [block.memory.to("cpu", copy=True) for block in row.blocks]
        self._leave(row)
        waiting.appendleft(row)
        self.pauses += 1

    def _there(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Copy a table to the GPU, without waiting for what runs there."""
        return to_device(torch.tensor(numbers), self.backbone.device)

    def _admit(self, board: Board, running: list[Row], waiting: deque[Row], limit: int) -> list[Row]:
        """Let waiting rows join while there is room for them, and for those that run to grow."""
        cache, fresh, unread = self.cache, list[Row](), list[Prompt]()
        assert cache is not None
        room = cache.room() if waiting else 0
        while waiting and len(running) + len(fresh) < self.batch_size:
            row = waiting[0]
            of_prompt = 0 if row.prompt.blocks else -(-row.prompt.stored // kernels.BLOCK)
            own = row.blocks_until(min(row.sampled + LOOK_EVERY, limit))
            others = len(running) + len(fresh)
            if others and room - of_prompt - own < others:
                break
            blocks = cache.take(of_prompt + own)
            if blocks is None:
                if others:
                    break
                raise OneDoesNotFit(
                    f"{self.who}: the cache of one completion with a prompt of {len(row.prompt.tokens)} tokens does "
                    "not fit into memory."
                )
            room -= of_prompt + own
            waiting.popleft()
            if of_prompt:
                row.prompt.blocks = blocks[:of_prompt]
                unread.append(row.prompt)
            row.blocks = blocks[of_prompt:]
            row.prompt.rows += 1
            for block, saved in zip(row.blocks, row.saved, strict=False):
                block.memory.copy_(saved)
            row.saved = []
            fresh.append(row)
        self._read(board, unread)
        if fresh:
            self._place(board, fresh, len(running))
        return fresh

    def _place(self, board: Board, fresh: list[Row], first: int) -> None:
        """Write the columns of rows that join the batch."""
        columns, end = board.columns, first + len(fresh)
        figures = [
            (
                row.token if row.sampled else row.prompt.tokens[-1],
                row.prompt.stored + row.sampled,
                row.completion,
                row.prompt.stored,
                row.sampled,
            )
            for row in fresh
        ]
        for column, values in zip(columns.all(), self._there(figures).T, strict=False):
            column[first:end] = values
        units = [[block.unit for block in (*row.prompt.blocks, *row.blocks)] for row in fresh]
        width = max(map(len, units))
        columns.table_BM[first:end, :width] = self._there([own + [0] * (width - len(own)) for own in units])

    def _stop(self, board: Board, running: list[Row], steps: int, stops: Sequence[str], stopped: set[int]) -> None:
        """End the rows that have a stop string in their newest tokens."""
        completion_B = board.columns.completion_B[: len(running)]
        lengths = board.length_N[completion_B].tolist()
        first_B1 = torch.tensor([[row.sampled] for row in running], device=completion_B.device)
        place_BS = first_B1 + torch.arange(steps, device=completion_B.device)
        place_BS = place_BS.clamp(max=board.tokens_NT.shape[1] - 1)
        newest = board.tokens_NT[completion_B[:, None], place_BS].tolist()
        for row, length, tokens in zip(running, lengths, newest, strict=True):
            checked = len(row.text)
            row.text += tokens[: length - checked]
            end = length_at_stop(self.tokenizer, row.text, checked, stops)
            if end is not None and not (end == length and row.text[-1] in self.stop_ids):
                stopped.add(row.completion)
                board.length_N[row.completion] = end
                board.finished_N[row.completion] = 1

    # --- what runs on the GPU --------------------------------------------------------------------------

    def _board(self, N: int, T: int, L: int, seed: int) -> Board:
        """Return tensors for these completions. Existing ones, and their graphs, are used again if they suffice."""
        assert self.cache is not None
        moved, self.moved = self.moved != self.backbone.moved, self.backbone.moved
        L = -(-bucket(L) // kernels.BLOCK) * kernels.BLOCK
        wanted = (fine_bucket(min(N, self.batch_size)), N, T, L, bucket(max(PREFILL_TOKENS // L, 1)))
        has = self.board.room if self.board else (0,) * len(wanted)
        limit = T
        self.cache.margin = self.margin + self._pass_bytes(wanted[0], L) if self.cache.device.type == "cuda" else 0
        taken = self.cache.take(1)
        if taken is None:  # fewer rows at once need less for their logits
            raise torch.OutOfMemoryError(f"there is no memory for a cache beside passes of {wanted[0]} rows")
        (spare,) = taken
        if moved or any(a < b for a, b in zip(has, wanted, strict=True)):
            self._drop_graphs()
            rows, N, T, L, P = (max(pair) for pair in zip(has, wanted, strict=True))
            self.board = Board(rows, N, T, L, P, spare, self.stop_ids, self.backbone.device)
        assert self.board is not None
        self.board.reset(limit, seed, spare)
        return self.board

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        self.run_before.clear()
        self.pool = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph

    def _pass_bytes(self, rows: int, L: int) -> int:
        """Bytes of the activations of prompts that are read at once, and of the logits of a token step."""
        weight_VD = self.backbone.head.weight_VD
        V, D = weight_VD.shape
        return 16 * (rows * V + max(PREFILL_TOKENS, L) * D * weight_VD.element_size())

    def _read(self, board: Board, prompts: list[Prompt]) -> None:
        """Store the keys and values of prompts, all but the last token of each."""
        prompts = sorted((prompt for prompt in prompts if prompt.stored), key=lambda prompt: prompt.stored)
        while prompts:
            count = 1
            while count < min(len(prompts), board.room[4]) and (count + 1) * prompts[count].stored <= PREFILL_TOKENS:
                count += 1
            self._read_batch(board, prompts[:count])
            prompts = prompts[count:]

    def _read_batch(self, board: Board, prompts: list[Prompt]) -> None:
        P, L = min(bucket(len(prompts)), board.room[4]), -(-prompts[-1].stored // kernels.BLOCK) * kernels.BLOCK
        ids = [prompt.tokens[:-1] + [0] * (L - prompt.stored) for prompt in prompts]
        table = [[block.unit for block in prompt.blocks] for prompt in prompts]
        table = [units + [0] * (L // kernels.BLOCK - len(units)) for units in table]
        board.stored_P.zero_()
        board.stored_P[: len(prompts)] = self._there([[prompt.stored for prompt in prompts]])[0]
        board.ids_PL[: len(prompts), :L] = self._there(ids)
        board.table_PM[: len(prompts), : L // kernels.BLOCK] = self._there(table)
        key = ("prefill", P, L)
        if P * L > CAPTURED_TOKENS or (key not in self.graphs and key not in self.run_before):
            self.run_before.add(key)  # a shape that occurs once is not worth a graph
            self._prefill(board, P, L)
            return
        if key not in self.graphs:
            self.graphs[key] = self._captured(lambda: self._prefill(board, P, L))
        self.graphs[key].replay()

    def _prefill(self, board: Board, P: int, L: int) -> None:
        assert self.cache is not None
        position_PL = torch.arange(L, device=self.backbone.device).expand(P, L)
        plan = PagedPrefill(self.cache, board.table_PM[:P], board.stored_P[:P])
        self.backbone.hidden(board.ids_PL[:P, :L], position_PL, plan)

    def _step_graph(self, board: Board, B: int, params: SamplingParams) -> torch.cuda.CUDAGraph:
        assert self.cache is not None
        key = ("step", B, params.temperature, params.top_p, params.top_k)
        if key not in self.graphs:
            self._token_step(board, board.idle, B, params)  # loads kernels; with fillers, so it writes spare memory
            self.graphs[key] = self._captured(lambda: self._token_step(board, board.columns, B, params))
        return self.graphs[key]

    def _token_step(self, board: Board, columns: Columns, B: int, params: SamplingParams) -> None:
        assert self.cache is not None
        table_BM, prompt_tokens_B, own_tokens_B = (
            x[:B] for x in (columns.table_BM, columns.prompt_tokens_B, columns.own_tokens_B)
        )
        plan = PagedDecode(self.cache, table_BM, prompt_tokens_B, own_tokens_B)
        hidden_B1D = self.backbone.hidden(columns.token_B[:B, None], columns.position_B[:B, None], plan)
        logits_BV = source_BV = self.backbone.head.logits(hidden_B1D[:, 0])
        if params.top_k or params.top_p < 1:
            allowed_BV = restrict((logits_BV / (params.temperature or 1.0)).log_softmax(1), params.top_p, params.top_k)
            source_BV = logits_BV.masked_fill(allowed_BV == -torch.inf, -torch.inf)
        kernels.sample_tokens(
            logits_BV, source_BV, columns.completion_B[:B], own_tokens_B, columns.token_B[:B], columns.position_B[:B],
            board.finished_N, board.limit, board.seed, board.tokens_NT, board.logps_NT, board.length_N, board.stop_ids,
            params.temperature,
        )  # fmt: skip

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool, self.backbone.device):
            work()
        return graph
