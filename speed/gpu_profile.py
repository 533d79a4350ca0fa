"""Where the time on a GPU goes: kernels of a token step, and of a learner's pass, for models with random weights.

    python speed/gpu_profile.py qwen3-1.7b                    # both
    python speed/gpu_profile.py qwen3-1.7b --parts step       # a token step only

A token step is the mean of 40, for 8, 64 and 512 rows. A pass scores completions of geometric lengths and computes
gradients; `host` is the time until the last kernel was launched, so a pass whose host and wall time are about equal
waits for the host.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES, random_prompts
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from hacrl.decoder import Backbone
from hacrl.decoder.scoring import Scorer
from hacrl.learners.weights import MasterWeights
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.paged import PagedEngine

MATRIX_RATE = 790e12
"""bfloat16 operations a second of a matrix product, measured on an H200."""
STEPS = 40


def show(what: str, work: Callable[[], Any], count: int, most: int) -> None:
    """Print the kernels that take the most GPU time, in ms for each of `count` steps."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total, event.count, event.key) for event in profiled.key_averages()]
    rows = sorted((row for row in rows if row[0]), reverse=True)
    busy, launched = sum(row[0] for row in rows), sum(row[1] for row in rows)
    print(f"{what}: GPU busy {busy / count / 1e3:.2f} ms, {launched / count:.0f} kernels")
    for microseconds, times, name in rows[:most]:
        print(f"  {microseconds / count / 1e3:9.3f} ms {times / count:7.1f} x  {name[:90]}")


def token_steps(backbone: Backbone, shape: dict[str, Any], most: int) -> None:
    engine = PagedEngine(backbone, None, [-1], 4096)  # type: ignore[arg-type]
    for prompts, length in ((1, 3000), (8, 1500), (64, 700)):
        given = random_prompts(shape, 1e9, prompts, length)
        engine.sample(given, SamplingParams(8, STEPS, temperature=1.0), 0)  # captures graphs
        sample = lambda: engine.sample(given, SamplingParams(8, STEPS, temperature=1.0), 1)  # noqa: B023, E731
        show(
            f"{prompts * 8} rows, prompts of {length} tokens, a step with its share of reading prompts",
            sample,
            STEPS,
            most,
        )


def passes(backbone: Backbone, shape: dict[str, Any], most: int) -> None:
    rng, scorer = random.Random(0), Scorer(backbone)
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    for total in (16_384, 5_000):
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(int(rng.expovariate(1 / 720)) + 1, 4096))
        completions = [random_prompts(shape, 1e9, 1, length)[0] for length in lengths]
        prompts = [random_prompts(shape, 1e9, 1 + row // 8, 128)[-1] for row in range(len(lengths))]

        def learn() -> None:
            scorer(prompts, completions, 1.0).logp_NT.sum().backward()  # noqa: B023

        def score() -> None:
            with torch.no_grad():
                scorer(prompts, completions, 1.0)  # noqa: B023

        for what, work, operations in (("scoring", score, 2), ("gradients", learn, 6)):
            for _ in range(2):
                work()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            wall = time.perf_counter() - begin
            share = operations * parameters * sum(lengths) / wall / MATRIX_RATE
            print(f"{what}, {len(lengths)} rows, {sum(lengths)} tokens: {wall * 1e3:.0f} ms, host {host * 1e3:.0f} ms, "
                  f"{share:.0%} of the rate")  # fmt: skip
        show("gradients", learn, 1, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", choices=("step", "pass"), default=["step", "pass"])
    parser.add_argument("--most", type=int, default=16, help="kernels to list")
    options = parser.parse_args()
    shape = dict(SHAPES[options.shape])
    config = AutoConfig.for_model(shape["model_type"], **{k: v for k, v in shape.items() if k != "model_type"})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    backbone = Backbone(model)
    weights = MasterWeights(model, torch.bfloat16)
    with backbone.driven():
        if "step" in options.parts:
            token_steps(backbone, shape, options.most)
        if "pass" in options.parts:
            weights.zero_grad()
            passes(backbone, shape, options.most)


if __name__ == "__main__":
    main()
