"""One GSPO cycle, ours and TRL's: sample, score, and two updates.

    python speed/cycle.py zoo:llama-plus                                          # on a CPU, equal lengths
    python speed/cycle.py MODEL_DIR --prompts 4 --tokens 48
    python speed/cycle.py qwen3-0.6b --prompt-tokens 128 --tokens 1024 --mean 430 --micro-batch 16 --colocate 0.3

Both sides get the same model folder, prompts, rewards, threads and malloc settings, each in a process of its own, in
turns. Without `--mean` all completions have exactly `--tokens` tokens; a shape has random weights, and with `--mean`
lengths are geometric, cut off at `--tokens`. On a GPU both compute in bfloat16 on float32 weights, and TRL samples with
vLLM beside it (`--colocate`). TRL needs `make .venv-trl/.installed`, or `--trl-python`. Start-up is the time from the
start of the process to the first cycle.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, peak_rss_gib, restart_with_environment
from shapes import SHAPES, random_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"zoo:NAME, a shape ({', '.join(SHAPES)}) or the folder of a model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, with a shape")
    parser.add_argument("--mean", type=float, help="mean length of completions, if none is cut off")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, help="completions in one pass of TRL; default: all of an update")
    parser.add_argument(
        "--colocate", type=float, metavar="SHARE", help="TRL samples with vLLM in this share of the GPU"
    )
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--prompts-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="how often each side is run")
    parser.add_argument("--side", choices=("both", "ours", "plain"), default="both", help="ours: print JSON and stop")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    if options.side != "both":
        print(json.dumps(ours(options)))
        return
    from harness import ZOO, machine, median_of, print_table, prompt_kind, prompts_file, run_side

    with tempfile.TemporaryDirectory(prefix="cycle-") as name:
        if options.model in SHAPES:
            folder, mean, shape = str(Path(name) / options.model), options.mean or 1e9, SHAPES[options.model]
            run_side([sys.executable, "speed/shapes.py", options.model, folder, "--mean", str(mean)], answers=False)
            ids = random_prompts(shape, mean, options.prompts * (options.cycles + 2), options.prompt_tokens)
            file = str(Path(name) / "prompts.json")
            Path(file).write_text(json.dumps([" ".join(f"w{i}" for i in row) for row in ids]), encoding="utf-8")
        else:
            folder = (
                str(ZOO / options.model.removeprefix("zoo:")) if options.model.startswith("zoo:") else options.model
            )
            file = prompts_file(prompt_kind(options.model), options.prompts)
        names = ("prompts", "generations", "tokens", "mean", "updates", "cycles", "threads", "malloc")
        given = [(name, getattr(options, name)) for name in names]
        common = [str(part) for name, value in given if value is not None for part in (f"--{name}", value)]
        model = folder if options.model in SHAPES else options.model
        sides = {
            "ours": [sys.executable, __file__, model, "--prompts-file", file, *common, "--side", "ours"],
            "TRL": [options.trl_python, "speed/peers/trl_cycle.py", folder, "--prompts-file", file, *common],
        }
        for option in ("micro-batch", "colocate"):
            if value := getattr(options, option.replace("-", "_")):
                sides["TRL"] += [f"--{option}", str(value)]
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, command in sides.items():
                results[name].append(run_side(command))
    best = {name: median_of([row for result in runs for row in result["cycles"]]) for name, runs in results.items()}
    peak = {name: max(result["peak_gib"] for result in runs) for name, runs in results.items()}
    starts = {name: min(result["startup_seconds"] for result in runs) for name, runs in results.items()}
    lengths = f"mean {options.mean:g}, at most {options.tokens}" if options.mean else f"{options.tokens} tokens"
    size = f"{options.prompts} x {options.generations} x {lengths}, {options.updates} updates"
    phases = ("total", "sampling", "old_logps", "training")
    rows = [
        [name, *(f"{best[name].get(p, 0):.2f}" for p in phases), f"{best[name]['tokens']:,.0f}", f"{peak[name]:.2f}",
         f"{starts[name]:.0f}"]
        for name in results
    ]  # fmt: skip
    ratio = best["TRL"]["total"] / best["ours"]["total"]
    rows.append(["TRL / ours", f"{ratio:.2f}", "", "", "", "", "", ""])
    title = f"GSPO cycle of {options.model}: {size} (seconds, medians); {machine()}"
    print_table(title, ["", *phases, "tokens", "peak GiB", "start-up"], rows)
    if options.json:
        result = {"model": options.model, "size": size, "medians": best, "trl_over_ours": ratio, "peak_gib": peak}
        options.json.write_text(json.dumps({**result, "startup": starts, "runs": results}, indent=1) + "\n")


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each cycle, after one that is not counted."""
    begun = time.perf_counter()
    import torch
    from harness import forced_agent, gspo_cycle, median_of, problems_for

    torch.set_num_threads(options.threads)
    on_gpu = torch.cuda.is_available()
    sizes = {"prompts": options.prompts, "generations": options.generations, "tokens": options.tokens}
    changes = {"dtype": "bfloat16"} if on_gpu else {}
    fast, forced = options.side == "ours", options.mean is None
    agent = forced_agent(options.model, updates=options.updates, fast=fast, forced=forced, **sizes, **changes)
    prompts = json.loads(options.prompts_file.read_text("utf-8")) if options.prompts_file else None
    startup, rows = time.perf_counter() - begun, []
    for cycle in range(options.cycles + 1):
        problems = problems_for(agent, options.prompts, prompts, cycle)
        rows.append(gspo_cycle(agent, problems, cycle, options.updates))
    peak = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else peak_rss_gib()
    return {"median": median_of(rows[1:]), "cycles": rows[1:], "peak_gib": peak, "startup_seconds": startup}


if __name__ == "__main__":
    main()
