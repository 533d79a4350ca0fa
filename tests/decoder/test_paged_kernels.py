"""Kernels for a cache in blocks, in Triton's interpreter, against plain torch."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from gumbel import gumbel_choice
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


# --- sampling ------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The tensors that `sample_tokens` reads and writes, for rows that hold these completions."""

    completions: list[int]
    sampled: list[int]
    """Number of tokens that each row has sampled."""
    seed: int = 2**61 + 5
    limit: int = 9
    stop_ids: tuple[int, ...] = (7, 11)
    finished_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        N = max(self.completions) + 1
        self.completion_B, self.own_tokens_B = torch.tensor(self.completions), torch.tensor(self.sampled)
        self.token_B, self.position_B = torch.full_like(self.completion_B, -1), 10 * (self.completion_B + 1)
        self.finished_N, self.length_N = (torch.zeros(N, dtype=torch.int32) for _ in range(2))
        self.tokens_NT = torch.full((N, self.limit), -1, dtype=torch.int32)
        self.logps_NT = torch.full((N, self.limit), 9.0)

    def sample(self, logits_BV: Tensor, temperature: float = 1.0, source_BV: Tensor | None = None) -> list[int]:
        kernels.sample_tokens(
            logits_BV, logits_BV if source_BV is None else source_BV, self.completion_B, self.own_tokens_B,
            self.token_B, self.position_B, self.finished_N, torch.tensor([self.limit]), torch.tensor([self.seed]),
            self.tokens_NT, self.logps_NT, self.length_N, torch.tensor(self.stop_ids), temperature,
        )  # fmt: skip
        tokens: list[int] = self.token_B.tolist()
        return tokens


@pytest.mark.parametrize("V", [5, 16, 100, 4500, 40_000])
def test_choices_are_the_gumbel_rule_for_any_vocabulary(V: int) -> None:
    """Logits in one part, and in several of which the last ones are empty."""
    logits_BV = 2 * torch.randn(3, V)
    rows = Rows([4, 0, 2], [0, 3, 8], stop_ids=(-1,))
    tokens = rows.sample(logits_BV, temperature=0.8)
    for b, (completion, t) in enumerate(((4, 0), (0, 3), (2, 8))):
        logits = logits_BV[b].double() / 0.8
        assert tokens[b] == gumbel_choice(logits.numpy(), rows.seed + (completion << 20) + t)
        assert rows.tokens_NT[completion, t] == tokens[b]
        assert rows.logps_NT[completion, t].item() == pytest.approx(logits.log_softmax(0)[tokens[b]].item(), abs=1e-5)


def test_greedy_takes_the_first_of_the_largest_also_of_those_in_different_parts() -> None:
    logits_BV = torch.randn(2, 20_000)
    logits_BV[1, [19_000, 9_001, 9_003, 13_000]] = 9.0
    assert Rows([0, 1], [0, 0]).sample(logits_BV, temperature=0.0) == [int(logits_BV[0].argmax()), 9_001]


def test_a_restricted_source_is_drawn_from_and_not_recorded() -> None:
    logits_BV = torch.randn(1, 9000).expand(12, -1)
    allowed = [3, 4800, 8999]
    source_BV = torch.full_like(logits_BV, -torch.inf)
    source_BV[:, allowed] = logits_BV[:, allowed]
    rows = Rows(list(range(12)), [0] * 12)
    tokens = rows.sample(logits_BV, 2.0, source_BV)
    assert set(tokens) <= set(allowed)
    assert len(set(tokens)) > 1
    assert torch.allclose(rows.logps_NT[:, 0], (logits_BV[0] / 2).log_softmax(0)[torch.tensor(tokens)], atol=1e-5)


def test_rows_are_recorded_until_they_are_finished() -> None:
    """Tokens 5, 11 (a stop token), 5 at the limit; and a row that was finished before, which stays as it is."""
    logits_BV = torch.full((4, 20), -5.0)
    for row, token in enumerate((5, 11, 5, 5)):
        logits_BV[row, token] = 5.0
    rows = Rows([3, 1, 0, 2], [2, 0, 8, 4])
    rows.finished_N[2] = 1
    assert rows.sample(logits_BV, 0.0) == [5, 11, 5, -1]
    assert rows.own_tokens_B.tolist() == [3, 1, 9, 4]
    assert rows.position_B.tolist() == [41, 21, 11, 30]
    assert rows.length_N.tolist() == [9, 1, 0, 3]
    assert rows.finished_N.tolist() == [1, 1, 1, 0]
    written = torch.zeros(4, 9, dtype=torch.bool)
    written[3, 2] = written[1, 0] = written[0, 8] = True
    assert torch.equal(rows.tokens_NT != -1, written)
    assert torch.equal(rows.logps_NT != 9.0, written)
