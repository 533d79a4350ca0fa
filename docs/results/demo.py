"""What `make demo` says about several seeds, and the picture of docs/quickstart.md, from the study of the demo pair.

hacrl study docs/results/demo.yaml
python docs/results/demo.py runs/study-demo
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from hacrl.cli.demo import EVIDENCE
from hacrl.training.run_dir import RunDir

PICTURE = Path(__file__).parents[1] / "demo.svg"


def main() -> None:
    folder = Path(sys.argv[1])
    study = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    EVIDENCE.write_text(json.dumps(evidence(study), indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(curves(folder, study), len(study["seeds"])), encoding="utf-8")
    print(EVIDENCE.read_text(encoding="utf-8"))


def evidence(study: dict[str, Any]) -> dict[str, Any]:
    """The gain of each agent over learning alone: the mean over seeds, and how many seeds are ahead."""
    values = {(row["agent"], row["variant"]): row["values"] for row in study["agents"]}
    gains: dict[str, dict[str, list[float]]] = {}
    for agent, variant in values:
        if variant in ("hacpo", "hacpo_robust"):
            own = [values[agent, variant][str(seed)] - values[agent, "gspo"][str(seed)] for seed in study["seeds"]]
            gains.setdefault(agent, {})[variant] = [round(statistics.mean(own), 6), sum(gain > 0 for gain in own)]
    return {"command": "hacrl study docs/results/demo.yaml", "seeds": len(study["seeds"]), "gains": gains}


def curves(folder: Path, study: dict[str, Any]) -> dict[tuple[str, str], list[dict[int, float]]]:
    """Held-out accuracy by step of every run, by agent and variant."""
    found: dict[tuple[str, str], list[dict[int, float]]] = {}
    for run in study["runs"]:
        lines = RunDir(folder / run["dir"]).metrics()
        for agent in run["summary"]["agents"]:
            key = f"{agent}/eval_accuracy"
            curve = {line["step"]: line[key] for line in lines if key in line}
            found.setdefault((agent, run["variant"]), []).append(curve)
    return found


STYLES = {
    "hacpo_robust": ("#0b6e4f", "together: robust HACPO"),
    "hacpo": ("#2563a8", "together: HACPO"),
    "gspo_x2": ("#8a6d3b", "alone, twice the rollouts: GSPO x2"),
    "gspo": ("#6b7280", "alone: GSPO"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 240, 60, 76, 50


def draw(curves: dict[tuple[str, str], list[dict[int, float]]], seeds: int) -> str:
    """Held-out accuracy by step, a panel for each agent: the mean over seeds, and a band from lowest to highest."""
    agents = list(dict.fromkeys(agent for agent, _ in curves))
    values = [value for runs in curves.values() for run in runs for value in run.values()]
    low, high = int(min(values) * 20) / 20, (int(max(values) * 20) + 1) / 20
    total = LEFT + len(agents) * (WIDTH + GAP) + 40  # the legend is wider than the panels
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {TOP + HEIGHT + 50}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">Accuracy on held-out problems, '
        f"{seeds} seeds (line: mean; band: lowest to highest)</text>",
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
