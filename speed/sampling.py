"""Sampling, everything included: our engines, `generate` and vLLM side by side, each in a process of its own.

    python speed/sampling.py smollm2 --prompts 32 --engines graphed paged generate          # on a GPU, equal lengths
    python speed/sampling.py qwen3-1.7b --prompts 64 --prompt-tokens 128 --mean 720 --tokens 4096 \\
        --engines graphed paged vllm                                                        # lengths differ
    python speed/sampling.py qwen3-1.7b --mean 720 --tokens 4096 --cache-gib 10 --engines paged vllm
    python speed/sampling.py MODEL_DIR --prompts 4 --tokens 48 --engines native generate vllm         # on a CPU
    python speed/sampling.py smollm2 --prompts 8 --tokens 256 --mean 48 --engines native vllm         # on a CPU

A shape has random weights and a word-level tokenizer. Without `--mean` all completions have exactly `--tokens` tokens;
with it lengths are geometric, cut off at `--tokens`. All engines get the same prompts, new ones in every repeat, and
rates count the tokens that were sampled. Each engine is run `--rounds` times, in turns. The engines are

    native    ours on a CPU             graphed, paged    ours on a GPU, without and with a cache in blocks
    generate  transformers' own         static            the same with a static cache, compiled
    vllm      by `--vllm-python`, on a CPU `make .venv-vllm/.installed`; options of vllm.LLM by `--vllm-option`

On a busy CPU compare tokens a second of CPU time, with `--threads 1`: waiting threads take CPU time too.
Start-up is the time from the start of the process to the end of the first sampling, less the time of a later one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, cpu_seconds, peak_rss_gib, render, restart_with_environment
from prompts import prompts_of_cycle, word_problems
from shapes import SHAPES, random_prompts

MEMORY_RATE, MATRIX_RATE = 4.3e12, 790e12
"""Measured on an H200: bytes a second of a copy, bfloat16 operations a second of a matrix product."""
ENGINES = ("native", "graphed", "paged", "generate", "static", "vllm")
SIZES = ("prompts", "generations", "tokens", "mean", "repeats", "cache_gib", "threads", "malloc")
"""Options that every engine gets."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a shape with random weights ({', '.join(SHAPES)}) or the folder of a model")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["native", "vllm"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48, help="of each prompt, with a shape")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most; without --mean of all")
    parser.add_argument("--mean", type=float, help="mean length of completions, if none is cut off")
    parser.add_argument("--cache-gib", type=float, help="memory of the cache of paged and vllm")
    parser.add_argument(
        "--repeats", type=int, default=3, help="measured repeats in each process, after one that is not"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine is run")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--vllm-option", nargs="*", default=[], metavar="KEY=JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--prompts-file", type=Path, help=argparse.SUPPRESS)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)
    if options.side:
        print(json.dumps(side(options)))
    else:
        compare(options)


# --- both sides together -------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    from harness import ROOT, machine, print_table, run_side

    with tempfile.TemporaryDirectory(prefix="sampling-") as name:
        folder, file = Path(options.model), Path(name) / "prompts.json"
        count = options.prompts * (options.repeats + 1)
        if options.model in SHAPES:
            folder, mean = Path(name) / options.model, options.mean or 1e9
            run_side([sys.executable, "speed/shapes.py", options.model, folder, "--mean", str(mean)], answers=False)
            prompts: list[Any] = random_prompts(SHAPES[options.model], mean, count, options.prompt_tokens)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder)
            prompts = [render(tokenizer, text) for text in word_problems(count)]
        file.write_text(json.dumps(prompts), encoding="utf-8")
        given = [("prompts-file", file), *((own.replace("_", "-"), getattr(options, own)) for own in SIZES)]
        common = [str(part) for own, value in given if value is not None for part in (f"--{own}", value)]
        results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
        failed: dict[str, str] = {}
        for _ in range(options.rounds):
            for engine in options.engines:
                command = [sys.executable, __file__, folder, "--side", engine, *common]
                if engine == "vllm":
                    command = [options.vllm_python, ROOT / "speed" / "peers" / "vllm_sampling.py", folder, *common]
                    command += ["--option", *options.vllm_option] * bool(options.vllm_option)
                try:
                    results[engine].append(run_side(command))
                except SystemExit as error:
                    failed[engine] = str(error)
                    print(f"{engine} failed:\n{error}", flush=True)
        results = {engine: runs for engine, runs in results.items() if runs}
        if not results:
            sys.exit("No engine could be measured.")
        floor = floor_of(folder, options, results)
    repeats = {engine: [row for run in runs for row in run["repeats"]] for engine, runs in results.items()}
    rates = {engine: rate_of(rows, "seconds") for engine, rows in repeats.items()}
    starts = {engine: statistics.median(run["startup_seconds"] for run in runs) for engine, runs in results.items()}
    ours, rows = next(iter(results)), []
    for engine, own in repeats.items():
        each = [rate_of([row], "seconds") for row in own]
        length = sum(row["tokens"] for row in own) / len(own) / (options.prompts * options.generations)
        rows.append([
            engine, f"{rates[engine]:,.0f}", f"{min(each):,.0f} to {max(each):,.0f}",
            "" if engine == ours else f"{rates[ours] / rates[engine]:.2f}", f"{rate_of(own, 'cpu'):,.0f}",
            f"{length:.0f}", f"{max(run['peak_gib'] for run in results[engine]):.1f}", f"{starts[engine]:.1f}",
        ])  # fmt: skip
    if floor is not None:
        rates["floor"] = floor
        rows.append(["floor: weights and cache once a token", f"{floor:,.0f}", *[""] * 6])
    lengths = f"mean {options.mean:g}, at most {options.tokens}" if options.mean else f"{options.tokens} tokens"
    cache = f", cache {options.cache_gib:g} GiB" if options.cache_gib else ""
    size = f"{options.prompts} x {options.generations}, {lengths}{cache}"
    columns = ["", "tokens/s", "of repeats", f"{ours} / this", "tokens/CPU s", "mean length", "peak GiB", "start-up s"]
    print_table(f"Sampling {Path(options.model).name}, {size}; {machine()}", columns, rows)
    if options.json:
        result: dict[str, Any] = {"model": options.model, "size": size, "ours": ours, "rates": rates, "starts": starts}
        result |= {"machine": machine(), "runs": results, "failed": failed}
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


