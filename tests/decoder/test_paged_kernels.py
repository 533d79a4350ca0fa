"""Kernels for a cache in blocks, in Triton's interpreter, against plain torch."""

import pytest
import torch
from torch import Tensor, nn

from hacrl.decoder import Backbone
from hacrl.decoder import paged_kernels as kernels
from hacrl.decoder.paged import BlockCache
from hacrl.decoder.paged_kernels import BLOCK
from tiny_models import tiny

# NumPy multiplies what the kernels mask.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def cache_of(K: int, D: int) -> tuple[BlockCache, nn.Module]:
    """A cache whose second layer has K heads of D channels."""
    cache, module = BlockCache(Backbone(tiny("llama"))), nn.Identity()
    cache.places = {module: (64, 64 + K * BLOCK * D)}
    cache.elements = 64 + 2 * K * BLOCK * D
    cache.block_bytes = 4 * cache.elements
    return cache, module


@pytest.mark.parametrize(
    ("H", "K", "D", "window", "softcap"),
    [(6, 2, 24, None, None), (4, 4, 16, None, None), (6, 2, 24, 6, None), (4, 2, 8, 1, None), (6, 3, 20, 40, 3.0)],
)
@pytest.mark.parametrize("busy", [1, 64])
def test_attention_over_blocks_is_softmax_attention(
    H: int, K: int, D: int, window: int | None, softcap: float | None, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with prompts and own tokens of any length, in one part or in several; blocks lie anywhere."""
    monkeypatch.setattr(kernels, "BUSY", busy)
    cache, module = cache_of(K, D)
    prompt_tokens, own_tokens = [0, 5, BLOCK, 2 * BLOCK + 3], [0, BLOCK, BLOCK - 1, 3]
    B, scale, place = 4, 0.3, cache.places[module]
    query, key, value = torch.randn(B, H, D), torch.randn(B, K, D), torch.randn(B, K, D)
    table = torch.full((B, 6), -1)
    blocks = cache.take(40)
    assert blocks is not None
    for block in blocks:
        block.memory.normal_()
    blocks = blocks[::3]
    keys: list[list[Tensor]] = [[], []]
    own_blocks = []
    for b in range(B):
        counts = [-(-prompt_tokens[b] // BLOCK), own_tokens[b] // BLOCK + 1]
        mine = [blocks.pop() for _ in range(sum(counts))]
        table[b, : len(mine)] = torch.tensor([block.unit for block in mine])
        own_blocks.append(mine[counts[0] :])
        for kind, new in enumerate((key, value)):
            halves = []
            for part, n in ((mine[: counts[0]], prompt_tokens[b]), (mine[counts[0] :], own_tokens[b])):
                held = [block.memory[place[kind] :][: K * BLOCK * D].view(K, BLOCK, D) for block in part]
                halves.append(torch.cat([*held, torch.zeros(K, 0, D)], 1)[:, :n].clone())
            keys[kind].append(torch.cat([*halves, new[b][:, None]], 1)[:, -(window or 0) :])
    output = kernels.attention(
        query, key, value, cache.anchor, table, place, torch.tensor(prompt_tokens), torch.tensor(own_tokens),
        scale, softcap, window,
    )  # fmt: skip
    for b in range(B):
        scores = torch.einsum("krd,ksd->krs", query[b].view(K, H // K, D), keys[0][b]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("krs,ksd->krd", scores.softmax(-1), keys[1][b]).reshape(H, D)
        assert torch.allclose(output[b], expected, atol=1e-5)
        last, at = own_blocks[b][own_tokens[b] // BLOCK].memory, own_tokens[b] % BLOCK
        for kind, new in enumerate((key, value)):
            assert torch.equal(last[place[kind] :][: K * BLOCK * D].view(K, BLOCK, D)[:, at], new[b])


def test_blocks_are_the_memory_that_was_taken() -> None:
    cache, _ = cache_of(2, 24)
    blocks = cache.take(3)
    assert blocks is not None
    assert {block.memory.untyped_storage().data_ptr() for block in blocks} == {
        slab.untyped_storage().data_ptr() for slab in cache.slabs
    }
    assert len({block.unit for block in blocks}) == 3
    cache.release()
    cache.most_bytes = 2 * cache.block_bytes
    assert cache.take(3) is None
    assert len(cache.take(2) or []) == 2
    assert cache.room() == 0


def test_prompts_are_stored_up_to_their_length_and_no_further() -> None:
    cache, module = cache_of(2, 24)
    blocks = cache.take(4)
    assert blocks is not None
    for block in blocks:
        block.memory.fill_(7)
    key, value = torch.randn(3, 2, 2 * BLOCK, 24), torch.randn(3, 2, 2 * BLOCK, 24)
    a, b, c, untouched = blocks
    table, lengths = torch.tensor([[a.unit, b.unit], [c.unit, 0], [0, 0]]), torch.tensor([BLOCK + 2, 5, 0])
    kernels.store_prompts(key, value, cache.anchor, table, cache.places[module], lengths)
    assert (untouched.memory == 7).all()
    for block, p, start, n in ((a, 0, 0, BLOCK), (b, 0, BLOCK, 2), (c, 1, 0, 5)):
        for at, new in zip(cache.places[module], (key, value), strict=True):
            held = block.memory[at:][: 2 * BLOCK * 24].view(2, BLOCK, 24)
            assert torch.equal(held[:, :n], new[p, :, start : start + n])
            assert (held[:, n:] == 7).all()
        assert (block.memory[:64] == 7).all()
