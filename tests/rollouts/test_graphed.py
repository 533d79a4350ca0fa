"""The decoder for CUDA, without CUDA: its tables, and the whole of it with steps that run instead of being replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hacrl.decoder import Backbone
from hacrl.decoder.attention import Decode, Prefill, Rule, SharedCache
from hacrl.rollouts import graphed
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.graphed import Board, GraphDecode, GraphedEngine, bucket
from hacrl.rollouts.native import NativeEngine, Sampled
from tiny_models import EOS, byte_tokenizer, tiny

# NumPy multiplies what the kernels mask.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [11, 12], [20, 21, 22, 23, 24, 25, 26]]


# --- tables --------------------------------------------------------------------------------------------


def test_buckets() -> None:
    sizes = sorted({bucket(n) for n in range(1, 600)})
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]


@given(st.integers(1, 10**6))
def test_a_bucket_holds_its_rows_and_not_twice_as_many(n: int) -> None:
    assert n <= bucket(n) < 2 * n
    assert bucket(bucket(n)) == bucket(n)
    assert bucket(n + 1) >= bucket(n)


def board() -> Board:
    return Board(P=2, L=3, slots=7, T=4, stop_ids=[EOS, 9], device=CPU)


def test_a_board_begins_with_fillers_only() -> None:
    table = board()
    for tensor in (table.slot_B, table.prompt_B, table.token_B, table.position_B, table.length_N, table.finished_N):
        tensor.fill_(3)
    table.step.fill_(2)
    table.checked = [5]
    table.reset()
    assert table.slot_B.tolist() == [6] * 6
    assert not any(bool(t.any()) for t in (table.prompt_B, table.token_B, table.position_B, table.length_N, table.step))
    assert table.finished_N.tolist() == [0] * 6 + [1]
    assert table.checked == [0] * 6
    assert table.stop_ids.tolist() == [EOS, 9]


def test_placed_rows_come_first_and_fillers_up_to_the_bucket() -> None:
    table = board()
    table.reset()
    table.place(*(torch.tensor(column) for column in ([4, 0, 2], [1, 0, 1], [7, 8, 9], [3, 4, 5])), B=4)
    assert table.slot_B.tolist() == [4, 0, 2, 6, 6, 6]
    assert table.prompt_B.tolist() == [1, 0, 1, 0, 0, 0]
    assert table.token_B.tolist() == [7, 8, 9, 0, 0, 0]
    assert table.position_B.tolist() == [3, 4, 5, 0, 0, 0]
    # Fewer go on, in a smaller bucket; what stands behind it is not touched.
    running = torch.tensor([0, 2])
    columns = [column[running] for column in (table.slot_B, table.prompt_B, table.token_B, table.position_B)]
    table.place(*columns, B=2)
    assert table.slot_B.tolist() == [4, 2, 2, 6, 6, 6]
    assert table.position_B.tolist() == [3, 5, 5, 0, 0, 0]
    table.place(*(column[1:2].clone() for column in columns), B=2)
    assert table.slot_B.tolist() == [2, 6, 2, 6, 6, 6]
    assert table.prompt_B.tolist() == [1, 0, 1, 0, 0, 0]
    assert table.token_B.tolist() == [9, 0, 9, 0, 0, 0]
    assert table.position_B.tolist() == [5, 0, 5, 0, 0, 0]


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, window=4), Rule(0.3, softcap=2.0)])
def test_a_step_attends_as_the_decoder_without_graphs(rule: Rule) -> None:
    """Three steps of four rows; the rows stand in other slots than in the plain decoder."""
    torch.manual_seed(0)
    module = torch.nn.Identity()
    length_P, prompt_B, slot_B = torch.tensor([5, 2]), torch.tensor([0, 0, 1, 1]), torch.tensor([3, 0, 4, 2])
    caches = [SharedCache(), SharedCache()]
    key, value, query = (torch.randn(2, heads, 5, 6) for heads in (2, 2, 4))
    for cache in caches:
        cache.reserve(2, 5, 6, 3)
        Prefill(cache).attend(module, query, key, value, rule)
    plain = Decode(caches[0], length_P, 5, prompt_B)
    for t in range(3):
        plain.t = t
        step = GraphDecode(caches[1], slot_B, prompt_B, length_P, torch.tensor([t]))
        new = [torch.randn(4, heads, 1, 6) for heads in (4, 2, 2)]
        output = step.attend(module, *new, rule)
        assert output.shape == (4, 1, 4, 6)
        assert torch.allclose(output, plain.attend(module, *new, rule), atol=1e-5)


# --- the engine ----------------------------------------------------------------------------------------


class Rerun:
    """Stands in for a CUDA graph: replaying does the work once more, into the same memory."""

    def __init__(self, work: Callable[[], Tensor | None]) -> None:
        self.work, self.result = work, work()

    def replay(self) -> None:
        result = self.work()
        if self.result is not None and result is not None:
            self.result.copy_(result)


class RerunEngine(GraphedEngine):
    def _decode(self, *args: Any) -> Sampled:
        sampled = super()._decode(*args)  # views of the board: on a CPU there is nothing to bring over
        columns = (sampled.tokens_NT, sampled.logps_NT, sampled.length_N)
        return Sampled(*(column.clone() for column in columns), sampled.stopped)

    def _captured(self, work: Callable[[], Tensor | None]) -> Any:
        board = self.board
        assert board is not None
        state = {name: x.clone() for name, x in vars(board).items() if isinstance(x, Tensor)}
        graph = Rerun(work)
        for name, x in state.items():  # capturing a graph records the work and does not do it
            vars(board)[name].copy_(x)
        return graph, graph.result


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RerunEngine]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphed, "LOOK_EVERY", 2)
    return lambda model, stop_ids, tokenizer=None, batch_size=512: RerunEngine(
        Backbone(model), tokenizer, stop_ids, batch_size
    )


STOP_IDS = [EOS, *range(50, 75)]


def test_greedy_output_is_that_of_the_decoder_without_graphs(make_engine: Callable[..., RerunEngine]) -> None:
    """Rows finish at different times, so that batches shrink; and once more, when shapes are known."""
    params = SamplingParams(1, 7, temperature=0.0)
    expected = NativeEngine(Backbone(tiny("qwen3")), None, STOP_IDS, 512).sample(PROMPTS, params, seed=0)
    assert len({len(completion.token_ids) for group in expected for completion in group}) > 2
    engine = make_engine(tiny("qwen3"), STOP_IDS)
    for _ in range(2):
        for group, expected_group in zip(engine.sample(PROMPTS, params, seed=0), expected, strict=True):
            for completion, wanted in zip(group, expected_group, strict=True):
                assert completion.token_ids == wanted.token_ids
                assert (completion.ended, completion.finish_reason) == (wanted.ended, wanted.finish_reason)
                assert completion.logps == pytest.approx(wanted.logps, abs=1e-5)
    sizes = {key[1] for key in engine.graphs if key[0] == "step"}
    assert max(sizes) == 4
    assert len(sizes) > 1


def test_what_is_sampled_does_not_depend_on_the_batch(make_engine: Callable[..., RerunEngine]) -> None:
    params = SamplingParams(2, 3, temperature=1.0)
    groups = make_engine(tiny("llama"), STOP_IDS).sample(PROMPTS, params, seed=4)
    apart = make_engine(tiny("llama"), STOP_IDS, batch_size=2).sample(PROMPTS, params, seed=4)
    ids = [[completion.token_ids for completion in group] for group in groups]
    assert ids == [[completion.token_ids for completion in group] for group in apart]
    assert ids[1] != ids[2]  # the same prompt, but other completions


def test_stop_strings_end_rows_where_they_stand(make_engine: Callable[..., RerunEngine]) -> None:
    """Even if the look at them comes later: tokens after the stop string are taken back."""
    tokenizer = byte_tokenizer()
    free = NativeEngine(Backbone(tiny("llama")), tokenizer, [EOS], 512).sample(
        PROMPTS[:2], SamplingParams(1, 6, temperature=0.0), seed=0
    )
    texts = [tokenizer.decode(completion.token_ids) for (completion,) in free]
    stop = texts[0][:2]  # there before the first look, with a token behind it
    params = SamplingParams(1, 6, temperature=0.0, stop=(stop,))
    plain = NativeEngine(Backbone(tiny("llama")), tokenizer, [EOS], 512).sample(PROMPTS[:2], params, seed=0)
    groups = make_engine(tiny("llama"), [EOS], tokenizer).sample(PROMPTS[:2], params, seed=0)
    assert len(plain[0][0].token_ids) == 2
    for (completion,), (expected,) in zip(groups, plain, strict=True):
        assert completion.token_ids == expected.token_ids
        assert (completion.ended, completion.finish_reason) == (expected.ended, expected.finish_reason)
