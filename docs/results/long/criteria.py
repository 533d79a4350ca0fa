"""Which agents and teams meet the criteria of the study on long answers.

    python docs/results/long/criteria.py runs/study-long-overlap runs/study-long-gspo

Reads finished or unfinished runs (folders of runs or of studies) and prints three tables: agents as they start, how
likely each finds the answers of each other (s), and what GSPO alone gains. A row ends with the criteria that it misses.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from hacrl.training.records import read_trace
from hacrl.training.run_dir import RunDir

ACCURACY = (0.2, 0.6)
"""Greedy accuracy of an agent as it starts."""
LENGTH = (150, 600)
"""Tokens of the middle 90 % of its answers that end."""
CUT_OFF = 0.1
"""The largest share of answers that do not end."""
CLOSE = (0.85, 0.95)
"""Mean s of foreign rollouts in a team that overlaps as language models do."""
FAR = 0.75
"""The largest mean s in a team far apart."""
GAIN = 0.1
"""The least gain of greedy accuracy under GSPO alone."""
STEPS = 200

Row = dict[str, Any]
"""One agent, pair or run: numbers by column, and under `missed` the criteria that it does not meet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="runs, or studies")
    parser.add_argument("--teams", type=Path, default=Path(__file__).parent / "teams", help="a folder of YAML files")
    asked = parser.parse_args()
    runs = [RunDir(path) for folder in asked.folders for path in runs_in(folder)]
    print(table("agent as it starts", agents(runs)), end="\n\n")
    s = ratios(runs)
    print(table("learner from source", pairs(s)), end="\n\n")
    print(table("team", teams(s, asked.teams)), end="\n\n")
    print(table("GSPO alone", gains(runs)))


def runs_in(folder: Path) -> list[Path]:
    """The folder of a run itself, or the started runs of a study."""
    if (folder / "config.yaml").is_file():
        return [folder]
    found = sorted(file.parent for file in folder.glob("runs/*/*/seed-*/config.yaml"))
    if not found:
        raise SystemExit(f"{folder} is neither a run nor a study with runs.")
    return found


def still(run: RunDir) -> set[str]:
    """The agents that never learn: all their rollouts are those of the starting weights."""
    return {agent.id for agent in run.config().agents if agent.learning_rate == 0}


def rollouts(run: RunDir) -> Iterator[Row]:
    for step in run.steps("rollouts"):
        for line in run.step_file("rollouts", step).read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def agents(runs: Iterable[RunDir]) -> dict[str, Row]:
    """Accuracy and length of answers of each agent as it starts; over all runs that it starts."""
    answers, greedy, sampled = defaultdict[str, list[Row]](list), dict[str, float](), dict[str, float]()
    for run in runs:
        unmoved = still(run)
        for line in rollouts(run):
            if line["policy_version"] == 0 or line["source"] in unmoved:
                answers[line["source"]].append(line)
        for agent, first in ((agent.id, run.metrics()[0]) for agent in run.config().agents if run.metrics()):
            greedy[agent] = first.get(f"{agent}/eval_accuracy", np.nan)
            sampled[agent] = first.get(f"{agent}/eval_sampled", sampled.get(agent, np.nan))
    found = {}
    for agent, lines in answers.items():
        lengths = [line["num_tokens"] for line in lines if line["finish_reason"] == "stop"]
        low, high = np.quantile(lengths, [0.05, 0.95]) if lengths else (np.nan, np.nan)
        cut = fmean(line["finish_reason"] == "length" for line in lines)
        rewards = [line["reward"] for line in lines if line["reward"] is not None]
        own = greedy.get(agent, np.nan)
        row = {
            "greedy": percent(own),
            "sampled": percent(sampled.get(agent, np.nan)),
            "reward": percent(fmean(rewards) if rewards else np.nan),
            "tokens": f"{fmean(lengths) if lengths else np.nan:.0f}",
            "5 %, 95 %": f"{low:.0f}, {high:.0f}",
            "cut off": percent(cut),
            "answers": len(lines),
        }
        checks = {
            "accuracy": ACCURACY[0] <= own <= ACCURACY[1],
            "length": LENGTH[0] <= low and high <= LENGTH[1],
            "cut off": cut <= CUT_OFF,
        }
        found[agent] = judged(row, checks)
    return found


