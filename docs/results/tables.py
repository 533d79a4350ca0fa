"""Markdown tables of a study.

    python docs/results/tables.py docs/results/sharing.json                      # against its baseline
    python docs/results/tables.py docs/results/smollm2.json --intervals          # of accuracies too
    python docs/results/tables.py docs/results/sharing.json hacpo_robust gspo    # one against another, by agent

Accuracies are means over seeds in percent, on held-out problems; differences are paired by seed, in points, with 95 %
intervals (Student's t over seeds).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hacrl.statistics import t_interval
from hacrl.study.results import COSTS, cost
from hacrl.training.records import read_study


def main() -> None:
    intervals = "--intervals" in sys.argv
    path, *variants = [word for word in sys.argv[1:] if word != "--intervals"]
    study: dict[str, Any] = {**read_study(Path(path))}
    done = sum(run["status"] == "done" for run in study["runs"])
    print(f"### {study['title']}\n\n{done} of {len(study['runs'])} runs, seeds {study['seeds']}.\n")
    if variants:
        print(versus(study, *variants))
    else:
        print(accuracies(study, intervals), differences(study), costs(study), sep="\n\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def accuracies(study: dict[str, Any], intervals: bool) -> str:
    """A column for each team; with intervals, for each agent."""
    cells = {(row["team"], row["agent"], row["variant"]): row for row in study["agents"]}
    places = list(dict.fromkeys((row["team"], row["agent"]) for row in study["agents"]))
    columns = [[place] for place in places]
    if not intervals:
        columns = [[place for place in places if place[0] == team] for team in dict.fromkeys(dict(places))]
    rows = [["start", *(", ".join(start(study, *place) for place in column) for column in columns)]]
    for variant in study["variants"]:
        found = [[cells[*place, variant] for place in column if (*place, variant) in cells] for column in columns]
        rows.append([f"`{variant}`", *(", ".join(accuracy(row, intervals) for row in column) for column in found)])
    heads = [f"{column[0][0]}: {', '.join(agent for _, agent in column)}" for column in columns]
    return table(["accuracy", *heads], rows)


def start(study: dict[str, Any], team: str, agent: str) -> str:
    return next(percent(row["start"]) for row in study["agents"] if (row["team"], row["agent"]) == (team, agent))


def accuracy(row: dict[str, Any], interval: bool) -> str:
    known = interval and row["low"] is not None
    return percent(row["mean"]) + (f" [{percent(row['low'])}, {percent(row['high'])}]" if known else "")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def differences(study: dict[str, Any]) -> str:
    """The mean over the agents of each team, and of all."""
    of_teams = {(row["team"], row["variant"]): row for row in study["comparisons"] if row["agent"] == "all"}
    teams = list(dict.fromkeys(team for team, _ in of_teams))
    rows = []
    for variant in study["variants"]:
        if variant != study["baseline"] and any((team, variant) in of_teams for team in teams):
            rows.append([f"`{variant}`", *(difference(of_teams.get((team, variant))) for team in teams)])
    return table([f"mean of the agents − `{study['baseline']}`", *teams], rows)


def difference(row: dict[str, Any] | None) -> str:
    if row is None or row["difference"] is None:
        return "–"
    interval = "" if row["low"] is None else f" [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
    return f"{100 * row['difference']:+.1f}{interval}, {row['wins']} of {row['seeds']} seeds"


def versus(study: dict[str, Any], variant: str, other: str) -> str:
    """Differences of each agent, and of the mean over all agents of all teams."""
    values = {(row["team"], row["agent"], row["variant"]): row["values"] for row in study["agents"]}
    places = [(team, agent) for team, agent, name in values if name == variant and (team, agent, other) in values]
    by_place = {
        place: [values[*place, variant][seed] - values[*place, other][seed] for seed in values[*place, variant]]
        for place in places
    }
    rows = [[f"{team}: {agent}", paired(gaps)] for (team, agent), gaps in by_place.items()]
    rows.append(["mean of all agents", paired([float(np.mean(gaps)) for gaps in zip(*by_place.values(), strict=True)])])
    return table(["agent", f"`{variant}` − `{other}`"], rows)


def paired(gaps: list[float]) -> str:
    low, high = t_interval(gaps)
    ahead = sum(gap > 0 for gap in gaps)
    row = {"difference": np.mean(gaps), "low": low, "high": high, "wins": ahead, "seeds": len(gaps)}
    return difference(row)


def costs(study: dict[str, Any]) -> str:
    rows = [row for row in study["accounting"] if row["rollouts"] is not None]
    keys = [key for key in COSTS if any(row.get(key) for row in rows)]
    cells = [[row["team"], f"`{row['variant']}`", *(cost(row, key) for key in keys)] for row in rows]
    return table(["team", "variant", *(COSTS[key] for key in keys)], cells)


if __name__ == "__main__":
    main()
