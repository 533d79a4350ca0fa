"""Tests what final.yaml claims, on the results of that study.

    hacrl study docs/results/imitation/final.yaml
    python docs/results/imitation/final.py docs/results/imitation/final.json

Prints the mean of all agents against GSPO with twice the rollouts and against each rival (95 % intervals by Student's t
over seeds; exact sign flips; Holm's correction over the rivals), then every agent against its own GSPO.
"""

import argparse
from pathlib import Path

import numpy as np

from hacrl.statistics import holm, sign_flip_p, t_interval
from hacrl.training.records import read_study

Values = dict[tuple[str, str, str], dict[str, float]]
"""Accuracy by team, agent and variant, then by seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--ours", default="ours")
    parser.add_argument("--twice", default="gspo_x2_twice", help="GSPO with twice the rollouts")
    parser.add_argument("--rivals", default="rft,opd,naive,topr")
    parser.add_argument("--alone", default="gspo", help="GSPO with as many rollouts")
    arguments = parser.parse_args()
    study = read_study(arguments.study)
    values = {(row["team"], row["agent"], row["variant"]): row["values"] for row in study["agents"]}
    seeds = complete_seeds(values)
    print(f"{len(seeds)} of {len(study['seeds'])} seeds are complete: {', '.join(seeds)}.\n")

    rivals = arguments.rivals.split(",")
    gaps = {other: mean_gaps(values, arguments.ours, other, seeds) for other in [arguments.twice, *rivals]}
    raw = [sign_flip_p(gaps[rival]) for rival in rivals]
    print(f"| mean of all agents: {arguments.ours} − | points | seeds ahead | p | p, Holm |\n|---|---|---|---|---|")
    print(f"| {arguments.twice} | {told(gaps[arguments.twice])} | {sign_flip_p(gaps[arguments.twice]):.4f} | |")
    for rival, p, adjusted in zip(rivals, raw, holm(raw), strict=True):
        print(f"| {rival} | {told(gaps[rival])} | {p:.4f} | {adjusted:.4f} |")

    print(f"\n| agent | {arguments.alone} | {arguments.ours} | difference | seeds ahead |\n|---|---|---|---|---|")
    for team, agent, variant in values:
        if variant == arguments.ours:
            ours = [values[team, agent, variant][seed] for seed in seeds]
            alone = [values[team, agent, arguments.alone][seed] for seed in seeds]
            gap = [a - b for a, b in zip(ours, alone, strict=True)]
            print(f"| {team}: {agent} | {100 * np.mean(alone):.1f} | {100 * np.mean(ours):.1f} | {told(gap)} |")


def complete_seeds(values: Values) -> list[str]:
    """Seeds of which every run is done."""
    return [seed for seed in next(iter(values.values())) if all(own.get(seed) is not None for own in values.values())]


def mean_gaps(values: Values, ours: str, other: str, seeds: list[str]) -> list[float]:
    """For each seed, our accuracy minus the other's: the mean over all agents of all teams."""
    places = [place for *place, variant in values if variant == ours]
    return [
        float(np.mean([values[*place, ours][seed] - values[*place, other][seed] for place in places])) for seed in seeds
    ]


def told(gaps: list[float]) -> str:
    low, high = t_interval(gaps)
    ahead = sum(gap > 0 for gap in gaps)
    return f"{100 * np.mean(gaps):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] | {ahead} of {len(gaps)}"


if __name__ == "__main__":
    main()
