"""What all engines share: their interface, and the way from logits to tokens and to completions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.decoder.packing import Texts
from hacrl.errors import TrainingDiverged, warn
from hacrl.rollouts.rollout import Completion
from hacrl.signs import advance

STOP_MARGIN = 8
"""Tokens that are decoded beyond one for each byte of the stop string, because decoding may change at the cut."""


@dataclass(frozen=True)
class SamplingParams:
    num_generations: int
    max_completion_length: int
    temperature: float
    """Sampling temperature; 0 means greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    def sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        """Return `num_generations` completions for each prompt. The same seed gives the same completions."""
        ...

    def release(self) -> None:
        """Give back memory that only makes the next sampling faster."""
        ...


class OneDoesNotFit(torch.OutOfMemoryError):
    """Raised if memory does not hold a single completion."""


class LocalEngine(ABC):
    """What the engines of this process have in common: when memory runs out, they sample fewer completions at once."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], batch_size: int, who: str = "Sampling") -> None:
        """`batch_size` bounds how many completions are sampled at once. `who` begins a message about memory."""
        self.tokenizer, self.stop_ids, self.batch_size, self.who = tokenizer, list(stop_ids), batch_size, who
        self._counted = 0

    @torch.no_grad()
    def sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]:
        while True:
            self._counted = 0
            try:
                return self._sample(prompts, params, seed)
            except OneDoesNotFit:
                raise
            except torch.OutOfMemoryError as error:
                rows = min(self.batch_size, len(prompts) * params.num_generations)
                if rows == 1:
                    raise OneDoesNotFit(f"{self.who}: a single completion does not fit into memory: {error}") from error
            # Only here the error is gone, and with it the memory that its frames held.
            self.batch_size = rows // 2
            self.forget()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._count(-self._counted)
            warn(
                f"{self.who}: out of memory while sampling; from now on at most {self.batch_size} completions are "
                "sampled at once (sampling_batch_size)."
            )

    @abstractmethod
    def _sample(self, prompts: Texts, params: SamplingParams, seed: int) -> list[list[Completion]]: ...

    def _count(self, completions: int) -> None:
        """Count completions that are finished, for those who watch."""
        self._counted += completions
        advance(completions)

    def release(self) -> None:
        """Give back memory that only makes the next sampling faster."""

    def forget(self) -> None:
        """Give back all memory."""
        self.release()


def require_finite(logits_PV: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits_PV).all()):
        raise TrainingDiverged("its logits are not finite, so nothing can be sampled from it.")
    return logits_PV


def uniform_numbers(rows: Sequence[int], T: int, seed: int) -> Tensor:
    """T random numbers for each completion. They depend on the seed and its row alone, not on its batch."""
    table_NT = torch.rand(max(rows) + 1, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return table_NT[torch.tensor(rows)]


def choose_tokens(logits_BV: Tensor, params: SamplingParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next token of each row, and its log-probability before top-p and top-k.

    `uniform_B` holds a number in [0, 1) for each row. The token is the one where the cumulative distribution passes it.
    """
    if params.temperature == 0:
        token_B = logits_BV.argmax(1)
        return token_B, logits_BV.log_softmax(1).gather(1, token_B[:, None]).squeeze(1)
    logp_BV = (logits_BV / params.temperature).log_softmax(1)
    # In float64, because this sums many small numbers, and no uniform number may reach the total.
    cumulative_BV = restrict(logp_BV, params.top_p, params.top_k).double().exp().cumsum(1)
    threshold_B1 = uniform_B.double()[:, None] * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    return token_B1.squeeze(1), logp_BV.gather(1, token_B1).squeeze(1)


def restrict(logp_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set the log-probability of tokens outside top-k, then of those outside the top-p nucleus, to -inf."""
    if top_k:
        kth_B1 = logp_BV.topk(min(top_k, logp_BV.shape[1]), dim=1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < kth_B1, -torch.inf).log_softmax(1)
    if top_p < 1:
        sorted_BV, order_BV = logp_BV.sort(dim=1, descending=True)
        # The nucleus is the smallest set that reaches top_p: a token is outside if those before it do.
        before_BV = sorted_BV.exp().cumsum(1) - sorted_BV.exp()
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, -torch.inf)
        logp_BV = torch.empty_like(logp_BV).scatter_(1, order_BV, sorted_BV)
    return logp_BV


def length_at_stop(tokenizer: Tokenizer, token_ids: Sequence[int], checked: int, stops: Sequence[str]) -> int | None:
    """The number of tokens after which the text first contains a stop string, or None; `checked` tokens have none."""
    reach = max(len(stop.encode()) for stop in stops) + STOP_MARGIN
    start = max(checked - reach, 0)
    if not any(stop in tokenizer.decode(token_ids[start:]) for stop in stops):
        return None
    for length in range(checked + 1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[max(length - reach, 0) : length])
        if any(stop in text for stop in stops):
            return length
    return None


def cut_off(
    tokenizer: Tokenizer, tokens: list[int], logps: list[float], stop_ids: list[int], stops: Sequence[str]
) -> Completion:
    """Return the completion up to its first end-of-turn token or stop string."""
    length = next((t + 1 for t, token in enumerate(tokens) if token in stop_ids), len(tokens))
    ended = bool(tokens) and tokens[length - 1] in stop_ids
    stop = length_at_stop(tokenizer, tokens[:length], 0, stops) if stops else None
    if stop is not None and not (ended and stop == length):
        return Completion(tokens[:stop], logps[:stop], "stop", False)
    return Completion(tokens[:length], logps[:length], "stop" if ended else "length", ended)
