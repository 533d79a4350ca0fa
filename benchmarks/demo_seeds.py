"""Does the demo's gain hold over seeds? Writes what `make demo` says about it.

    python benchmarks/demo_seeds.py --seeds 5          # about 4 minutes a seed on two cores

For each seed: the demo pair together (HACPO), alone (GSPO), and alone with twice the rollouts (GSPO x2), on the
held-out test problems. Hyper-parameters were chosen on the validation problems.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from hacrl.config import RunConfig
from hacrl.demo import EVIDENCE
from hacrl.training.run import train

VARIANTS = {
    "gspo": ["algorithm.name=gspo"],
    "gspo_x2": ["algorithm.name=gspo", "num_generations=8"],
    "hacpo": ["algorithm.name=hacpo"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args()
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in range(options.seeds):
        for name, overrides in VARIANTS.items():
            folder = options.output_dir / f"{name}-{seed}"
            config = RunConfig.load("demo", [*overrides, f"seed={seed}", f"output_dir={folder}", "save_every=0"])
            resume = (folder / "config.yaml").is_file()
            summaries[name].append(train(config, resume=resume, console=Console(quiet=True)).summary)
            print(seed, name, json.dumps(summaries[name][-1]), flush=True)
    EVIDENCE.write_text(json.dumps(evidence(summaries, options.seeds), indent=1) + "\n", encoding="utf-8")
    print(EVIDENCE.read_text(encoding="utf-8"))


def evidence(summaries: dict[str, list[dict[str, Any]]], seeds: int) -> dict[str, Any]:
    agents = {}
    for agent in summaries["hacpo"][0]["agents"]:
        final = {name: [run["agents"][agent]["final_accuracy"] for run in runs] for name, runs in summaries.items()}
        gains = [together - alone for together, alone in zip(final["hacpo"], final["gspo"], strict=True)]
        gains_x2 = [together - alone for together, alone in zip(final["hacpo"], final["gspo_x2"], strict=True)]
        agents[agent] = {
            "start": summaries["hacpo"][0]["agents"][agent]["start_accuracy"],
            **final,
            "mean_gain": statistics.mean(gains),
            "seeds_ahead": sum(gain > 0 for gain in gains),
            "mean_gain_over_gspo_x2": statistics.mean(gains_x2),
            "seeds_ahead_of_gspo_x2": sum(gain > 0 for gain in gains_x2),
        }
    rollouts = {name: runs[0]["rollouts"] for name, runs in summaries.items()}
    return {"command": "python benchmarks/demo_seeds.py", "seeds": seeds, "rollouts": rollouts, "agents": agents}


if __name__ == "__main__":
    main()
