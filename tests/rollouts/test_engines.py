"""Both decoders that run without a GPU, against `generate`, the plain learner and the model's distribution."""

import functools
import itertools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hacrl.agents.loading import ZOO, zoo_names
from hacrl.decoder import Backbone
from hacrl.decoder.plain import completion_logprobs
from hacrl.errors import TrainingDiverged, UserError
from hacrl.rollouts import native
from hacrl.rollouts.engine import Engine, SamplingParams
from hacrl.rollouts.engines import CUDA_ENGINE, GenerateEngine, cuda_engine
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.rollout import Completion
from hacrl.signs import doing
from hacrl.tasks.arithmetic import ArithmeticTask
from tiny_models import ARCHITECTURES, EOS, PAD, limit_memory, tiny

STOP_IDS = [EOS, *range(50, 60)]
# Many lengths, one prompt three times, one of a single token.
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [*range(20, 31)], [11, 12], [40], [41, 42, 43], [11, 12]]

MakeEngine = Callable[..., Engine]


def native_engine(model: Any, tokenizer: Any, stop_ids: list[int], batch_size: int = 512) -> Engine:
    return NativeEngine(Backbone(model), tokenizer, stop_ids, batch_size)


def generate_engine(model: Any, tokenizer: Any, stop_ids: list[int], batch_size: int = 512) -> Engine:
    return GenerateEngine(model, tokenizer, stop_ids, batch_size)


ENGINES = {"native": native_engine, "generate": generate_engine}
each_engine = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)


def zoo(name: str) -> tuple[Any, Any]:
    folder = ZOO / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def zoo_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    texts = [f"{tokenizer.bos_token}{problem.prompt}" for problem in ArithmeticTask().heldout("test", count)]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


# --- greedy --------------------------------------------------------------------------------------------


