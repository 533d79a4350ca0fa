"""The attention function that transformers' decoders call instead of their own."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "hacrl"


@dataclass(frozen=True)
class Rule:
    """Options of an architecture's attention: scale, sliding window and softcap of the scores."""

    scale: float
    window: int | None = None
    """Number of tokens that a token sees, itself included; None: all before it."""
    softcap: float | None = None


class Plan(Protocol):
    """Decides which tokens see each other. Shapes: B rows of S tokens, H heads, K heads of keys and values."""

    def attend(self, module: nn.Module, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention output, of shape (B, S, H, D)."""
        ...


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    plan: Plan | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if plan is None:
        raise RuntimeError(f"{type(module).__name__} does not hand its arguments on to the attention function.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module, query, key, value, Rule(scale, sliding_window, softcap)), None


# No mask function is registered under this name, so transformers builds no mask.
AttentionInterface.register(NAME, attend)


def causal_attention(query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
    """Attention in which each token sees itself and the tokens before it in its row."""
    S = query_BHSD.shape[2]
    if rule.softcap is None and (rule.window is None or rule.window >= S):
        grouped = query_BHSD.shape[1] != key_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            query_BHSD, key_BKSD, value_BKSD, is_causal=True, scale=rule.scale, enable_gqa=grouped
        )
    position_S = torch.arange(S, device=query_BHSD.device)
    distance_SS = position_S[:, None] - position_S[None, :]
    seen_SS = (distance_SS >= 0) & (distance_SS < (S if rule.window is None else rule.window))
    rep = query_BHSD.shape[1] // key_BKSD.shape[1]
    key_BHSD, value_BHSD = key_BKSD.repeat_interleave(rep, dim=1), value_BKSD.repeat_interleave(rep, dim=1)
    scores_BHSS = soft_capped(query_BHSD @ key_BHSD.transpose(2, 3) * rule.scale, rule.softcap)
    scores_BHSS = scores_BHSS.masked_fill(~seen_SS, -torch.inf)
    weights_BHSS = scores_BHSS.to(torch.promote_types(scores_BHSS.dtype, torch.float32)).softmax(-1)
    return weights_BHSS.to(value_BHSD.dtype) @ value_BHSD


def soft_capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
