"""Sampling, everything included: our engines, `generate` and vLLM side by side, each in a process of its own.

    python speed/sampling.py smollm2 --engines graphed paged generate                       # on a GPU, equal lengths
    python speed/sampling.py qwen3-1.7b --work 64x8x4096~720 --engines paged vllm           # on a GPU, lengths differ
    python speed/sampling.py qwen3-1.7b --work 64x8x4096~720 --cache-gib 10 --engines paged vllm
    python speed/sampling.py MODEL_DIR --work 4x8x48 --engines native generate vllm         # on a CPU
    python speed/sampling.py smollm2 --work 8x8x256~48 --engines native vllm                # on a CPU

What is sampled is written PROMPTSxANSWERSxTOKENS~MEAN. Without ~MEAN all answers have this number of tokens; with it
lengths are geometric, cut off at TOKENS, because one token in MEAN ends an answer: a shape has random weights, so all
tokens are about equally likely. All engines get the same prompts, new ones in every repeat, and rates count the tokens
that were sampled. An engine does all works in one process, and is run `--rounds` times. The engines are

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
from prompts import Work, prompts_of_cycle, word_problems
from shapes import SHAPES, random_prompts

MEMORY_RATE, MATRIX_RATE = 4.3e12, 790e12
"""Measured on an H200: bytes a second of a copy, bfloat16 operations a second of a matrix product."""
ENGINES = ("native", "graphed", "paged", "generate", "static", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a shape with random weights ({', '.join(SHAPES)}) or the folder of a model")
    parser.add_argument("--work", nargs="+", type=Work.parse, default=[Work(32, 8, 128)], metavar="WORK")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["native", "vllm"])
    parser.add_argument("--prompt-tokens", type=int, default=48, help="of each prompt, with a shape")
    parser.add_argument("--cache-gib", type=float, help="memory of the cache of paged and vllm")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats of each work in a process")
    parser.add_argument("--warmup", type=int, default=1, help="repeats before those, not measured")
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


# --- all sides together --------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    from harness import ROOT, machine, print_table, run_side

    if options.model not in SHAPES and any(work.mean for work in options.work):
        sys.exit("A mean length needs a shape with random weights: a model ends its answers where it likes.")
    with tempfile.TemporaryDirectory(prefix="sampling-") as name:
        folder, file = Path(options.model), Path(name) / "prompts.json"
        if options.model in SHAPES:
            folder = Path(name) / options.model
            run_side([sys.executable, "speed/shapes.py", options.model, folder, "--mean", "1e9"], answers=False)
        prompts = {str(work): prompts_of(work, folder, options) for work in options.work}
        file.write_text(json.dumps(prompts), encoding="utf-8")
        common = ["--work", *options.work, "--prompts-file", file]
        for own in ("repeats", "warmup", "cache_gib", "threads", "malloc"):
            if (value := getattr(options, own)) is not None:
                common += [f"--{own.replace('_', '-')}", value]
        runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
        failed: dict[str, str] = {}
        for _ in range(options.rounds):
            for engine in options.engines:
                command = [sys.executable, __file__, folder, "--side", engine, *common]
                if engine == "vllm":
                    command = [options.vllm_python, ROOT / "speed" / "peers" / "vllm_sampling.py", folder, *common]
                    command += ["--option", *options.vllm_option] * bool(options.vllm_option)
                try:
                    runs[engine].append(run_side(command))
                except SystemExit as error:
                    failed[engine] = str(error)
                    print(f"{engine} failed:\n{error}", flush=True)
        runs = {engine: own for engine, own in runs.items() if own}
        if not runs:
            sys.exit("No engine could be measured.")
        floors = {str(work): floor_of(folder, work, options.prompt_tokens, runs) for work in options.work}
    cache = f", cache {options.cache_gib:g} GiB" if options.cache_gib else ""
    columns = ["", "tokens/s", "of repeats", f"{next(iter(runs))} / this", "tokens/CPU s", "mean length", "peak GiB",
               "start-up s"]  # fmt: skip
    rates = {}
    for work in options.work:
        rates[str(work)], rows = rows_of(work, runs, floors[str(work)])
        print_table(f"Sampling {Path(options.model).name}, {work}{cache}; {machine()}", columns, rows)
    if options.json:
        result: dict[str, Any] = {"model": options.model, "cache_gib": options.cache_gib, "ours": next(iter(runs))}
        result |= {"rates": rates, "machine": machine(), "runs": runs, "failed": failed}
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


def prompts_of(work: Work, folder: Path, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts of all repeats."""
    count = work.prompts * (options.warmup + options.repeats)
    if options.model in SHAPES:
        return random_prompts(SHAPES[options.model], work.mean or 1e9, count, options.prompt_tokens)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [render(tokenizer, text) for text in word_problems(count)]


def rows_of(
    work: Work, runs: dict[str, list[dict[str, Any]]], floor: float | None
) -> tuple[dict[str, float], list[list[str]]]:
    """Tokens a second of each engine, and the rows of the table."""
    repeats = {engine: [row for run in own for row in run["works"][str(work)]] for engine, own in runs.items()}
    rates = {engine: rate_of(rows, "seconds") for engine, rows in repeats.items()}
    ours, table = next(iter(runs)), []
    for engine, own in repeats.items():
        each = [rate_of([row], "seconds") for row in own]
        length = sum(row["tokens"] for row in own) / len(own) / work.rows
        table.append([
            engine, f"{rates[engine]:,.0f}", f"{min(each):,.0f} to {max(each):,.0f}",
            "" if engine == ours else f"{rates[ours] / rates[engine]:.2f}", f"{rate_of(own, 'cpu'):,.0f}",
            f"{length:.0f}", f"{max(row['peak_gib'] for row in own):.1f}",
            f"{statistics.median(run['startup_seconds'] for run in runs[engine]):.1f}",
        ])  # fmt: skip
    if floor is not None:
        rates["floor"] = floor
        table.append(["floor: weights and cache once a token", f"{floor:,.0f}", *[""] * 6])
    return rates, table


