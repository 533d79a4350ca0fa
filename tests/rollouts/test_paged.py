"""The decoder with a cache in blocks, without CUDA: steps run in Triton's interpreter instead of being replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hacrl.decoder import Backbone
from hacrl.decoder import paged_kernels as kernels
from hacrl.rollouts import paged
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.paged import PagedEngine
from hacrl.rollouts.rollout import Completion
from hacrl.signs import doing
from tiny_models import EOS, byte_tokenizer, limit_memory, tiny

# NumPy multiplies what the kernels mask.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [11, 12], [20, 21, 22, 23, 24, 25, 26], [30]]
STOP_IDS = [EOS, *range(50, 75)]


class Rerun:
    """Stands in for a CUDA graph: replaying does the work once more, into the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class RerunEngine(PagedEngine):
    def _captured(self, work: Callable[[], None]) -> Any:
        return Rerun(work)


Make = Callable[..., RerunEngine]


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(paged, "LOOK_EVERY", 2)
    monkeypatch.setattr(kernels, "BLOCK", 4)
    monkeypatch.setattr(kernels, "BUSY", 1)
    return lambda model, stop_ids, tokenizer=None, **options: RerunEngine(
        Backbone(model), tokenizer, stop_ids, **{"batch_size": 512, **options}
    )