def generated(model: Any, prompts: list[list[int]], stop_ids: list[int], length: int) -> list[list[int]]:
    """What `generate` itself gives: each prompt alone, and the same for all of them padded on the left."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=stop_ids, pad_token_id=PAD, bos_token_id=1
    )
    alone = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        alone.append(output[0, len(prompt) :].tolist())
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, generation_config=config)
    for row, expected in zip(output[:, longest:].tolist(), alone, strict=True):
        assert row[: len(expected)] == expected
        assert set(row[len(expected) :]) <= {PAD}
    return alone


@functools.cache
def expected_greedy(kind: str) -> list[list[int]]:
    return generated(tiny(kind), PROMPTS, STOP_IDS, 12)


@each_engine
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_output_is_that_of_generate(kind: str, make: MakeEngine) -> None:
    """In batches of any size."""
    expected = expected_greedy(kind)
    engine = make(tiny(kind), None, STOP_IDS)
    for batch_size in (1, 5, 512) if make is native_engine else (7,):
        engine.batch_size = batch_size
        groups = engine.sample(PROMPTS, SamplingParams(1, 12, 0.0), seed=0)
        assert tokens(groups) == [[ids] for ids in expected]
        for (completion,) in groups:
            ended = completion.token_ids[-1] in STOP_IDS
            assert (completion.ended, completion.finish_reason) == (ended, "stop" if ended else "length")
            assert ended or len(completion.token_ids) == 12


@functools.cache
def expected_zoo_greedy(name: str) -> list[list[int]]:
    model, tokenizer = zoo(name)
    return generated(model, zoo_prompts(tokenizer, 3), [tokenizer.eos_token_id], 30)


@each_engine
@pytest.mark.parametrize("name", zoo_names())
def test_greedy_output_of_the_zoo(name: str, make: MakeEngine) -> None:
    model, tokenizer = zoo(name)
    prompts = zoo_prompts(tokenizer, 3)
    engine = make(model, tokenizer, [tokenizer.eos_token_id], 2)
    assert tokens(engine.sample(prompts, SamplingParams(1, 30, 0.0), seed=0)) == [
        [e] for e in expected_zoo_greedy(name)
    ]


# --- sampled -------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_recorded_logprobs_are_the_plain_learners(kind: str, make: MakeEngine) -> None:
    """After temperature, before top-p and top-k."""
    params = SamplingParams(2, 12, temperature=1.3, top_p=0.9, top_k=40)
    groups = make(tiny(kind), None, STOP_IDS, 19).sample(PROMPTS, params, seed=1)
    flat = [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]
    assert len({len(completion.token_ids) for _, completion in flat}) > 2
    with torch.no_grad():
        learner = completion_logprobs(tiny(kind), [p for p, _ in flat], [c.token_ids for _, c in flat], 1.3, PAD)
    for row, (_, completion) in enumerate(flat):
        assert completion.logps == pytest.approx(learner.logp_NT[row, : len(completion.token_ids)].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_both_engines_sample_the_same(kind: str) -> None:
    params = SamplingParams(3, 12, temperature=1.0, top_p=0.95)
    both = [make(tiny(kind), None, STOP_IDS).sample(PROMPTS, params, seed=2) for make in ENGINES.values()]
    assert tokens(both[0]) == tokens(both[1])


@each_engine
def test_what_is_sampled_does_not_depend_on_the_batch(make: MakeEngine) -> None:
    """Neither on its size, nor on the prompts that come after, nor on those asked for before."""
    params = SamplingParams(3, 12, temperature=1.0)
    whole = tokens(make(tiny("qwen3"), None, STOP_IDS).sample(PROMPTS, params, seed=5))
    assert whole[1] != whole[3]  # the same prompt, but other completions
    engine = make(tiny("qwen3"), None, STOP_IDS)
    for batch_size in (1, 5, 7) if make is native_engine else (5, 7):
        engine.batch_size = batch_size
        assert tokens(engine.sample(PROMPTS, params, seed=5)) == whole
        assert tokens(engine.sample(PROMPTS[:4], params, seed=5)) == whole[:4]
    assert tokens(engine.sample(PROMPTS, params, seed=6)) != whole


@each_engine
def test_out_of_memory_makes_batches_smaller_and_changes_nothing_else(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Down to a part of a prompt's completions, and not below one."""
    params = SamplingParams(3, 8, temperature=1.0)
    expected = tokens(make(tiny("llama"), None, STOP_IDS).sample(PROMPTS, params, seed=4))
    model = tiny("llama")
    engine = make(model, None, STOP_IDS, 16)
    limit_memory(model, rows=2)
    with doing("sampling") as watched:
        assert tokens(engine.sample(PROMPTS, params, seed=4)) == expected
    assert watched.done == 3 * len(PROMPTS)
    said = [record.getMessage() for record in caplog.records]
    assert [re.findall(r"\d+", message) for message in said] == [["8"], ["4"], ["2"]]
    assert tokens(engine.sample(PROMPTS, params, seed=4)) == expected
    assert len(caplog.records) == 3
    limit_memory(model, rows=0)
    with pytest.raises(torch.OutOfMemoryError, match="a single completion does not fit into memory: CUDA"):
        engine.sample(PROMPTS, params, seed=4)


def test_the_engine_on_cuda_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_engine().__name__ == "PagedEngine"
    monkeypatch.setenv(CUDA_ENGINE, "graphed")
    assert cuda_engine().__name__ == "GraphedEngine"
    monkeypatch.setenv(CUDA_ENGINE, "pages")
    with pytest.raises(UserError, match="HACRL_CUDA_ENGINE=pages: unknown engine; choose paged or graphed"):
        cuda_engine()


