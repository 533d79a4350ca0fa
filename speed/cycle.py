"""One GSPO cycle on a CPU, ours and TRL's: sample, score, and two updates, all completions of the same length.

    python speed/cycle.py zoo:llama-plus
    python speed/cycle.py MODEL_DIR --prompts 4 --tokens 48

Both sides get the same model folder, prompts, rewards, threads and malloc settings, each in a process of its own, in
turns. TRL needs `make .venv-trl/.installed`.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, peak_rss_gib, restart_with_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="zoo:NAME or the folder of a model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="how often each side is run")
    parser.add_argument("--side", choices=("both", "ours", "plain"), default="both", help="ours: print JSON and stop")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import (
        ZOO,
        forced_agent,
        gspo_cycle,
        median_of,
        print_table,
        problems_for,
        prompt_kind,
        prompts_file,
        run_side,
    )

    if options.side != "both":
        torch.set_num_threads(options.threads)
        sizes = {"prompts": options.prompts, "generations": options.generations, "tokens": options.tokens}
        agent = forced_agent(options.model, updates=options.updates, fast=options.side == "ours", **sizes)
        problems = problems_for(agent, options.prompts)
        rows = [gspo_cycle(agent, problems, cycle, options.updates) for cycle in range(options.cycles + 1)][1:]
        print(json.dumps({"median": median_of(rows), "cycles": rows, "peak_rss_gib": peak_rss_gib()}))
        return

    folder = str(ZOO / options.model.removeprefix("zoo:")) if options.model.startswith("zoo:") else options.model
    file = prompts_file(prompt_kind(options.model), options.prompts)
    names = ("prompts", "generations", "tokens", "updates", "cycles", "threads", "malloc")
    common = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    ours = [sys.executable, __file__, options.model, *common, "--side", "ours"]
    trl = [".venv-trl/bin/python", "speed/peers/trl_cycle.py", folder, "--prompts-file", file, *common]
    results: dict[str, list[dict]] = {"ours": [], "TRL": []}
    for _ in range(options.rounds):
        results["ours"].append(run_side(ours))
        results["TRL"].append(run_side(trl))
    best = {name: median_of([row for result in runs for row in result["cycles"]]) for name, runs in results.items()}
    peak = {name: max(result["peak_rss_gib"] for result in runs) for name, runs in results.items()}
    size = f"{options.prompts} x {options.generations} x {options.tokens} tokens, {options.updates} updates"
    phases = ("total", "sampling", "old_logps", "training")
    rows = [[name, *(f"{best[name].get(p, 0):.2f}" for p in phases), f"{peak[name]:.2f}"] for name in results]
    ratio = best["TRL"]["total"] / best["ours"]["total"]
    rows.append(["TRL / ours", f"{ratio:.2f}", "", "", "", ""])
    print_table(f"GSPO cycle of {options.model}: {size} (seconds, medians)", ["", *phases, "peak GiB"], rows)
    if options.json:
        result = {"model": options.model, "size": size, "medians": best, "trl_over_ours": ratio, "peak_gib": peak}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
