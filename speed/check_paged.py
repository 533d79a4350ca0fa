"""Is the engine with a cache in blocks right on this machine? Small models, a minute or two; exit code 1 if it is not.

    python speed/check_paged.py                  # on a GPU
    python speed/check_paged.py --quick          # one model; on a CPU, in Triton's interpreter, also short completions

Compared are tokens and log-probabilities with those of the plain implementation and of the engine without blocks; the
same completions beside others, one after the other, and with so little memory that rows are paused; and frequencies of
tokens with probabilities. In float32 rounding may change a token here and there, which changes the rest of its row, so
a few rows in a hundred may differ.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from harness import machine, print_table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hacrl.decoder import Backbone, paged_kernels
from hacrl.decoder.packing import Packed, Texts
from hacrl.decoder.plain import completion_logprobs
from hacrl.decoder.ragged import suits
from hacrl.decoder.scoring import Scorer
from hacrl.learners.weights import cast_parameters
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.paged import PagedEngine
from hacrl.rollouts.rollout import Completion

ON_GPU = torch.cuda.is_available()
MODELS: dict[str, dict[str, Any]] = {
    "qwen3, heads of 128": {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "llama, 9 heads of 64 on 3": {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3,
                                  "head_dim": 64},
    "gemma2, window and soft cap": {"model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2,
                                    "head_dim": 32, "sliding_window": 40, "attn_logit_softcapping": 20.0},
    "qwen2, heads of 80": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 1,
                           "hidden_size": 320},
}  # fmt: skip
VOCABULARY = 8_000 if ON_GPU else 500
STOPS = [1, *range(100, 100 + VOCABULARY // 100)]
Check = tuple[str, bool, str]
"""What was checked, whether it is right, and a figure."""


class Rerun:
    """Stands in for a CUDA graph where there is none: replaying does the work once more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class InterpretedEngine(PagedEngine):
    def _captured(self, work: Callable[[], None]) -> Any:
        return Rerun(work)


def engine_of(model: Any, stop_ids: list[int], **options: Any) -> PagedEngine:
    kind = PagedEngine if ON_GPU else InterpretedEngine
    return kind(Backbone(model), None, stop_ids, **{"batch_size": 4096, **options})


