"""Does the demo's gain hold over seeds? Writes what `make demo` says about it, and the README's picture.

    python benchmarks/demo_seeds.py --seeds 5          # about 4 minutes a seed on two cores
    python benchmarks/demo_seeds.py device=cuda

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
from hacrl.training.run_dir import RunDir

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"

VARIANTS = {
    "gspo": ["algorithm.name=gspo"],
    "gspo_x2": ["algorithm.name=gspo", "num_generations=8"],
    "hacpo": ["algorithm.name=hacpo"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every run")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args()
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for seed in range(options.seeds):
        for name, overrides in VARIANTS.items():
            folder = options.output_dir / f"{name}-{seed}"
            run = [f"seed={seed}", f"output_dir={folder}", "save_every=0"]
            config = RunConfig.load("demo", [*overrides, *options.overrides, *run])
            resume = (folder / "config.yaml").is_file()
            summary = train(config, resume=resume, console=Console(quiet=True)).summary
            lines = RunDir(folder).metrics()
            for agent, result in summary["agents"].items():
                key = f"{agent}/eval_accuracy"
                result["curve"] = {line["step"]: line[key] for line in lines if key in line}
            summaries[name].append(summary)
            print(seed, name, json.dumps(summaries[name][-1]), flush=True)
    EVIDENCE.write_text(json.dumps(evidence(summaries, options), indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(summaries), encoding="utf-8")
    print(EVIDENCE.read_text(encoding="utf-8"))


def evidence(summaries: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
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
    command = " ".join(["python benchmarks/demo_seeds.py", *options.overrides])
    return {"command": command, "seeds": options.seeds, "rollouts": rollouts, "agents": agents}


STYLES = {
    "hacpo": ("#0b6e4f", "together: HACPO"),
    "gspo_x2": ("#8a6d3b", "alone, twice the rollouts: GSPO x2"),
    "gspo": ("#6b7280", "alone: GSPO"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 240, 60, 76, 50


def draw(summaries: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out accuracy by step, a panel for each agent: the mean over seeds, and a band from lowest to highest."""
    agents = list(summaries["hacpo"][0]["agents"])
    curves = {
        (agent, name): [run["agents"][agent]["curve"] for run in runs]
        for agent in agents
        for name, runs in summaries.items()
    }
    values = [value for runs in curves.values() for run in runs for value in run.values()]
    low, high = int(min(values) * 20) / 20, (int(max(values) * 20) + 1) / 20
    total = LEFT + len(agents) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {TOP + HEIGHT + 50}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">Accuracy on held-out problems, '
        f"{len(summaries['hacpo'])} seeds (line: mean; band: lowest to highest)</text>",
    ]
    x = LEFT
    for colour, label in STYLES.values():
        parts.append(f'<rect x="{x}" y="38" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="45">{label}</text>')
        x += 60 + 7 * len(label)
    for panel, agent in enumerate(agents):
        left = LEFT + panel * (WIDTH + GAP)
        parts.append(f'<text x="{left}" y="{TOP - 6}" font-weight="600">{agent}</text>')
        ticks = [low + 0.05 * i for i in range(round((high - low) / 0.05) + 1)]
        for tick in ticks:
            y = TOP + HEIGHT * (high - tick) / (high - low)
            parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
        for name in reversed(STYLES):
            runs = curves[agent, name]
            steps = sorted(runs[0])
            across = [left + WIDTH * step / steps[-1] for step in steps]

            def line(heights: list[float], across: list[float] = across) -> str:
                ys = [TOP + HEIGHT * (high - height) / (high - low) for height in heights]
                return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, ys, strict=True))

            top = [max(run[step] for run in runs) for step in steps]
            bottom = [min(run[step] for run in runs) for step in steps]
            mean = [statistics.mean(run[step] for run in runs) for step in steps]
            back = " ".join(reversed(line(bottom).split()))
            colour = STYLES[name][0]
            parts.append(f'<polygon points="{line(top)} {back}" fill="{colour}" opacity="0.15"/>')
            parts.append(f'<polyline points="{line(mean)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for step, x in zip(steps, across, strict=True):
            parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{step}</text>')
        parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">training step</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