@pytest.mark.parametrize("share", [0.0, 0.3, 2.0])
def test_finished_rows_leave_without_disturbing_the_others(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they leave at once, some at a time or never; the longest run on alone."""
    params = SamplingParams(4, 20, temperature=1.0)
    expected = tokens(native_engine(tiny("mistral"), None, STOP_IDS, 1).sample(PROMPTS, params, seed=3))
    lengths = Counter(len(completion) for group in expected for completion in group)
    assert len(lengths) > 6
    monkeypatch.setattr(native, "LEAVE_SHARE", share)
    assert tokens(native_engine(tiny("mistral"), None, STOP_IDS).sample(PROMPTS, params, seed=3)) == expected


# --- frequencies ---------------------------------------------------------------------------------------


def assert_frequencies(counts: Counter[int], probs: torch.Tensor) -> None:
    """Chi-squared, 4 standard deviations; tokens expected less than 5 times count as one."""
    total = sum(counts.values())
    expected = {token: total * float(p) for token, p in enumerate(probs) if total * p >= 5}
    rest = total - sum(expected.values())
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    statistic += (total - sum(counts[token] for token in expected) - rest) ** 2 / max(rest, 1.0)
    assert len(expected) >= 3
    freedom = len(expected)
    # Wilson and Hilferty: the cube root of chi-squared is nearly normal.
    assert ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)) < 4


def distribution(model: Any, ids: list[int], params: SamplingParams) -> torch.Tensor:
    """Top-k, then the nucleus, by sorting a list."""
    with torch.no_grad():
        probs = (model(torch.tensor([ids])).logits[0, -1].double() / params.temperature).softmax(0)
    ranked = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    kept = ranked[: params.top_k or None]
    mass = sum(float(probs[token]) for token in kept)
    nucleus: list[int] = []
    while kept and sum(float(probs[token]) for token in nucleus) < params.top_p * mass - 1e-12:
        nucleus.append(kept.pop(0))
    allowed = torch.zeros_like(probs)
    allowed[nucleus] = probs[nucleus]
    return allowed / allowed.sum()


@pytest.mark.parametrize(
    ("make", "top_p", "top_k"),
    [
        (native_engine, 1.0, 0),
        (native_engine, 0.8, 0),
        (native_engine, 1.0, 5),
        (generate_engine, 1.0, 0),
        (generate_engine, 0.7, 9),
    ],
)
def test_first_and_second_tokens_have_the_models_frequencies(make: MakeEngine, top_p: float, top_k: int) -> None:
    model, tokenizer = zoo("llama-weak")
    (prompt,) = zoo_prompts(tokenizer, 1)
    params = SamplingParams(2000, 2, 6.0, top_p, top_k)
    (group,) = make(model, tokenizer, [tokenizer.eos_token_id], 2000).sample([prompt], params, seed=7)
    firsts = Counter(completion.token_ids[0] for completion in group)
    first_probs = distribution(model, prompt, params)
    assert_frequencies(firsts, first_probs)
    assert not set(firsts) - set(first_probs.nonzero().flatten().tolist())
    for first, _ in firsts.most_common(2):
        seconds = Counter(c.token_ids[1] for c in group if c.token_ids[0] == first)
        second_probs = distribution(model, [*prompt, first], params)
        assert_frequencies(seconds, second_probs)
        assert not set(seconds) - set(second_probs.nonzero().flatten().tolist())


# --- stop strings --------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("name", ["llama-plus", "qwen3-bpe"])
def test_a_stop_string_over_several_tokens_ends_a_completion(name: str, make: MakeEngine) -> None:
    """At its last token, and the rest is as if there had been none."""
    model, tokenizer = zoo(name)
    prompts, eos = zoo_prompts(tokenizer, 5), tokenizer.eos_token_id
    engine = make(model, tokenizer, [eos])
    free = [group[0] for group in engine.sample(prompts, SamplingParams(1, 40, 0.0), seed=0)]
    # The end of one token of the first completion and the beginning of the next, neither of which has it alone.
    pieces = [tokenizer.decode([token]) for token in free[0].content_ids]
    across = next(a[-1] + b[0] for a, b in itertools.pairwise(pieces[3:]) if a[-1] + b[0] not in a + "\0" + b)
    stops = (across, "no such text")
    stopped = [group[0] for group in engine.sample(prompts, SamplingParams(1, 40, 0.0, stop=stops), seed=0)]
    ends = []
    for with_stop, without in zip(stopped, free, strict=True):
        texts = [tokenizer.decode(without.token_ids[: t + 1]) for t in range(len(without.token_ids))]
        length = next((t + 1 for t, text in enumerate(texts) if across in text), None)
        ends.append(length)
        assert with_stop.token_ids == without.token_ids[:length]
        assert with_stop.logps == pytest.approx(without.logps[:length], abs=1e-5)
        how = (without.finish_reason, without.ended) if length is None else ("stop", False)
        assert (with_stop.finish_reason, with_stop.ended) == how
    assert ends[0] is not None


@each_engine
def test_a_token_that_ends_the_turn_and_completes_a_stop_string_is_an_end_of_turn(make: MakeEngine) -> None:
    model, tokenizer = zoo("llama-plus")
    prompts = zoo_prompts(tokenizer, 5)
    equals = tokenizer.convert_tokens_to_ids("=")
    engine = make(model, tokenizer, [tokenizer.eos_token_id, equals])
    plain = engine.sample(prompts, SamplingParams(1, 40, 0.0), seed=0)
    for stop in ("=", f"{tokenizer.decode(plain[0][0].token_ids[-2:])}"):
        assert stop.endswith("=")
        assert tokens(engine.sample(prompts, SamplingParams(1, 40, 0.0, stop=(stop,)), seed=0)) == tokens(plain)
        for (completion,) in engine.sample(prompts, SamplingParams(1, 40, 0.0, stop=(stop,)), seed=0):
            assert (completion.finish_reason, completion.ended) == ("stop", True)
            assert completion.token_ids[-1] == equals
            assert equals not in completion.content_ids


# --- memory and models ---------------------------------------------------------------------------------


def test_the_memory_of_the_cache_is_used_again_and_grows_when_it_must() -> None:
    engine = NativeEngine(Backbone(tiny("llama")), None, STOP_IDS, 512)
    params = SamplingParams(2, 10, temperature=1.0)

    def places() -> list[int]:
        stores = [*engine.cache.prompts.values(), *engine.cache.own.values()]
        return [part.data_ptr() for store in stores for part in store]

    few = engine.sample(PROMPTS[:3], params, seed=0)
    first = places()
    assert len(first) == 2 * 2 * 2  # keys and values of prompts and rows in two layers
    assert engine.sample(PROMPTS[:3], params, seed=0) == few
    engine.sample(PROMPTS[:1], SamplingParams(1, 4, temperature=1.0), seed=0)
    assert places() == first
    room = engine.cache.room

    more = engine.sample(PROMPTS, params, seed=0)
    assert engine.cache.room != room
    assert all(has >= had for has, had in zip(engine.cache.room, room, strict=True))
    assert tokens(more[:3]) == tokens(few)
    grown = places()
    engine.sample(PROMPTS[:3], SamplingParams(2, 11, temperature=1.0), seed=0)
    assert places() != grown
    # What an earlier call left in the memory is not seen by a later one.
    assert tokens(engine.sample(PROMPTS[:3], params, seed=0)) == tokens(few)


@each_engine
def test_logits_that_are_not_finite_end_the_run(make: MakeEngine) -> None:
    model = tiny("gpt_neox")
    engine = make(model, None, STOP_IDS)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(TrainingDiverged, match="not finite"):
        engine.sample(PROMPTS, SamplingParams(1, 4, 1.0), seed=0)


@each_engine
@pytest.mark.parametrize(
    "published",
    [
        {"repetition_penalty": 1.5, "max_length": 3, "temperature": 0.6, "top_k": 1},
        {"min_new_tokens": 12, "no_repeat_ngram_size": 2, "bad_words_ids": [[9]], "num_beams": 3},
    ],
    ids=["penalties", "constraints"],
)
def test_what_a_model_was_published_with_does_not_change_its_distribution(
    make: MakeEngine, published: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ZOO / "llama-plus", tmp_path / "model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | published))
    params = SamplingParams(2, 25, temperature=1.0)
    sampled = []
    for source in (folder, ZOO / "llama-plus"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), zoo("llama-plus")[1]
        engine = make(model.eval(), tokenizer, [tokenizer.eos_token_id])
        sampled.append(engine.sample(zoo_prompts(tokenizer, 3), params, seed=0))
    assert sampled[0] == sampled[1]