def ratios(runs: Iterable[RunDir]) -> dict[tuple[str, str], list[float]]:
    """s of foreign rollouts by learner and source, from traces of agents that never learn."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for run in runs:
        unmoved = still(run)
        for step in run.steps("trace"):
            for line in read_trace(run.step_file("trace", step)):
                learner, source = line["learner"], line["source"]
                if learner != source and {learner, source} <= unmoved:
                    found[learner, source].append(float(np.exp(line["log_ratio"])))
    return found


def pairs(s: dict[tuple[str, str], list[float]]) -> dict[str, Row]:
    found = {}
    for (learner, source), own in sorted(s.items()):
        low, high = np.quantile(own, [0.05, 0.95])
        row = {"mean s": f"{fmean(own):.3f}", "5 %, 95 %": f"{low:.2f}, {high:.2f}", "rollouts": len(own)}
        found[f"{learner} from {source}"] = judged(row, {"overlap": CLOSE[0] <= fmean(own) <= CLOSE[1]})
    return found


def teams(s: dict[tuple[str, str], list[float]], folder: Path) -> dict[str, Row]:
    """Mean s over the pairs of each team of the folder, and of every other two agents that overlap as wanted."""
    ids = {
        file.stem: [agent["id"] for agent in yaml.safe_load(file.read_text(encoding="utf-8"))["agents"]]
        for file in sorted(folder.glob("*.yaml"))
    }
    written = {frozenset(own) for own in ids.values()}
    others = {frozenset(pair) for pair in s} - written
    ids |= {" + ".join(sorted(pair)): sorted(pair) for pair in sorted(others, key=sorted)}
    found = {}
    for name, own in ids.items():
        means = [fmean(s[pair]) for pair in permutations(own, 2) if pair in s]
        if len(means) < len(own) * (len(own) - 1):
            continue
        mean = fmean(means)
        is_close, is_far = CLOSE[0] <= mean <= CLOSE[1], mean <= FAR
        if frozenset(own) in written or is_close:
            row = {"agents": ", ".join(own), "mean s": f"{mean:.3f}", "least": f"{min(means):.3f}"}
            row["kind"] = "close" if is_close else "far" if is_far else "between" if mean < CLOSE[0] else "too close"
            found[name] = judged(row, {"overlap": is_close or is_far})
    return found


def gains(runs: Iterable[RunDir]) -> dict[str, Row]:
    """What agents gain under GSPO alone, and whether they still gain in the last quarter of their steps."""
    found = {}
    for run in runs:
        config, lines = run.config(), run.metrics()
        if config.algorithm.name != "gspo" or len(lines) < 2:
            continue
        for agent in (agent.id for agent in config.agents):
            measured = [line[f"{agent}/eval_accuracy"] for line in lines if f"{agent}/eval_accuracy" in line]
            rewards = [line.get(f"{agent}/reward", np.nan) for line in lines[1:]]
            tail = rewards[-max(len(rewards) // 4, 3) :]
            rise, error = slope(tail)
            gain, steps = measured[-1] - measured[0], lines[-1]["step"]
            row = {
                "greedy": " ".join(percent(value) for value in measured),
                "gain": f"{100 * gain:+.1f}",
                "reward, first and last quarter": f"{percent(fmean(rewards[: len(tail)]))}, {percent(fmean(tail))}",
                "rise in 100 steps": f"{10_000 * rise:+.1f} ± {10_000 * error:.1f}",
                "steps": steps,
            }
            checks = {"gain": gain >= GAIN, "rise": rise > 0, "steps": steps >= STEPS}
            found[f"{label(run.path)}: {agent}"] = judged(row, checks)
    return found


def slope(values: list[float]) -> tuple[float, float]:
    """Slope of the line through values of successive steps, by least squares, and its standard error."""
    y = np.asarray(values, dtype=float)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    if len(y) < 3:
        return np.nan, np.nan
    rise = float(x @ y / (x @ x))
    rest = y - y.mean() - rise * x
    return rise, float(np.sqrt(rest @ rest / (len(y) - 2) / (x @ x)))


def label(path: Path) -> str:
    """Team, variant and seed of a study's run; else the folder's name."""
    return "/".join(path.parts[-3:]) if path.name.startswith("seed-") else path.name


def judged(row: Row, checks: dict[str, bool]) -> Row:
    return {**row, "missed": ", ".join(name for name, met in checks.items() if not met) or "-"}


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def table(head: str, rows: dict[str, Row]) -> str:
    if not rows:
        return f"({head}: nothing to show)"
    columns = list(next(iter(rows.values())))
    lines = [[head, *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(str(row[column]) for column in columns)] for name, row in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
