"""Packed rows, prompts read once and a chunked head give the numbers of a plain forward pass, and its gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacrl.decoder import Backbone, layers, ragged, scoring
from hacrl.decoder.attention import Rule
from hacrl.decoder.packing import Packed
from hacrl.decoder.plain import completion_logprobs
from hacrl.decoder.scoring import GraphedScorer, Scorer, TokenLogprobs, common_shape, fresh_leaves
from tiny_models import (
    ARCHITECTURES,
    LEAN,
    PAD,
    compute_in_full,
    distance,
    gradients,
    logprobs_one_by_one,
    tiny,
)

TEMPERATURE = 0.7
# Shared prompts, apart from each other too; a prompt of one token; completions of one token; long and short together.
PROMPTS = [
    [5, 6, 7, 8, 9],
    [11, 12],
    [5, 6, 7, 8, 9],
    [11, 12],
    [40],
    [11, 12],
    [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30],
]
COMPLETIONS = [[1, 2, 3], [9], [4] * 14, [8, 7, 6, 5], [33, 34], [9], [5, 6, 7, 8, 9, 10, 11, 12]]

Scores = tuple[Tensor, Tensor, list[Tensor]]


def differentiated(model: Any, scored: TokenLogprobs) -> Scores:
    """Log-probabilities, entropy, and the gradient of a sum of the former with fixed random weights."""
    weight_NT = torch.randn(scored.logp_NT.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scored.logp_NT * weight_NT).sum().backward()
    return scored.logp_NT.detach(), scored.entropy_NT, gradients(model)


def plain(model: Any, prompts: list[list[int]] = PROMPTS, completions: list[list[int]] = COMPLETIONS) -> Scores:
    return differentiated(model, completion_logprobs(model, prompts, completions, TEMPERATURE, PAD))


def packed(scorer: Scorer, prompts: list[list[int]] = PROMPTS, completions: list[list[int]] = COMPLETIONS) -> Scores:
    with scorer.backbone.driven():
        return differentiated(scorer.backbone.model, scorer(prompts, completions, TEMPERATURE))


def assert_equal(scores: Scores, expected: Scores, tolerance: float = 1e-9) -> None:
    assert distance([scores[0]], [expected[0]]) < tolerance
    assert distance([scores[1]], [expected[1]]) < tolerance
    assert distance(scores[2], expected[2]) < tolerance


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_plain_numbers_are_those_of_each_sequence_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on the left and on the right changes nothing."""
    model = tiny(kind, torch.float64)
    compute_in_full(model, monkeypatch)
    with torch.no_grad():
        scored = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURE, PAD)
        for n, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            logp_TV = logprobs_one_by_one(model, prompt, completion, TEMPERATURE)
            T = len(completion)
            expected_T = logp_TV[torch.arange(T), torch.tensor(completion)]
            assert torch.allclose(scored.logp_NT[n, :T], expected_T, atol=1e-9)
            assert torch.allclose(scored.entropy_NT[n, :T], -(logp_TV.exp() * logp_TV).sum(1), atol=1e-9)
            assert scored.mask_NT[n].tolist() == [True] * T + [False] * (scored.mask_NT.shape[1] - T)
            assert not scored.logp_NT[n, T:].any()
            assert not scored.entropy_NT[n, T:].any()


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_scores_and_gradients_are_the_plain_ones(kind: str, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(kind, torch.float64)
    compute_in_full(model, monkeypatch)
    expected = plain(model)
    backbone = Backbone(model, lean=lean)
    leaner = backbone.lean is not None and backbone.lean.forwards.keys() > backbone.lean.single.keys()
    assert leaner == (lean and kind in LEAN)
    # Cohere's rotation is in float32.
    assert_equal(packed(Scorer(backbone)), expected, 1e-7 if kind == "cohere" else 1e-9)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "mistral", "olmo2"])
