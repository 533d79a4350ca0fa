"""The built-in decoder. It samples from the weights that are trained, without a copy or a sync."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder import Backbone
from hacrl.decoder.attention import Decode, Prefill, SharedCache
from hacrl.decoder.packing import Texts
from hacrl.decoder.plain import pad
from hacrl.decoder.policy import free_bytes
from hacrl.rollouts.engine import (
    LocalEngine,
    SamplingParams,
    choose_tokens,
    length_at_stop,
    require_finite,
    uniform_numbers,
)
from hacrl.rollouts.rollout import Completion, FinishReason

LEAVE_SHARE = 1 / 8
"""Finished rows leave the batch once they are this share of it. Leaving costs a copy of the cache."""
PACK_FROM = 16
"""Tokens of a completion from which on copying the weights into a faster order pays; it takes as long as a few."""


@dataclass
class Batch:
    """P distinct prompts and the N rows that continue them, in the order of the prompts."""

    ids_PL: Tensor
    """Token ids of the prompts, padded on the right. Nothing reads the padding."""
    length_P: Tensor
    prompt_N: Tensor
    row_N: list[int]
    """The number of the requested completion that each row samples."""

    @classmethod
    def of(cls, prompts: Texts, rows: Sequence[int], G: int) -> "Batch":
        """Make a batch of these rows; row i * G + g continues prompt i. A prompt that occurs twice is read once."""
        index = {prompt: p for p, prompt in enumerate(dict.fromkeys(tuple(prompts[row // G]) for row in rows))}
        pairs = sorted((index[tuple(prompts[row // G])], row) for row in rows)
        ids_PL, mask_PL = pad(list(index), 0, torch.device("cpu"), left=False)
        return cls(ids_PL, mask_PL.sum(1), torch.tensor([p for p, _ in pairs]), [row for _, row in pairs])


@dataclass
class Sampled:
    """The completions of a batch, in host memory."""

    tokens_NT: Tensor
    logps_NT: Tensor
    length_N: Tensor
    stopped: set[int]
    """Rows that a stop string ended."""


class NativeEngine(LocalEngine):
    def __init__(
        self, backbone: Backbone, tokenizer: Tokenizer, stop_ids: Sequence[int], batch_size: int, who: str = "Sampling"
    ) -> None:
        super().__init__(tokenizer, stop_ids, batch_size, who)
        self.backbone, self.cache = backbone, SharedCache()

    def release(self) -> None:
        """Give back the memory of the cache until the next sampling."""
        self.cache = SharedCache()

    def _sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        G, size = params.num_generations, self.batch_size
        # Prompts of about the same length share a batch, and a prompt's completions too if they fit.
        rows = [i * G + g for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])) for g in range(G)]
        size = size // G * G or size
        batches = [Batch.of(prompts, rows[start : start + size], G) for start in range(0, len(rows), size)]
        weights = sum(weight.nbytes for weight in self.backbone.model.parameters())
        many = params.max_completion_length >= PACK_FROM and free_bytes(self.backbone.device) > 2 * weights
        with self.backbone.driven(), self.backbone.packed() if many else nullcontext():
            results = [self._decode(batch, params, seed) for batch in batches]
        completions: dict[int, Completion] = {}
        for batch, sampled in zip(batches, results, strict=True):
            columns = (sampled.tokens_NT, sampled.logps_NT, sampled.length_N)
            for n, (tokens, logps, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                ended = tokens[length - 1] in self.stop_ids
                reason: FinishReason = "stop" if ended or n in sampled.stopped else "length"
                completions[batch.row_N[n]] = Completion(tokens[:length], logps[:length], reason, ended)
        return [[completions[i * G + g] for g in range(G)] for i in range(len(prompts))]

    def _decode(self, batch: Batch, params: SamplingParams, seed: int) -> Sampled:
        """Read every distinct prompt once, then decode all rows together; B of the N still run, finished rows leave."""
        N, T, device = len(batch.row_N), params.max_completion_length, self.backbone.device
        ids_PL, length_P, prompt_N = (x.to(device) for x in (batch.ids_PL, batch.length_P, batch.prompt_N))
        self.cache.reserve(len(ids_PL), ids_PL.shape[1], N, T)
        logits_BV = require_finite(self._read(ids_PL, length_P))[prompt_N]
        decode = Decode(self.cache, length_P, ids_PL.shape[1], prompt_N)

        uniform_NT = uniform_numbers(batch.row_N, T, seed).to(device)
        tokens_NT = torch.zeros(N, T, dtype=torch.long, device=device)
        logps_NT = torch.zeros(N, T, device=device)
        length_N = torch.full((N,), T, device=device)
        stop_ids, stopped = torch.tensor(self.stop_ids, device=device), set[int]()
        row_B, finished_B = torch.arange(N, device=device), torch.zeros(N, dtype=torch.bool, device=device)
        counted = 0
        for t in range(T):
            token_B, logp_B = choose_tokens(logits_BV, params, uniform_NT[row_B, t])
            tokens_NT[row_B, t] = token_B
            logps_NT[row_B, t] = logp_B.float()
            end_B = torch.isin(token_B, stop_ids) & ~finished_B
            if params.stop:
                for b in (~finished_B & ~end_B).nonzero().squeeze(1).tolist():
                    row = int(row_B[b])
                    if length_at_stop(self.tokenizer, tokens_NT[row, : t + 1].tolist(), t, params.stop):
                        stopped.add(row)
                        end_B[b] = True
            length_N[row_B[end_B]] = t + 1
            finished_B |= end_B
            finished = int(finished_B.sum())
            self._count(N - len(row_B) + finished - counted)
            counted = N - len(row_B) + finished
            if finished == len(row_B) or t == T - 1:
                break
            if finished >= LEAVE_SHARE * len(row_B):
                kept_B = (~finished_B).nonzero().squeeze(1)
                decode.keep(kept_B)
                row_B, token_B, finished_B = row_B[kept_B], token_B[kept_B], finished_B[kept_B]
            position_B1 = (length_P[decode.prompt_B] + t)[:, None]
            hidden_B1D = self.backbone.hidden(token_B[:, None], position_B1, decode)
            logits_BV = self.backbone.head.logits(hidden_B1D[:, 0])
            decode.t = t + 1
        self._count(N - counted)
        return Sampled(tokens_NT.cpu(), logps_NT.cpu(), length_N.cpu(), stopped)

    def _read(self, ids_PL: Tensor, length_P: Tensor) -> Tensor:
        """Return the logits after each prompt; keys and values stay in the cache."""
        position_PL = torch.arange(ids_PL.shape[1], device=ids_PL.device).expand(ids_PL.shape)
        hidden_PLD = self.backbone.hidden(ids_PL, position_PL, Prefill(self.cache))
        last_P1D = (length_P - 1)[:, None, None].expand(-1, 1, hidden_PLD.shape[2])
        return self.backbone.head.logits(hidden_PLD.gather(1, last_P1D)[:, 0])
