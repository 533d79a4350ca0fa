"""What a small learner reaches with each kind of source, and what that costs.

    python docs/results/sources/table.py runs/study-sources-two runs/study-sources-one

Reads the runs of the studies; with --json, writes what the table needs into a file, which may be given in their place.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from hacrl.statistics import t_interval
from hacrl.training.run_dir import RunDir

LEARNER = "llama-small"
REFERENCE = "frozen"
"""What the others are compared with, seed by seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", type=Path, nargs="+", help="folders of studies, or a file written with --json")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = [run for place in arguments.places for run in read(place)]
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    labels = list(dict.fromkeys(run["label"] for run in runs))
    by_label = {label: {run["seed"]: run for run in runs if run["label"] == label} for label in labels}
    print(f"| beside {LEARNER} | accuracy | − {REFERENCE} | rollouts of others | their tokens | requests | updates |")
    print("|---|---|---|---|---|---|---|")
    for label, own in by_label.items():
        accuracy = points([run["accuracy"] for run in own.values()])
        shared = sorted(own.keys() & by_label[REFERENCE].keys())
        gaps = [own[seed]["accuracy"] - by_label[REFERENCE][seed]["accuracy"] for seed in shared]
        costs = [f"{mean(own, name):,.0f}" for name in ("rollouts", "tokens", "requests", "updates")]
        gap = "" if label == REFERENCE else points(gaps, "+")
        print(f"| {label} | {accuracy} | {gap} | {' | '.join(costs)} |")
    print(f"\n{len(runs)} runs, seeds {', '.join(map(str, sorted({run['seed'] for run in runs})))}.")


def read(place: Path) -> list[dict[str, Any]]:
    """The finished runs of a study."""
    if place.is_file():
        runs: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))
        return runs
    found = []
    for folder in sorted(place.glob("runs/*/*/seed-*")):
        summary = RunDir(folder).summary()
        if summary is None:
            continue
        team, variant, seed = folder.parts[-3:]
        label = team if variant == "hacpo_robust" else variant
        learner = summary["agents"][LEARNER]
        others = [agent for name, agent in summary["agents"].items() if name != LEARNER]
        others += summary.get("sources", {}).values()
        totals = {name: sum(other.get(name, 0) for other in others) for name in ("rollouts", "tokens", "requests")}
        learned = {"accuracy": learner["final_accuracy"], "updates": learner["updates"]}
        found.append({"label": label, "seed": int(seed.removeprefix("seed-")), **learned, **totals})
    return found


def mean(runs: dict[int, dict[str, Any]], name: str) -> float:
    return float(sum(run[name] for run in runs.values())) / len(runs)


def points(values: list[float], sign: str = "") -> str:
    """The mean of accuracies in percent, or of differences in points, with its interval over seeds."""
    low, high = (f"{100 * value:{sign}.1f}" for value in t_interval(values))
    return f"{100 * sum(values) / len(values):{sign}.1f} [{low}, {high}]"


if __name__ == "__main__":
    main()