def rate_of(rows: list[dict[str, float]], clock: str) -> float:
    """Tokens a second of this clock, over all repeats."""
    return sum(row["tokens"] for row in rows) / sum(row[clock] for row in rows)


def floor_of(folder: Path, options: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> float | None:
    """Tokens a second on an H200 if each token step reads the weights and the cache of all rows once."""
    import torch
    from transformers import AutoConfig

    parameters = next((run[0]["parameters"] for run in results.values() if "parameters" in run[0]), None)
    if not torch.cuda.is_available() or parameters is None:
        return None
    config, weights, rows = AutoConfig.from_pretrained(folder), 2 * parameters, options.prompts * options.generations
    entry = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    prompts = options.prompts * options.prompt_tokens
    if not options.mean:
        seconds = (weights + entry * (rows * options.tokens / 2 + prompts)) / MEMORY_RATE
        return rows / max(seconds, 2 * parameters * rows / MATRIX_RATE)
    # With rows of different lengths: while t tokens are sampled, a share of q^t of the rows is still running.
    q, tokens, time_taken = 1 - 1 / options.mean, 0.0, 0.0
    for t in range(options.tokens):
        running = rows * q**t
        read = weights * min(running, 1) + entry * (running * t + min(prompts, running * options.prompt_tokens))
        tokens, time_taken = tokens + running, time_taken + max(
            read / MEMORY_RATE, 2 * parameters * running / MATRIX_RATE
        )  # fmt: skip
    return tokens / time_taken


# --- one of ours, or generate --------------------------------------------------------------------------


def side(options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import torch
    from harness import synchronize
    from transformers import AutoModelForCausalLM

    from hacrl.execution.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    stop_ids = [-1]
    if options.mean:
        ends = model.generation_config.eos_token_id
        stop_ids = ends if isinstance(ends, list) else [ends]
    sample = (generate if options.side in ("generate", "static") else ours)(options, model, stop_ids)
    prompts = json.loads(options.prompts_file.read_text("utf-8"))
    repeats: list[dict[str, float]] = []
    for repeat in range(options.repeats + 1):
        own = prompts_of_cycle(prompts, repeat, options.prompts)
        synchronize()
        begin, used = time.perf_counter(), cpu_seconds()[0]
        lengths = sample(own, repeat)
        synchronize()
        end, used = time.perf_counter(), cpu_seconds()[0] - used
        assert len(lengths) == options.prompts * options.generations
        assert options.mean or set(lengths) == {options.tokens}
        repeats.append({"seconds": end - begin, "cpu": used, "tokens": sum(lengths), "longest": max(lengths)})
        if repeat == 0:
            first = end - start
    startup = first - statistics.median(row["seconds"] for row in repeats[1:])
    peak = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else peak_rss_gib()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"repeats": repeats[1:], "startup_seconds": startup, "peak_gib": peak, "parameters": parameters}


Sample = Callable[[list[list[int]], int], list[int]]
"""A function from prompts and a seed to the lengths of the completions."""


def ours(options: argparse.Namespace, model: Any, stop_ids: list[int]) -> Sample:
    import torch

    from hacrl.decoder import Backbone
    from hacrl.learners.weights import cast_parameters
    from hacrl.rollouts.engine import SamplingParams
    from hacrl.rollouts.native import NativeEngine

    backbone = Backbone(model)
    if model.device.type == "cuda":
        cast_parameters(model, torch.bfloat16)
    common: Any = (backbone, None, stop_ids, 4096)
    engine: Any
    if options.side == "paged":
        from hacrl.rollouts.paged import PagedEngine

        engine = PagedEngine(*common, most_bytes=options.cache_gib and int(options.cache_gib * 2**30))
    elif options.side == "graphed":
        from hacrl.rollouts.graphed import GraphedEngine

        engine = GraphedEngine(*common)
    else:
        engine = NativeEngine(*common)
    params = SamplingParams(options.generations, options.tokens, temperature=1.0)

    def sample(prompts: list[list[int]], seed: int) -> list[int]:
        return [len(completion.token_ids) for group in engine.sample(prompts, params, seed) for completion in group]

    return sample


def generate(options: argparse.Namespace, model: Any, stop_ids: list[int]) -> Sample:
    import torch

    if model.device.type == "cuda":
        model.to(torch.bfloat16)
    given: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": options.tokens, "pad_token_id": 0}
    given |= {"eos_token_id": stop_ids} if options.mean else {"min_new_tokens": options.tokens}
    if options.side == "static":
        given["cache_implementation"] = "static"

    def sample(prompts: list[list[int]], seed: int) -> list[int]:
        rows = [prompt for prompt in prompts for _ in range(options.generations)]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        torch.manual_seed(seed)
        with torch.no_grad():
            output = model.generate(input_ids=ids, attention_mask=mask, **given)[:, longest:].tolist()
        ends = set(stop_ids)
        return [next((t + 1 for t, token in enumerate(row) if token in ends), len(row)) for row in output]

    return sample


if __name__ == "__main__":
    main()
