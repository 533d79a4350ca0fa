"""The attention function that transformers' decoders call instead of their own, and its cache for sampling."""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "hacrl"

Store = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


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


class SharedCache:
    """Cache for P prompts of L tokens and for rows with T tokens of their own. It grows if needed and never shrinks."""

    def __init__(self) -> None:
        self.room: tuple[int, ...] = (0, 0, 0, 0)
        self.prompts: dict[nn.Module, Store] = {}
        self.own: dict[nn.Module, Store] = {}

    def reserve(self, P: int, L: int, rows: int, T: int) -> bool:
        """Make room; returns True if the old memory and its contents were discarded."""
        room = tuple(max(has, needs) for has, needs in zip(self.room, (P, L, rows, T), strict=True))
        if room == self.room:
            return False
        self.room = room
        self.prompts.clear()
        self.own.clear()
        return True

    def store(self, own: bool, module: nn.Module, key_BKSD: Tensor, value_BKSD: Tensor) -> Store:
        """Return the layer's memory, for prompts or for own tokens."""
        stores, (rows, length) = (self.own, self.room[2:]) if own else (self.prompts, self.room[:2])
        if module not in stores:  # zeros, because a kernel may multiply masked values by 0, and 0 * NaN is NaN
            key, value = (x.new_zeros(rows, x.shape[1], length, x.shape[3]) for x in (key_BKSD, value_BKSD))
            stores[module] = key, value
        return stores[module]


@dataclass
class Prefill:
    """Attention plan that reads P prompts, padded on the right, and stores their keys and values."""

    cache: SharedCache

    def attend(self, module: nn.Module, query_PHLD: Tensor, key_PKLD: Tensor, value_PKLD: Tensor, rule: Rule) -> Tensor:
        P, _, L, _ = key_PKLD.shape
        prompt_key, prompt_value = self.cache.store(False, module, key_PKLD, value_PKLD)
        prompt_key[:P, :, :L] = key_PKLD
        prompt_value[:P, :, :L] = value_PKLD
        return causal_attention(query_PHLD, key_PKLD, value_PKLD, rule).transpose(1, 2)


@dataclass
class Decode:
    """Attention plan for the next token of each of B rows, sorted by prompt.

    Each prompt is read once for all its rows: queries are arranged in a grid of P prompts with C cells each, and one
    product multiplies a prompt's keys with all its cells.
    """

    cache: SharedCache
    length_P: Tensor
    """Number of tokens of each prompt."""
    L: int
    """Number of tokens of the longest prompt."""
    prompt_B: Tensor
    """Index of the prompt that each row continues."""
    t: int = 0
    """Number of own tokens that each row has before the new one."""

    def __post_init__(self) -> None:
        self.arrange()
        beyond_PL = torch.arange(self.L, device=self.length_P.device) >= self.length_P[:, None]
        self.beyond_PL = beyond_PL if bool(beyond_PL.any()) else None

    def arrange(self) -> None:
        """Assign each row to its cell of the grid."""
        P = len(self.length_P)
        count_P = torch.bincount(self.prompt_B, minlength=P)
        self.C = int(count_P.max())
        first_P = count_P.cumsum(0) - count_P
        place_B = torch.arange(len(self.prompt_B), device=count_P.device) - first_P[self.prompt_B]
        self.cell_B = self.prompt_B * self.C + place_B
        self.full = len(self.prompt_B) == P * self.C

    def keep(self, rows_B: Tensor) -> None:
        """Continue with these rows only; the others are finished."""
        for part in chain.from_iterable(self.cache.own.values()):
            part[: len(rows_B), :, : self.t] = part[rows_B, :, : self.t]
        self.prompt_B = self.prompt_B[rows_B]
        self.arrange()

    def attend(self, module: nn.Module, query_BH1D: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, rule: Rule) -> Tensor:
        B, H, _, D = query_BH1D.shape
        K, P = key_BK1D.shape[1], len(self.length_P)
        rep = H // K
        own = self.cache.store(True, module, key_BK1D, value_BK1D)
        for part, new in zip(own, (key_BK1D, value_BK1D), strict=True):
            part[:B, :, self.t] = new[:, :, 0]
        first = 0 if rule.window is None else max(self.t + 1 - rule.window, 0)
        own_key, own_value = (x.flatten(0, 1)[: B * K, first : self.t + 1] for x in own)
        prompt_key, prompt_value = (x[:P, :, : self.L].flatten(0, 1) for x in self.cache.prompts[module])

        query_BKrD = (query_BH1D * rule.scale).reshape(B, K, rep, D)
        prompt_scores = self._rows(torch.bmm(self._grid(query_BKrD), prompt_key.transpose(1, 2)), K, rep)
        own_scores = torch.bmm(query_BKrD.flatten(0, 1), own_key.transpose(1, 2)).view(B, K, rep, -1)
        prompt_scores, own_scores = (soft_capped(x, rule.softcap) for x in (prompt_scores, own_scores))
        if (unseen := self._unseen(rule)) is not None:
            prompt_scores = prompt_scores.masked_fill(unseen[:, None, None], -torch.inf)
        weights = torch.cat([prompt_scores, own_scores], dim=3).float().softmax(3).to(value_BK1D.dtype)
        prompt_weights, own_weights = weights[..., : self.L], weights[..., self.L :]
        output = self._rows(torch.bmm(self._grid(prompt_weights), prompt_value), K, rep)
        output = output + torch.bmm(own_weights.flatten(0, 1), own_value).view(output.shape)
        return output.reshape(B, 1, H, -1)

    def _unseen(self, rule: Rule) -> Tensor | None:
        """Mask of prompt positions that each row does not see, padding or outside the window; None if it sees all."""
        unseen_PL = self.beyond_PL
        if rule.window is not None and self.L + self.t >= rule.window:
            position_P1 = (self.length_P + self.t)[:, None]
            far_PL = position_P1 - torch.arange(self.L, device=self.length_P.device) >= rule.window
            unseen_PL = far_PL if unseen_PL is None else unseen_PL | far_PL
        return None if unseen_PL is None else unseen_PL[self.prompt_B]

    def _grid(self, x_BKrX: Tensor) -> Tensor:
        """Arrange rows (B, K, r, X) as a grid (P * K, C * r, X)."""
        P, (_, K, rep, X) = len(self.length_P), x_BKrX.shape
        if not self.full:
            x_BKrX = x_BKrX.new_zeros(P * self.C, K, rep, X).index_copy_(0, self.cell_B, x_BKrX)
        return x_BKrX.view(P, self.C, K, rep, X).transpose(1, 2).reshape(P * K, self.C * rep, X)

    def _rows(self, x: Tensor, K: int, rep: int) -> Tensor:
        """Arrange a grid (P * K, C * r, X) as rows (B, K, r, X)."""
        P, X = len(self.length_P), x.shape[2]
        x = x.view(P, K, self.C, rep, X).transpose(1, 2).reshape(P * self.C, K, rep, X)
        return x if self.full else x.index_select(0, self.cell_B)
