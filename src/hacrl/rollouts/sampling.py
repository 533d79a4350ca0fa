"""From logits to tokens: temperature, top-k, top-p, and stop strings."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hacrl.rollouts.engine import SamplingParams

STOP_MARGIN = 8
"""Tokens that are decoded beyond one for each byte of the stop string, because decoding may change at the cut."""


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


def length_at_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], checked: int, stops: Sequence[str]
) -> int | None:
    """The number of tokens after which the text first contains a stop string; None if it contains none.

    The first `checked` tokens are known to contain none.
    """
    reach = max(len(stop.encode()) for stop in stops) + STOP_MARGIN
    start = max(checked - reach, 0)
    if not any(stop in tokenizer.decode(token_ids[start:]) for stop in stops):
        return None
    for length in range(checked + 1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[max(length - reach, 0) : length])
        if any(stop in text for stop in stops):
            return length
    return None