def model_of(shape: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 288, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    options: dict[str, Any] = {**sizes, "max_position_embeddings": 4096, **shape}
    attention = "eager" if shape["model_type"] == "gemma2" else None  # others leave soft caps out
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to("cuda" if ON_GPU else "cpu")


def prompts_of(quick: bool) -> list[list[int]]:
    """Prompts of lengths around the borders of blocks; one occurs twice."""
    lengths = [1, 33, 40] if quick else [1, 2, 31, 32, 33, 64, 65, 96, 200, 500]
    prompts = [[200 + (7 * i + 13 * n) % (VOCABULARY - 200) for i in range(n)] for n in lengths]
    return [*prompts, prompts[2]]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def equal_rows(groups: list[list[Completion]], others: list[list[Completion]]) -> tuple[bool, str]:
    rows, same = flat(groups), 0
    for left, right in zip(rows, flat(others), strict=True):
        same += left.token_ids == right.token_ids and left.finish_reason == right.finish_reason
    return same >= 0.97 * len(rows), f"{same} of {len(rows)} rows"


def gap(model: Any, prompts: list[list[int]], groups: list[list[Completion]], temperature: float) -> Tensor:
    """Differences of the recorded log-probabilities from the plain implementation's, of all tokens."""
    pairs = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    gaps = []
    with torch.no_grad():
        for start in range(0, len(pairs), 8):
            part = pairs[start : start + 8]
            completions = [c.token_ids for _, c in part]
            plain = completion_logprobs(model, [p for p, _ in part], completions, temperature, 0).logp_NT.float().cpu()
            for row, (_, completion) in enumerate(part):
                gaps.append(plain[row, : len(completion.logps)] - torch.tensor(completion.logps))
    return torch.cat(gaps).abs()


def checks_of(shape: dict[str, Any], dtype: torch.dtype, quick: bool) -> list[Check]:
    model, prompts, found = model_of(shape), prompts_of(quick), list[Check]()
    G, T = (2, 6) if quick else (6, 150)
    engine = engine_of(model, STOPS)
    if dtype == torch.bfloat16:
        cast_parameters(model, dtype)
    params = SamplingParams(G, T, temperature=1.0)
    groups = engine.sample(prompts, params, seed=1)
    lengths = {len(completion.token_ids) for completion in flat(groups)}
    found.append(("rows end at different times", len(lengths) > 1, f"{min(lengths)} to {max(lengths)} tokens"))
    gap_T = gap(model, prompts, groups, 1.0)
    native = NativeEngine(engine.backbone, None, STOPS, 4096)
    if dtype == torch.bfloat16:
        usual_T = gap(model, prompts, native.sample(prompts, params, seed=1), 1.0)
        right = bool(gap_T.mean() < 1.5 * usual_T.mean() + 1e-4 and gap_T.max() < 3 * usual_T.max() + 1e-3)
        figure = f"mean {gap_T.mean():.1e} (without blocks {usual_T.mean():.1e}), largest {gap_T.max():.1e}"
        found.append(("log-probabilities beside the plain ones", right, figure))
        return [*found, *flash_attention_learns(engine.backbone, prompts)]
    found.append(("log-probabilities are the plain ones", bool(gap_T.max() < 2e-3), f"largest {gap_T.max():.1e}"))
    again = engine.sample(prompts, params, seed=1)
    found.append(("the same once more, with kept graphs", *equal_rows(groups, again)))
    few = engine_of(model, STOPS, batch_size=3).sample(prompts, params, seed=1)
    found.append(("the same three at a time", *equal_rows(groups, few)))
    assert engine.cache is not None
    longest = -(-max(map(len, prompts)) // 32) + T // 32 + 1
    tight = engine_of(model, STOPS, most_bytes=(longest + 3) * engine.cache.block_bytes)
    right, figure = equal_rows(groups, tight.sample(prompts, params, seed=1))
    found.append(
        ("the same in little memory", right and (quick or tight.pauses > 0), f"{figure}, {tight.pauses} pauses")
    )
    greedy = SamplingParams(1, T, temperature=0.0)
    found.append(("greedy tokens without blocks", *equal_rows(engine.sample(prompts, greedy, 0),
                                                              native.sample(prompts, greedy, 0))))  # fmt: skip
    found.append(frequencies(engine, model, 100 if quick else 20_000))
    narrow = SamplingParams(G, T, temperature=0.8, top_k=4)
    found.append(top_k_holds(engine, model, prompts, narrow))
    return found


def flash_attention_learns(backbone: Backbone, prompts: list[list[int]]) -> list[Check]:
    """Gradients in bfloat16 by sequences without padding, beside those of float32 with padding."""
    if not suits(backbone):
        return []
    completions = [[300 + (11 * i + 17 * n) % 300 for i in range(1 + 40 * n)] for n in range(len(prompts))]

    def gradient(scorer: Any) -> Tensor:
        backbone.model.zero_grad()
        with backbone.driven():
            scorer(prompts, completions, 1.0).logp_NT.sum().backward()
        return torch.cat([parameter.grad.flatten().float() for parameter in backbone.model.parameters()])

    unpadded, padded = gradient(Scorer(backbone)), gradient(PaddedScorer(backbone))
    cast_parameters(backbone.model, torch.float32)
    exact = gradient(PaddedScorer(backbone))
    gaps = [float((own - exact).norm() / exact.norm()) for own in (unpadded, padded)]
    return [("gradients by flash attention", gaps[0] < 1.2 * gaps[1] + 1e-3, f"{gaps[0]:.1e} (padded {gaps[1]:.1e})")]


class PaddedScorer(Scorer):
    def _pack(self, prompts: Texts, completions: Texts) -> Packed:
        return Packed.build(prompts, completions, self.backbone.device)


def frequencies(engine: PagedEngine, model: Any, count: int) -> Check:
    """Frequencies of the first token, in 16 groups of tokens of about the same size, and their chi-square."""
    prompt = [300, 301, 302]
    groups = engine.sample([prompt], SamplingParams(count, 1, temperature=0.7), seed=5)
    device = next(model.parameters()).device
    with torch.no_grad():
        p_V = (model(torch.tensor([prompt], device=device)).logits[0, -1].float() / 0.7).softmax(0).cpu()
    bin_V = (p_V.cumsum(0) * 16).long().clamp(max=15)
    expected = torch.zeros(16).index_add_(0, bin_V, p_V) * count
    seen = torch.bincount(bin_V[[completion.token_ids[0] for completion in groups[0]]], minlength=16)
    chi = float(((seen - expected) ** 2 / expected).sum())
    return "frequencies of tokens", chi < 45, f"chi-square {chi:.0f} of 15"  # beyond 45: 1 in 10,000


def top_k_holds(engine: PagedEngine, model: Any, prompts: list[list[int]], params: SamplingParams) -> Check:
    outside = total = 0
    device = next(model.parameters()).device
    for prompt, group in zip(prompts, engine.sample(prompts, params, seed=3), strict=True):
        ids = torch.tensor([prompt + group[0].token_ids], device=device)
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(prompt) - 1 : -1].float()
        own_T = logits_TV.gather(1, ids[0, len(prompt) :, None])
        outside += int(((logits_TV > own_T + 1e-3).sum(1) >= params.top_k).sum())
        total += len(own_T)
    return "tokens are among the top k", outside == 0, f"{outside} of {total} outside"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model; on a CPU also fewer and shorter completions")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = list(MODELS.items())[: 1 if options.quick else None]
    if not ON_GPU:
        torch.cuda.graph_pool_handle = lambda: None
        paged_kernels.BUSY = 1  # no rows in several parts, which would take the interpreter minutes
    rows = []
    for name, shape in models:
        for dtype in (torch.float32, torch.bfloat16)[: 2 if ON_GPU else 1]:
            start = time.perf_counter()
            for what, right, figure in checks_of(shape, dtype, options.quick and not ON_GPU):
                rows.append([name, str(dtype)[6:], what, "ok" if right else "WRONG", figure])
            rows[-1][-1] += f" ({time.perf_counter() - start:.0f} s)"
    print_table(f"The engine with a cache in blocks; {machine()}", ["model", "dtype", "check", "", "figure"], rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "checks": rows}) + "\n", encoding="utf-8")
    wrong = sum(row[3] != "ok" for row in rows)
    if wrong:
        sys.exit(f"{wrong} of {len(rows)} checks are wrong.")


if __name__ == "__main__":
    main()
