"""A cache in blocks for sampling on CUDA, and the attention plans that use it.

A block holds the keys and values of a few tokens for all layers. Memory is taken slab by slab while rows need it, so a
batch of short answers takes little and a batch of long ones takes what there is.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hacrl.decoder import paged_kernels as kernels
from hacrl.decoder.attention import Rule, causal_attention
from hacrl.decoder.backbone import Backbone
from hacrl.decoder.paged_kernels import UNIT

SLAB = 1 << 28
"""Bytes of memory that are taken at a time."""


@dataclass(frozen=True)
class Block:
    """Memory for the keys and values of `kernels.BLOCK` tokens in all layers."""

    memory: Tensor
    unit: int
    """Its distance from the cache's anchor, in units of UNIT bytes."""


@dataclass
class Probe:
    """Attention plan that notes the shape of each layer's keys."""

    shapes: dict[nn.Module, tuple[int, int]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def attend(self, module: nn.Module, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
        self.shapes[module], self.dtype = (key_BKSD.shape[1], key_BKSD.shape[3]), key_BKSD.dtype
        return causal_attention(query_BHSD, key_BKSD, value_BKSD, rule).transpose(1, 2)


class BlockCache:
    def __init__(self, backbone: Backbone, most_bytes: int | None = None) -> None:
        """Learn the layers' shapes from one token. `most_bytes` bounds the memory; None: what the GPU has free."""
        self.device, self.most_bytes = backbone.device, most_bytes
        probe, zero_11 = Probe(), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            backbone.hidden(zero_11, zero_11, probe)
        self.dtype, self.elements = probe.dtype, 0
        self.places: dict[nn.Module, tuple[int, int]] = {}
        """Where each layer's keys and values are in a block, in elements."""
        for module, (K, D) in probe.shapes.items():
            self.places[module] = self.elements, self.elements + K * kernels.BLOCK * D
            self.elements += 2 * K * kernels.BLOCK * D
        self.block_bytes = self.elements * self.dtype.itemsize
        self.anchor = torch.empty(UNIT, dtype=self.dtype, device=self.device)
        self.margin = 0
        """Bytes of free memory that are left to others."""
        self.slabs: list[Tensor] = []
        self.free: list[Block] = []

    def room(self) -> int:
        """How many more blocks can be taken now."""
        most = 1 << 62
        if self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            most = torch.cuda.mem_get_info(self.device)[0] + unused - self.margin
        if self.most_bytes is not None:
            most = min(most, self.most_bytes - sum(slab.nbytes for slab in self.slabs))
        return len(self.free) + max(most, 0) // self.block_bytes

    def take(self, count: int) -> list[Block] | None:
        """Take blocks; None, and none taken, if there is not enough memory."""
        while len(self.free) < count:
            more = min(max(SLAB // self.block_bytes, 1), self.room() - len(self.free))
            if more <= 0:
                return None
            try:
                slab = torch.empty(more, self.elements, dtype=self.dtype, device=self.device)
            except torch.OutOfMemoryError:
                return None
            self.slabs.append(slab)
            self.free += [Block(slab[i], self._unit(slab[i])) for i in reversed(range(more))]
        return [self.free.pop() for _ in range(count)]

    def give(self, blocks: list[Block]) -> None:
        self.free += blocks

    def release(self) -> None:
        """Give all memory back. CUDA graphs stay valid: they find blocks by the tables that they are given."""
        self.slabs.clear()
        self.free.clear()

    def _unit(self, memory: Tensor) -> int:
        return (memory.data_ptr() - self.anchor.data_ptr()) // UNIT


@dataclass
class PagedPrefill:
    """Attention plan that reads P prompts, padded on the right, and stores their first `length_P` tokens in blocks."""

    cache: BlockCache
    table_PM: Tensor
    length_P: Tensor

    def attend(self, module: nn.Module, query_PHLD: Tensor, key_PKLD: Tensor, value_PKLD: Tensor, rule: Rule) -> Tensor:
        places = self.cache.places[module]
        kernels.store_prompts(key_PKLD, value_PKLD, self.cache.anchor, self.table_PM, places, self.length_P)
        return causal_attention(query_PHLD, key_PKLD, value_PKLD, rule).transpose(1, 2)


@dataclass
class PagedDecode:
    """Attention plan of a token step. Everything that changes from step to step is in tensors."""

    cache: BlockCache
    table_BM: Tensor
    prompt_tokens_B: Tensor
    own_tokens_B: Tensor

    def attend(self, module: nn.Module, query_BH1D: Tensor, key_BK1D: Tensor, value_BK1D: Tensor, rule: Rule) -> Tensor:
        output_BHD = kernels.attention(
            query_BH1D[:, :, 0], key_BK1D[:, :, 0], value_BK1D[:, :, 0], self.cache.anchor, self.table_BM,
            self.cache.places[module], self.prompt_tokens_B, self.own_tokens_B, rule.scale, rule.softcap, rule.window,
        )  # fmt: skip
        return output_BHD[:, None]