def rate_of(rows: list[dict[str, float]], clock: str) -> float:
    """Tokens a second of this clock, over all repeats."""
    return sum(row["tokens"] for row in rows) / sum(row[clock] for row in rows)


def floor_of(folder: Path, work: Work, prompt_tokens: int, runs: dict[str, list[dict[str, Any]]]) -> float | None:
    """Tokens a second on an H200 if each token step reads the weights and the cache of all rows once."""
    import torch
    from transformers import AutoConfig

    parameters = next((run[0]["parameters"] for run in runs.values() if "parameters" in run[0]), None)
    if not torch.cuda.is_available() or parameters is None:
        return None
    config, weights, rows = AutoConfig.from_pretrained(folder), 2 * parameters, work.rows
    entry = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    prompts = work.prompts * prompt_tokens
    if not work.mean:
        seconds = (weights + entry * (rows * work.tokens / 2 + prompts)) / MEMORY_RATE
        return rows / max(seconds, 2 * parameters * rows / MATRIX_RATE)
    # With rows of different lengths: while t tokens are sampled, a share of q^t of the rows is still running.
    q, tokens, time_taken = 1 - 1 / work.mean, 0.0, 0.0
    for t in range(work.tokens):
        running = rows * q**t
        read = weights * min(running, 1) + entry * (running * t + min(prompts, running * prompt_tokens))
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
    sample = (generate if options.side in ("generate", "static") else ours)(options, model)
    prompts, works, repeats = json.loads(options.prompts_file.read_text("utf-8")), {}, list[dict[str, float]]()
    for work in options.work:
        works[str(work)] = repeats = []
        for repeat in range(options.warmup + options.repeats):
            own = prompts_of_cycle(prompts[str(work)], repeat, work.prompts)
            synchronize()
            begin, used = time.perf_counter(), cpu_seconds()[0]
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            lengths = sample(work, own, repeat)
            synchronize()
            end, used = time.perf_counter(), cpu_seconds()[0] - used
            assert len(lengths) == work.rows
            assert work.mean or set(lengths) == {work.tokens}
            peak = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else peak_rss_gib()
            repeats.append({"seconds": end - begin, "cpu": used, "tokens": sum(lengths), "longest": max(lengths)})
            repeats[-1]["peak_gib"] = peak
            if len(works) == len(repeats) == 1:
                first = end - start
        del repeats[: options.warmup]
    startup = first - statistics.median(row["seconds"] for row in works[str(options.work[0])])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"works": works, "startup_seconds": startup, "parameters": parameters}


Sample = Callable[[Work, list[list[int]], int], list[int]]
"""A function from work, prompts and a seed to the lengths of the completions."""


def ours(options: argparse.Namespace, model: Any) -> Sample:
    import torch

    from hacrl.decoder import Backbone
    from hacrl.learners.weights import cast_parameters
    from hacrl.rollouts.engine import SamplingParams
    from hacrl.rollouts.native import NativeEngine

    backbone, vocabulary = Backbone(model), model.config.vocab_size
    most = max(len(work.stop_ids(vocabulary)) for work in options.work) or 1
    if model.device.type == "cuda":
        cast_parameters(model, torch.bfloat16)
    common: Any = (backbone, None, [-1], 4096)
    engine: Any
    if options.side == "paged":
        from hacrl.rollouts.paged import PagedEngine

        engine = PagedEngine(*common, most_bytes=options.cache_gib and int(options.cache_gib * 2**30))
    elif options.side == "graphed":
        from hacrl.rollouts.graphed import GraphedEngine

        engine = GraphedEngine(*common)
    else:
        engine = NativeEngine(*common)

    def sample(work: Work, prompts: list[list[int]], seed: int) -> list[int]:
        ids = work.stop_ids(vocabulary) or [-1]
        engine.stop_ids = ids + ids[-1:] * (most - len(ids))
        if getattr(engine, "board", None) is not None:  # captured graphs read the ids from there
            engine.board.stop_ids.copy_(torch.tensor(engine.stop_ids))
        params = SamplingParams(work.answers, work.tokens, temperature=1.0)
        return [len(completion.token_ids) for group in engine.sample(prompts, params, seed) for completion in group]

    return sample


def generate(options: argparse.Namespace, model: Any) -> Sample:
    import torch

    if model.device.type == "cuda":
        model.to(torch.bfloat16)
    fixed: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    if options.side == "static":
        fixed["cache_implementation"] = "static"

    def sample(work: Work, prompts: list[list[int]], seed: int) -> list[int]:
        rows, ends = [prompt for prompt in prompts for _ in range(work.answers)], set(work.stop_ids(vocabulary))
        given = {"eos_token_id": sorted(ends)} if ends else {"eos_token_id": [-1], "min_new_tokens": work.tokens}
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        torch.manual_seed(seed)
        with torch.no_grad():
            output = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=work.tokens, **fixed, **given
            )[:, longest:].tolist()  # fmt: skip
        return [next((t + 1 for t, token in enumerate(row) if token in ends), len(row)) for row in output]

    vocabulary = model.config.vocab_size
    return sample


if __name__ == "__main__":
    main()