def test_what_runs_on_a_gpu_gives_the_plain_scores_and_gradients(
    kind: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels in Triton's interpreter, and products that add residuals; with gradient checkpointing, too."""
    model = tiny(kind)
    expected = plain(model)
    monkeypatch.setattr(layers, "by_kernels", lambda x: True)
    backbone = Backbone(model)
    backbone.checkpointing = again
    assert backbone.lean is not None
    usual = [layer for layer in model.base_model.layers if layer in backbone.lean.forwards]
    assert len(usual) == (2 if kind in ("llama", "qwen3") else 0)
    assert_equal(packed(Scorer(backbone)), expected, 2e-4)


def attention_by_rows(
    query_SHD: Tensor, key_FKD: Tensor, value_FKD: Tensor, starts: tuple[Tensor, Tensor], most: tuple[int, int],
    rule: Rule,
) -> Tensor:  # fmt: skip
    """What torch's flash attention computes on CUDA: each sequence alone; its last query sees its last key."""
    outputs, (H, K) = [], (query_SHD.shape[1], key_FKD.shape[1])
    lengths = [tuple(part.diff().tolist()) for part in starts]
    assert (max(lengths[0]), max(lengths[1])) == most
    keys, values = (x.repeat_interleave(H // K, 1).split(lengths[1]) for x in (key_FKD, value_FKD))
    for query, key, value in zip(query_SHD.split(lengths[0]), keys, values, strict=True):
        distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        seen = (distance >= 0) & (distance < (rule.window or len(key)))
        scores = torch.einsum("qhd,khd->hqk", query, key) * rule.scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(2), value))
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_neox"])
def test_sequences_without_padding_give_the_plain_scores_and_gradients(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA in bfloat16, where torch's flash attention takes the place of the function above."""
    model = tiny(kind, torch.float64)
    compute_in_full(model, monkeypatch)
    expected = plain(model)
    monkeypatch.setattr(scoring, "suits", lambda backbone: True)
    monkeypatch.setattr(ragged, "flash_attention", attention_by_rows)
    assert_equal(packed(Scorer(Backbone(model))), expected)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_the_entropy_has_a_gradient_if_asked_for(kind: str, graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of autograd through all logits of each sequence alone; on CUDA such passes are not captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = tiny(kind, torch.float64)
    compute_in_full(model, monkeypatch)
    for n, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logp_TV = logprobs_one_by_one(model, prompt, completion, TEMPERATURE)
        ((n + 1) * -(logp_TV.exp() * logp_TV).sum()).backward()
    expected = gradients(model)
    weight_N1 = torch.arange(1.0, len(PROMPTS) + 1, dtype=torch.float64)[:, None]
    plain_scored = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURE, PAD, entropy_gradient=True)
    (plain_scored.entropy_NT * weight_N1).sum().backward()
    assert distance(gradients(model), expected) < 1e-9
    scorer = (GraphedScorer if graphed else Scorer)(Backbone(model), entropy_gradient=True)
    with scorer.backbone.driven():
        for _ in range(3):
            (scorer(PROMPTS, COMPLETIONS, TEMPERATURE).entropy_NT * weight_N1).sum().backward()
            assert distance(gradients(model), expected) < 1e-9
    assert not Scorer(scorer.backbone)(PROMPTS, COMPLETIONS, TEMPERATURE).entropy_NT.requires_grad


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_layers_that_compute_again_give_the_same_gradients(kind: str) -> None:
    backbone = Backbone(tiny(kind, torch.float64))
    expected = packed(Scorer(backbone))
    backbone.checkpointing = True
    counted = []
    for layer in backbone.model.base_model.modules():
        if type(layer).__name__.endswith("MLP"):
            layer.register_forward_pre_hook(lambda *_: counted.append(1))
    assert_equal(packed(Scorer(backbone)), expected, 1e-12)
    assert len(counted) == 2 * 2  # each of two layers once more in the backward pass
    with torch.no_grad(), backbone.driven():
        Scorer(backbone)(PROMPTS, COMPLETIONS, TEMPERATURE)
    assert len(counted) == 2 * 2 + 2


TOKENS = st.lists(st.integers(0, 96), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(TOKENS, min_size=1, max_size=3).flatmap(
        lambda prompts: st.lists(st.tuples(st.sampled_from(prompts), TOKENS), min_size=1, max_size=6)
    )
)
def test_any_mixture_of_prompts_and_completions(pairs: list[tuple[list[int], list[int]]]) -> None:
    backbone = MIXTURE
    prompts, completions = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    expected = plain(backbone.model, prompts, completions)
    assert_equal(packed(Scorer(backbone), prompts, completions), expected)
    row = Packed.build(prompts, completions, torch.device("cpu"))
    distinct = {tuple(prompt) for prompt in prompts}
    assert len(row.ids_S) == sum(map(len, distinct)) + sum(len(completion) - 1 for completion in completions)
    assert len(row.target_M) == sum(map(len, completions))


MIXTURE = Backbone(tiny("gpt_neox", torch.float64))


# --- larger tables -------------------------------------------------------------------------------------


class PaddedScorer(Scorer):
    def __init__(self, backbone: Backbone, extra: tuple[int, int, int, int, int]) -> None:
        super().__init__(backbone)
        self.extra = extra

    def _score(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        N, R = packed.rows_NR.shape
        sizes = (len(packed.ids_S), len(packed.target_M), N, R, len(packed.again_A))
        S, M, N, R, A = (size + more for size, more in zip(sizes, self.extra, strict=True))
        padded = packed.padded(S, M, N, R, A)
        assert (padded.ids_S.shape, padded.target_M.shape, padded.rows_NR.shape) == ((S,), (M,), (N, R))
        return super()._score(padded, temperature)


@pytest.mark.parametrize("extra", [(0, 0, 0, 1, 0), (5, 0, 0, 1, 0), (0, 7, 3, 1, 0), (11, 13, 2, 17, 19)])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_larger_tables_change_nothing(kind: str, extra: tuple[int, int, int, int, int]) -> None:
    backbone = Backbone(tiny(kind, torch.float64))
    assert_equal(packed(PaddedScorer(backbone, extra)), packed(Scorer(backbone)), 1e-12)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_shapes_of_the_graphed_scorer_hold_every_batch(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A shape that comes for the first time runs without a graph, so this much of it does not need a GPU."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    backbone = Backbone(tiny("qwen3", torch.float64))
    expected = packed(Scorer(backbone), PROMPTS[:count], COMPLETIONS[:count])
    graphed = GraphedScorer(backbone)
    assert_equal(packed(graphed, PROMPTS[:count], COMPLETIONS[:count]), expected, 1e-12)
    assert graphed.warm
    assert not graphed.captured


def test_batches_of_many_shapes_share_few() -> None:
    shapes = set()
    for count in range(1, len(PROMPTS) + 1):
        batch = Packed.build(PROMPTS[:count], COMPLETIONS[:count], torch.device("cpu"))
        S, M, N, R, A = common_shape(batch)
        assert len(batch.ids_S) < S
        assert len(batch.target_M) <= M
        assert len(batch.rows_NR) <= N
        assert batch.rows_NR.shape[1] < R
        assert len(batch.again_A) <= A
        shapes.add((S, M, N, R, A > 0))
    assert len(shapes) < len(PROMPTS)


@pytest.mark.parametrize(
    ("rows", "prompt", "completion"), [(1, 1024, 4096), (3, 1024, 4096), (8, 512, 1024), (4, 512, 256)]
)
def test_long_rollouts_get_few_empty_rows(rows: int, prompt: int, completion: int) -> None:
    """Attention holds every row at full length, so rows that are added for the shape's sake must not be long ones."""
    batch = Packed.build([[1] * prompt] * rows, [[2] * completion] * rows, torch.device("cpu"))
    S, _, N, R, _ = common_shape(batch, 1024)
    held = N * R
    assert held <= max(S, 2 * batch.rows_NR.numel())


def test_fresh_leaves_take_the_gradient_and_leave_no_trace() -> None:
    model = tiny("gemma")  # its head is its embedding
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names["lm_head.weight"] is names["model.embed_tokens.weight"]
    with fresh_leaves(model) as leaves:
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert inside["lm_head.weight"] is inside["model.embed_tokens.weight"]
        assert all(inside[name] is leaves[parameter] for name, parameter in names.items())
        assert all(leaf.data_ptr() == parameter.data_ptr() for parameter, leaf in leaves.items())
        model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
        assert all(leaf.grad is not None for leaf in leaves.values())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in names.items())
    assert all(parameter.grad is None for parameter in names.values())
