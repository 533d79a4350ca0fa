"""A HACPO step of two agents against a GSPO step of the same two, with the same completions.

    python speed/collaboration.py demo
    python speed/collaboration.py YAML [KEY=VALUE]...

Every HACPO learner sees twice the rollouts. The learning rate is 0, so that both sample the same completions in every
step; all else is as in `hacrl train`, verification included.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a preset or a YAML file")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain implementation")
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table

    torch.set_num_threads(options.threads)
    names = ["gspo", "hacpo"] if options.no_plain else ["gspo", "gspo, plain", "hacpo", "hacpo, plain"]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            figures[name] += steps(options, name)
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in figures.items()
    }
    table = [
        [name, *(f"{m[key]:.3f}" for key in ("step", "sample", "learn")), f"{m['step'] / medians['gspo']['step']:.2f}"]
        for name, m in medians.items()
    ]
    title = f"A step of both agents of {options.source} (seconds, medians); {machine()}"
    print_table(title, ["", "step", "sampling", "learning", "over GSPO"], table)
    if options.json:
        options.json.write_text(json.dumps({"source": options.source, "medians": medians}) + "\n", encoding="utf-8")


def steps(options: argparse.Namespace, name: str) -> list[dict[str, float]]:
    """Seconds of each step of a short run, of which the slower agent sets the pace."""
    from hacrl.config import RunConfig
    from hacrl.run import train

    algorithm, _, plain = name.partition(", ")
    overrides = [*options.overrides, f"algorithm.name={algorithm}", f"max_steps={options.steps}", "learning_rate=0"]
    overrides += ["eval_every=0", "save_every=0", "task.eval_size=1", f"fast={'false' if plain else 'true'}"]
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.load(options.source, [*overrides, f"output_dir={folder}/run"])
        result = train(config)
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    ids = [agent.id for agent in config.agents]
    pace = sum if config.agents[0].device == "cuda" else max
    rows = []
    for line in lines[3:]:
        parts = {key: pace(line[f"{agent}/time/{key}"] for agent in ids) for key in ("sample", "learn")}
        rows.append({"step": line["step_time"] - sum(line.get(f"{a}/time/eval", 0) for a in ids), **parts})
    return rows


if __name__ == "__main__":
    main()
