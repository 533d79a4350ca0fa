"""The decisions of run.sh, made by rule and on validation problems only.

    python docs/results/taught/choose.py level runs/taught    # how one-sided the small models are: links cut and qwen3
    python docs/results/taught/choose.py rates runs/taught    # each algorithm's learning rates: writes taught.yaml

Level: the most one-sided second warm-up after which a model still solves enough of what it is weak at to be
taught. Rate: the smallest whose mean accuracy is within half a point of the best.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hacrl.training.records import read_study

RESULTS = Path(__file__).parents[1]

LEVELS = (19, 9, 4)
"""Rows of words and of lists to one of families and of legs."""
ENOUGH = {"family_relationships": 0.3, "leg_counting": 0.2}
"""Accuracy; always answering "son" gives 0.17."""
SMALL = {"size": "smol-cut", "model": "qwen3"}

CLOSE = 0.005
PARTNER = {"gspo": 5e-6, "hacpo": 1e-5, "robust": 2e-5}
"""SmolLM2's rates in rates-small.yaml."""
TIMES = {"low": {"smol-cut": 1, "qwen3": 1}, "middle": {"smol-cut": 2, "qwen3": 3}, "high": {"smol-cut": 4, "qwen3": 8}}
"""A small model's rates there, as multiples of SmolLM2's."""
SEARCHED = {"gspo": "gspo", "gspo_x2": "gspo", "hacpo": "hacpo", "hacpo_robust": "robust", "grpo": "gspo"}
"""Whose rates an algorithm has; `naive` has a search of its own on SmolLM2, and the multiples of `hacpo_robust`."""


def choose_level(folder: Path) -> None:
    for name, agent in (("cut", "smol-cut"), ("qwen3", "qwen3")):
        by_level = {level: accuracy_by_part(folder / f"{name}-{level}", agent) for level in LEVELS}
        able = [n for n in LEVELS if all(by_level[n][part] >= enough for part, enough in ENOUGH.items())]
        level = able[0] if able else LEVELS[-1]
        (folder / name).symlink_to(f"{name}-{level}")
        for own, parts in by_level.items():
            told = ", ".join(f"{part} {100 * value:.1f} %" for part, value in parts.items())
            print(f"{agent}, {own} to 1: {told}{'  <- taken' if own == level else ''}")


def accuracy_by_part(warmup: Path, agent: str) -> dict[str, float]:
    last = json.loads((warmup / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    start = f"{agent}/eval_accuracy/"
    return {name.removeprefix(start): value for name, value in last.items() if name.startswith(start)}


def choose_rates(folder: Path) -> None:
    large = search(RESULTS / "smollm2/rates.json") | search(Path("runs/study-taught-rates/study.json"))
    small = search(Path("runs/study-taught-rates-small/study.json"))
    rate_of: dict[str, float] = {}
    times_of: dict[str, dict[str, int]] = {}
    for algorithm in ("gspo", "hacpo", "robust", "naive"):
        tried = {float(rate): mean for (_, own, rate), mean in large.items() if own == algorithm}
        rate_of[algorithm] = smallest_of_the_best(tried)
        print(f"{algorithm}: {told(tried)} -> {rate_of[algorithm]:g}")
    for algorithm in PARTNER:
        times_of[algorithm] = {}
        for pair, agent in SMALL.items():
            tried = {TIMES[step][agent]: small[pair, algorithm, step] for step in TIMES}
            times_of[algorithm][agent] = int(smallest_of_the_best(tried))
            print(f"{algorithm}, {agent}: {told(tried)} -> x {times_of[algorithm][agent]}")

    study = yaml.safe_load((RESULTS / "taught.yaml").read_text(encoding="utf-8"))
    study["base"] = str(RESULTS.resolve() / study["base"])
    study["algorithms"] = {
        name: rates(rate_of[own], {agent: times * PARTNER[own] for agent, times in times_of[own].items()})
        for name, own in SEARCHED.items()
    }
    naive = rate_of["naive"]
    study["algorithms"]["naive"] = rates(naive, {agent: times * naive for agent, times in times_of["robust"].items()})
    (folder / "taught.yaml").write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")


def search(file: Path) -> dict[tuple[str, str, str], float]:
    """By pair, algorithm and what was tried: the mean accuracy of the agents."""
    study = read_study(file)
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in study["agents"]:
        variant = re.fullmatch(r"([a-z]+)-([a-z]+|[\d.]+e-\d+)", row["variant"])
        if variant:  # not those with another number of prompts
            found.setdefault((row["team"], variant[1], variant[2]), []).append(row["mean"])
    return {key: sum(means) / len(means) for key, means in found.items()}


def smallest_of_the_best(tried: Mapping[float, float]) -> float:
    best = max(tried.values())
    return min(rate for rate, mean in tried.items() if mean >= best - CLOSE)


def rates(own: float, small: Mapping[str, float]) -> dict[str, Any]:
    other = {f"agents.{agent}.learning_rate": float(f"{rate:g}") for agent, rate in small.items() if rate != own}
    return {"learning_rate": own} | other


def told(tried: Mapping[float, float]) -> str:
    return ", ".join(f"{rate:g} {100 * mean:.1f}" for rate, mean in sorted(tried.items()))


if __name__ == "__main__":
    {"level": choose_level, "rates": choose_rates}[sys.argv[1]](Path(sys.argv[2]))
