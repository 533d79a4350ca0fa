"""Markdown tables of what a study's runs wrote step by step: accuracy by part, rewards, ratios of foreign rollouts.

    python docs/results/steps.py runs/study-smollm2      # the folder of a study, with its runs

Means over seeds; in percent, but for the ratios.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from tables import table

RATIOS = {"ratio_mean": "mean", "ratio_q05": "5 %", "ratio_q25": "25 %", "ratio_q50": "50 %", "ratio_q75": "75 %"}
RATIOS |= {"ratio_q95": "95 %", "kept": "kept", "kept_positive": "of A > 0", "kept_negative": "of A < 0"}
TEN = 10

Lines = list[dict[str, Any]]
Runs = dict[tuple[str, str], list[Lines]]
"""By pair and variant, the metrics of each seed; the first line is from before the first step."""


def main() -> None:
    runs: Runs = defaultdict(list)
    for file in sorted(Path(sys.argv[1]).glob("runs/*/*/*/metrics.jsonl")):
        pair, variant, _ = file.parts[-4:-1]
        runs[pair, variant].append([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    print(by_part(runs), rewards(runs), ratios(runs), sep="\n\n")


def names(runs: Runs, pair: str, wanted: str) -> list[str]:
    """What the pair's runs measure before the first step, as far as it has this in its name."""
    lines = [seeds[0][0] for (own, _), seeds in runs.items() if own == pair]
    return list(dict.fromkeys(name for line in lines for name in line if wanted in name))


def by_part(runs: Runs) -> str:
    """Greedy accuracy on each part of the task at the end."""
    variants = list(dict.fromkeys(variant for _, variant in runs))
    rows = []
    for pair in dict.fromkeys(pair for pair, _ in runs):
        for name in names(runs, pair, "/eval_accuracy/"):
            agent, _, part = name.split("/")
            own = {variant: runs[pair, variant] for variant in variants if (pair, variant) in runs}
            start = percent(lines[0][name] for seeds in own.values() for lines in seeds)
            ends = [percent(lines[-1][name] for lines in own[v]) if v in own else "–" for v in variants]
            rows.append([f"{pair}: {agent}", part, start, *ends])
    return table(["agent", "part", "start", *(f"`{variant}`" for variant in variants)], rows)


def rewards(runs: Runs) -> str:
    """Of sampled answers to fresh training problems, and how many of them did not end."""
    rows = []
    for (pair, variant), seeds in runs.items():
        for name in names(runs, pair, "/eval_accuracy"):
            agent, _, *part = name.split("/")
            if not part:
                told = [[line[f"{agent}/reward"] for line in lines[1:]] for lines in seeds]
                first = percent(value for own in told for value in own[:TEN])
                last = percent(value for own in told for value in own[-TEN:])
                cut = percent(line[f"{agent}/completions/clipped_ratio"] for lines in seeds for line in lines[-TEN:])
                rows.append([f"{pair}: {agent}", f"`{variant}`", first, last, cut])
    return table(["reward", "variant", "first ten steps", "last ten", "cut off, last ten"], rows)


def ratios(runs: Runs) -> str:
    """s of foreign rollouts and the share that the band keeps, of all and by the sign of A, over all steps."""
    rows = []
    for (pair, variant), seeds in runs.items():
        told: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for name, value in (item for lines in seeds for line in lines for item in line.items()):
            agent, _, rest = name.partition("/from_")
            source, _, key = rest.partition("/")
            if key in RATIOS and value is not None:
                told[f"{agent} from {source}"][key].append(value)
        for between, values in told.items():
            cells = [f"{fmean(values[key]):.2f}" if values[key] else "–" for key in RATIOS]
            rows.append([f"`{variant}`, {pair}: {between}", *cells])
    return table(["s of foreign rollouts", *RATIOS.values()], sorted(rows))


def percent(values: Iterable[float]) -> str:
    return f"{100 * fmean(values):.1f}"


if __name__ == "__main__":
    main()