def assert_same(groups: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for group, expected_group in zip(groups, expected, strict=True):
        for completion, wanted in zip(group, expected_group, strict=True):
            assert completion.token_ids == wanted.token_ids
            assert (completion.ended, completion.finish_reason) == (wanted.ended, wanted.finish_reason)
            assert completion.logps == pytest.approx(wanted.logps, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_greedy_output_is_that_of_the_decoder_without_blocks(kind: str, make_engine: Make) -> None:
    """Rows finish at different times; and once more, when shapes are known and memory was given back."""
    params = SamplingParams(1, 7, temperature=0.0)
    expected = NativeEngine(Backbone(tiny(kind)), None, STOP_IDS, 512).sample(PROMPTS, params, seed=0)
    engine = make_engine(tiny(kind), STOP_IDS)
    for _ in range(2):
        assert_same(engine.sample(PROMPTS, params, seed=0), expected)
        assert engine.cache is not None
        assert not engine.cache.slabs


def test_lengths_differ_in_the_test_above() -> None:
    groups = NativeEngine(Backbone(tiny("qwen3")), None, STOP_IDS, 512).sample(
        PROMPTS, SamplingParams(1, 7, temperature=0.0), seed=0
    )
    assert len({len(completion.token_ids) for (completion,) in groups}) > 2


@pytest.mark.parametrize("batch_size", [1, 4])
def test_what_is_sampled_does_not_depend_on_who_runs_beside(batch_size: int, make_engine: Make) -> None:
    params = SamplingParams(2, 4, temperature=1.0)
    groups = make_engine(tiny("llama"), STOP_IDS).sample(PROMPTS, params, seed=4)
    assert_same(make_engine(tiny("llama"), STOP_IDS, batch_size=batch_size).sample(PROMPTS, params, seed=4), groups)
    ids = [[completion.token_ids for completion in group] for group in groups]
    assert ids[1] != ids[2]  # the same prompt, but other completions
    other = make_engine(tiny("llama"), STOP_IDS).sample(PROMPTS, params, seed=5)
    assert ids != [[completion.token_ids for completion in group] for group in other]


@pytest.mark.parametrize("params", [SamplingParams(2, 6, 0.7, top_k=3), SamplingParams(2, 6, 1.3, top_p=0.5)])
def test_sampled_tokens_lie_inside_top_k_and_top_p(params: SamplingParams, make_engine: Make) -> None:
    """Recorded log-probabilities are those of the plain model, before top-k and top-p."""
    model = tiny("llama")
    groups = make_engine(model, STOP_IDS).sample(PROMPTS, params, seed=1)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            logps = (model(ids).logits[0, len(prompt) - 1 : -1].float() / params.temperature).log_softmax(-1)
            chosen = logps[torch.arange(len(completion.token_ids)), completion.token_ids]
            assert completion.logps == pytest.approx(chosen.tolist(), abs=1e-4)
            rank = (logps > chosen[:, None]).sum(1)
            above = (logps.exp() * (logps > chosen[:, None])).sum(1)
            assert bool((rank < params.top_k).all() if params.top_k else (above < params.top_p + 1e-4).all())


def test_rows_wait_and_pause_while_memory_is_short_and_sample_the_same(make_engine: Make) -> None:
    """Memory for six blocks: some rows wait for others, and some that run are paused when all grow."""
    params, prompts = SamplingParams(2, 9, temperature=1.0), [[5, 6, 7], [9, 10]]
    expected = make_engine(tiny("llama"), [EOS]).sample(prompts, params, seed=2)
    assert max(len(completion.token_ids) for group in expected for completion in group) > 8
    engine = make_engine(tiny("llama"), [EOS])
    engine.sample([[5]], SamplingParams(1, 1, 0.0), seed=0)
    assert engine.cache is not None
    engine.cache.most_bytes = 6 * engine.cache.block_bytes
    assert_same(engine.sample(prompts, params, seed=2), expected)
    assert engine.pauses > 0


def test_one_row_that_does_not_fit_ends_in_a_sentence(make_engine: Make) -> None:
    engine = make_engine(tiny("llama"), [EOS])
    engine.sample([[5]], SamplingParams(1, 1, 0.0), seed=0)
    assert engine.cache is not None
    engine.cache.most_bytes = 2 * engine.cache.block_bytes
    with pytest.raises(torch.OutOfMemoryError, match=r"Sampling: the cache of .* there is no memory for more"):
        engine.sample([[5]], SamplingParams(1, 11, 1.0), seed=2)
    with pytest.raises(torch.OutOfMemoryError, match="a prompt of 13 tokens does not fit"):
        engine.sample([[5] * 13], SamplingParams(1, 5, 1.0), seed=2)


def test_out_of_memory_in_a_pass_makes_batches_smaller(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    """And the cache leaves more memory to others."""
    params, prompts = SamplingParams(2, 3, temperature=1.0), [[5, 6, 7], [9, 10]]
    expected = make_engine(tiny("llama"), [EOS]).sample(prompts, params, seed=2)
    engine = make_engine(model := tiny("llama"), [EOS])
    limit_memory(model, rows=2)
    before = engine.margin
    with doing("sampling") as watched:
        assert_same(engine.sample(prompts, params, seed=2), expected)
    assert (engine.batch_size, engine.margin, watched.done) == (2, 2 * before, 4)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Sampling: out of memory while sampling"
    ]


def test_stop_strings_end_rows_where_they_stand(make_engine: Make) -> None:
    """Even if the look at them comes later: tokens after the stop string are taken back."""
    tokenizer = byte_tokenizer()
    free = NativeEngine(Backbone(tiny("llama")), tokenizer, [EOS], 512).sample(
        PROMPTS[:2], SamplingParams(1, 6, temperature=0.0), seed=0
    )
    texts = [tokenizer.decode(completion.token_ids) for (completion,) in free]
    params = SamplingParams(1, 6, temperature=0.0, stop=(texts[0][:2],))
    plain = NativeEngine(Backbone(tiny("llama")), tokenizer, [EOS], 512).sample(PROMPTS[:2], params, seed=0)
    groups = make_engine(tiny("llama"), [EOS], tokenizer).sample(PROMPTS[:2], params, seed=0)
    assert len(plain[0][0].token_ids) == 2
    assert_same(groups, plain)


def test_weights_that_cannot_be_sampled_from_are_refused(make_engine: Make) -> None:
    from hacrl.errors import TrainingDiverged

    model = tiny("llama")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    engine = make_engine(tiny("llama"), [EOS])
    engine.backbone.model.load_state_dict(model.state_dict())
    with pytest.raises(TrainingDiverged, match="not finite"):
        engine.sample([[5]], SamplingParams(1, 3, 1.0), seed=2)


def test_fillers_change_nothing(make_engine: Make) -> None:
    engine = make_engine(tiny("llama"), STOP_IDS)
    engine.sample(PROMPTS, SamplingParams(1, 4, 0.0), seed=0)
    board = engine.board
    assert board is not None
    idle = board.idle
    assert idle.own_tokens_B.tolist() == [0] * len(idle.own_tokens_B)
    assert not bool(board.tokens_NT[-1].any())
