"""Packs completions for flash attention on CUDA, which takes sequences of different lengths without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hacrl.decoder.attention import Rule
from hacrl.decoder.backbone import Backbone
from hacrl.decoder.packing import Row, Spread, Texts, arrays_to_device

CAPABILITY = 8, 0
"""The oldest kind of GPU that has the kernels."""


def suits(backbone: Backbone) -> bool:
    """Whether torch's flash attention can compute the model's attention where the model is."""
    text, weight = backbone.model.config.get_text_config(), backbone.head.weight_VD
    softcap = getattr(text, "attn_logit_softcapping", None)
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or softcap is not None or len(backbone.head_sizes) != 1:
        return False
    (size,) = backbone.head_sizes
    return size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(weight.device) >= CAPABILITY


@dataclass
class Ragged:
    """What `Packed` is, with other attention: queries of a sequence are its own tokens, and its keys also the prompt's.

    So queries and outputs stay where they are in the row of S tokens, and of F keys only those of prompts are copies.
    Distinct prompts are sequences too.
    """

    shape: tuple[int, int]
    """(N, T): the number of completions, and of tokens in the longest."""
    most: tuple[int, int]
    """The most queries, and the most keys, of a sequence."""
    ids_S: Tensor
    position_S: Tensor
    from_M: Tensor
    target_M: Tensor
    at_M: Tensor
    keys_F: Tensor
    """Index in the row of each key, one sequence after the other."""
    back_S: Tensor
    """Index among the keys of each token's own sequence."""
    again_A: Tensor
    """Indices among the keys of the copies of prompts."""
    again_from_A: Tensor
    """Index in the row of each copy."""
    query_starts: Tensor
    """Where the queries of each sequence begin, and where the last ones end."""
    key_starts: Tensor

    @classmethod
    def build(cls, prompts: Texts, completions: Texts, device: torch.device) -> "Ragged":
        row = Row(prompts, completions)
        some = row.own_N > 0  # a completion of one token has no queries
        prompt_n, first_n, own_n, start_n = (x[some] for x in (row.prompt_N, row.first_N, row.own_N, row.start_N))
        copied = [np.arange(first, first + length) for first, length in zip(first_n, prompt_n, strict=True)]
        owned = [np.arange(start, start + length) for start, length in zip(start_n, own_n, strict=True)]
        size = int(row.distinct_P.sum())
        keys_F = np.concatenate([np.arange(size), *(part for pair in zip(copied, owned, strict=True) for part in pair)])
        is_copy_F = (keys_F < size) & (np.arange(len(keys_F)) >= size)
        queries = np.concatenate([row.distinct_P, own_n])
        keys = np.concatenate([row.distinct_P, prompt_n + own_n])
        starts = (np.concatenate([[0], lengths.cumsum()]).astype(np.int32) for lengths in (queries, keys))
        arrays = (
            row.ids_S, row.position_S, row.from_M, row.target_M, row.at_M, keys_F, np.flatnonzero(~is_copy_F),
            np.flatnonzero(is_copy_F), keys_F[is_copy_F], *starts,
        )  # fmt: skip
        return cls(row.shape, (int(queries.max()), int(keys.max())), *arrays_to_device(device, *arrays))

    def attend(self, module: nn.Module, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
        places = self.keys_F, self.back_S, self.again_A, self.again_from_A
        key_FKD, value_FKD = (Spread.apply(x[0].transpose(0, 1), *places) for x in (key_BKSD, value_BKSD))
        starts = self.query_starts, self.key_starts
        return flash_attention(query_BHSD[0].transpose(0, 1), key_FKD, value_FKD, starts, self.most, rule)[None]


def flash_attention(
    query_SHD: Tensor, key_FKD: Tensor, value_FKD: Tensor, starts: tuple[Tensor, Tensor], most: tuple[int, int],
    rule: Rule,
) -> Tensor:  # fmt: skip
    """Causal attention in each sequence; the last query sees the last key."""
    left = None if rule.window is None else rule.window - 1
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query_SHD, key_FKD, value_FKD, *starts, *most, 0.0, True, False,
        scale=rule.scale, window_size_left=left, window_size_right=None if left is None else 0,
    )[0]  # fmt: skip
    return output
