"""What a report shows of a run or a study, as plain data: read from their files and thinned out.

Earlier versions and unfinished runs lack some of it: a series that is not there is left out, a number that is not there
is None.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hacrl.algorithms import ALGORITHMS, Explanation
from hacrl.config import parse_algorithm
from hacrl.config.settings import read_source
from hacrl.config.task import part_label
from hacrl.errors import UserError
from hacrl.files import mismatch
from hacrl.study.results import mean
from hacrl.training.records import Costs, read_study
from hacrl.training.run_dir import RunDir

Data = dict[str, Any]

RUN_POINTS = 1_000
"""Points of a curve in the report of one run."""
STUDY_POINTS = 200
"""Points of a curve of each run of a study."""

AGENT_SERIES = ("reward", "capability", "grad_cosine", "gradient_mass", "num_rollouts", "num_updates")
PAIR_SERIES = (
    *("ratio_mean", "ratio_q05", "ratio_q25", "ratio_q50", "ratio_q75", "ratio_q95", "lower_mean", "upper_mean"),
    *("kept", "kept_positive", "kept_negative", "gradient_mass", "omega"),
)
CUMULATIVE = ("num_rollouts", "num_updates", "elapsed", "step")
"""Counts since the start: where steps are merged, the last one is kept, not the mean."""
PHASES = {"sampling": ["time/sample"], "learning": ["time/score", "time/learn"], "evaluating": ["time/eval"]}
BACKWARD = ("tokens_trained", "imitation/tokens")
FORWARD = ("tokens_forward", "tokens_scored", "imitation/tokens")
EVALUATION = ("step", "rollouts", "updates", "seconds", "accuracy")
"""What is told of each evaluation."""
SHOWN_PARTS = 4
"""How many parts of a mixture a title names."""
CONFIG = {"algorithm": {"name": str}, "agents?": list, "task?": object}
"""What a report needs of a config."""
REASONS = {"verifier_errors": "the verifier failed", "verifier_timeouts": "the verifier took too long"}


# --- one run ---------------------------------------------------------------------------------------


def run_data(path: Path, points: int = RUN_POINTS) -> Data:
    """Everything about one run except its rollouts."""
    run = RunDir.open(path)
    config, _ = read_source(run.config_file)
    if fault := mismatch(config, CONFIG):
        raise UserError(f"{run.config_file} is not the config of a run: {fault}. Fix the file.")
    lines, summary = run.metrics(), run.summary() or {}
    name = config["algorithm"]["name"]
    known = ALGORITHMS.get(name)
    agents = [agent for agent in config.get("agents") or [] if isinstance(agent, dict) and "id" in agent]
    models = {str(agent["id"]): str(agent.get("model", "")) for agent in agents}
    ids = list(models)
    outside = [str(source["id"]) for source in config.get("sources") or [] if isinstance(source, dict)]
    names = [*ids, *outside]
    steps = [line for line in lines if line["step"] > 0]
    told = [agent_data(agent, models[agent], lines, summary) for agent in ids]
    return {
        "name": path.resolve().name,
        "algorithm": name,
        "shares": known is None or known.shares_rollouts,
        "explanation": explanation_of(config["algorithm"], len(names)),
        "task": describe_task(config.get("task")),
        "seed": number(config.get("seed")),
        "max_steps": number(config.get("max_steps")),
        "finished": bool(summary),
        "config": run.config_file.read_text(encoding="utf-8", errors="replace"),
        "agents": told,
        "sources": [*told, *(source_data(source, lines) for source in outside)],
        "totals": totals(told, lines, summary),
        "evals": evaluations(ids, lines),
        "series": thin(step_series(ids, names, steps, bool(config.get("overlap"))), points),
        "merged": math.ceil(len(steps) / points) if steps else 1,
        "mass": {learner: {source: mass(learner, source, steps) for source in names} for learner in ids},
        "lost": lost(ids, names, steps),
    }


def explanation_of(section: Any, num_agents: int) -> dict[str, str | None]:
    """What the algorithm says about its own figures; None where this version does not know it or its options."""
    try:
        algorithm = parse_algorithm(section)
    except ValueError:
        return {**asdict(Explanation()), "imitation": None}
    return {**asdict(algorithm.explain(num_agents)), "imitation": algorithm.imitation.sentence()}


def describe_task(task: Any) -> str:
    """A few words for a task, from its section of a config."""
    if not isinstance(task, dict):
        return "unknown task"
    if task.get("name"):
        return str(task["name"])
    if task.get("mixture"):
        names = [part_label(part.get("id"), part.get("name"), part.get("train")) for part in task["mixture"]]
        left = len(names) - SHOWN_PARTS
        return " + ".join([*names[:SHOWN_PARTS], *([f"{left} more"] if left > 0 else [])])
    rewards = [str(reward.get("name") if isinstance(reward, dict) else reward) for reward in task.get("reward") or []]
    return f"{Path(str(task.get('train'))).name}, reward {' + '.join(rewards)}"


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def column(lines: Sequence[Data], *names: str) -> list[float | None]:
    """All values of some metrics, a metric after the other."""
    return [line.get(name) for name in names for line in lines]


def added(values: Iterable[float | None]) -> float | None:
    """The sum of what is known, None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def agent_data(agent: str, model: str, lines: Sequence[Data], summary: Data) -> Data:
    """An agent's accuracies and what they cost, by the summary if there is one, otherwise by the metrics."""

    def summed(*names: str) -> float | None:
        return added(column(lines, *(f"{agent}/{name}" for name in names)))

    accuracy = [(line["step"], line[name]) for line in lines if line.get(name := f"{agent}/eval_accuracy") is not None]
    best = max(accuracy, key=lambda pair: (pair[1], -pair[0]), default=(None, None))
    found: Data = {
        "start_accuracy": accuracy[0][1] if accuracy else None,
        "final_accuracy": accuracy[-1][1] if accuracy else None,
        "rollouts": last(column(lines, f"{agent}/num_rollouts")),
        "tokens": last(column(lines, f"{agent}/num_tokens")),
        "tokens_trained": summed(*BACKWARD),
        "tokens_forward": summed(*FORWARD),
        "updates": last(column(lines, f"{agent}/num_updates")),
        "sample_seconds": summed("time/sample"),
        "learn_seconds": summed(*PHASES["learning"]),
        "peak_memory_gib": None,
    }
    told = updated(found, summary.get("agents", {}).get(agent, {}))
    start, final = told.pop("start_accuracy"), told.pop("final_accuracy")
    return {"id": agent, "model": model, "best": best[1], "best_step": best[0], "start": start, "final": final, **told}


def source_data(source: str, lines: Sequence[Data]) -> Data:
    """What a source gave that is no agent, over the whole run."""
    counts = ("prompts", "rollouts", "without_logps", "requests", "failed", "late", "prompt_tokens", "answer_tokens")
    found: Data = {name: added(column(lines, f"{source}/{name}")) for name in counts}
    found["not_sent"] = added(column(lines, f"{source}/skipped", f"{source}/over_budget"))
    means = {"reward": ("reward", "rollouts"), "latency": ("time/latency", "requests"), "joined": ("joined", "prompts")}
    for name, (metric, weight) in means.items():
        pairs = zip(column(lines, f"{source}/{metric}"), column(lines, f"{source}/{weight}"), strict=True)
        known = [(value, count) for value, count in pairs if value is not None and count]
        total = sum(count for _, count in known)
        found[name] = sum(value * count for value, count in known) / total if total else None
    return {"id": source, **found}


def totals(agents: Sequence[Data], lines: Sequence[Data], summary: Data) -> Data:
    """What the whole run cost, by the summary if there is one."""
    found: Data = {
        "steps": lines[-1]["step"] if lines else 0,
        "seconds": last(column(lines, "time/elapsed")) or added(column(lines, "step_time")),
        "wall_seconds": None,
        **{name: added(agent[name] for agent in agents) for name in Costs.__annotations__},
        "peak_memory_gib": None,
        "best_step": None,
    }
    return updated(found, summary)


def updated(found: Data, told: Data) -> Data:
    """What was found, in its order, with what a summary tells in its place."""
    return {name: value if told.get(name) is None else told[name] for name, value in found.items()}


def elapsed(lines: Sequence[Data]) -> list[float]:
    """Seconds of training at the end of each line's step."""
    clock, seconds = 0.0, []
    for line in lines:
        told = line.get("time/elapsed")
        clock = told if told is not None else clock + (line.get("step_time") or 0.0)
        seconds.append(clock)
    return seconds


def evaluations(ids: Sequence[str], lines: Sequence[Data]) -> Data:
    """Held-out accuracy of each agent, with the rollouts of all agents, its own updates and the time until then."""
    found: Data = {}
    for agent in ids:
        rows = [
            (
                line["step"],
                added(line.get(f"{other}/num_rollouts") for other in ids) or 0,
                line.get(f"{agent}/num_updates") or 0,
                seconds,
                line[f"{agent}/eval_accuracy"],
            )
            for line, seconds in zip(lines, elapsed(lines), strict=True)
            if line.get(f"{agent}/eval_accuracy") is not None
        ]
        columns = zip(*(rows[i] for i in spread(len(rows), STUDY_POINTS)), strict=True)
        found[agent] = {name: [*map(rounded, own)] for name, own in zip(EVALUATION, columns, strict=False)} or None
    return found


def step_series(
    ids: Sequence[str], sources: Sequence[str], steps: Sequence[Data], overlap: bool
) -> dict[str, list[float | None]]:
    """The curves of a run, a value for each step; those without any value are left out."""
    names = [*AGENT_SERIES, *(f"from_{source}/{name}" for source in sources for name in PAIR_SERIES)]
    series: dict[str, list[float | None]] = {"step": column(steps, "step"), "elapsed": [*elapsed(steps)]}
    series |= {f"{agent}/{name}": column(steps, f"{agent}/{name}") for agent in ids for name in names}
    series |= {f"phase/{name}": [*values] for name, values in phase_seconds(ids, steps, overlap).items()}
    series |= {f"lost/{reason}": [*values] for reason, values in lost_by_step(ids, sources, steps).items()}
    return {name: values for name, values in series.items() if any(value is not None for value in values)}


def phase_seconds(ids: Sequence[str], steps: Sequence[Data], overlap: bool = False) -> dict[str, list[float]]:
    """Seconds of each step by phase. Agents side by side take as long as the slowest, agents in turn the sum.

    With `overlap` agents go on while answers are verified, else nobody does.
    """
    by_agent = {
        phase: [[added(line.get(f"{agent}/{name}") for name in names) or 0.0 for agent in ids] for line in steps]
        for phase, names in PHASES.items()
    }
    whole, verifying = ([value or 0.0 for value in column(steps, name)] for name in ("step_time", "time/verify"))
    busy = sum(sum(row) for rows in by_agent.values() for row in rows)
    in_turn = busy if overlap else busy + sum(verifying)
    join = max if in_turn > sum(whole) else sum
    seconds = {phase: [float(join(row)) if row else 0.0 for row in rows] for phase, rows in by_agent.items()}
    seconds["verifying"] = verifying
    told = [sum(values[i] for values in seconds.values()) for i in range(len(steps))]
    seconds["other"] = [max(total - part, 0.0) for total, part in zip(whole, told, strict=True)]
    return {phase: seconds[phase] for phase in ("sampling", "verifying", "learning", "evaluating", "other")}


def lost_in(line: Data, ids: Sequence[str], sources: Sequence[str]) -> Counter[tuple[str, str, str]]:
    """(learner or "", source, reason) of the rollouts of a step that could not be used, with their number."""
    found: Counter[tuple[str, str, str]] = Counter()
    for source in sources:
        open_ones = int(line.get(f"{source}/unverified") or 0)
        for name, reason in REASONS.items():
            count = int(line.get(f"{source}/{name}") or 0)
            found["", source, reason] += count
            open_ones -= count
        found["", source, "no verdict"] += open_ones
    for learner in ids:
        for source in sources:
            place = f"{learner}/dropped/" if learner == source else f"{learner}/from_{source}/dropped/"
            for name in line:
                if name.startswith(place):
                    found[learner, source, name.removeprefix(place)] += int(line[name] or 0)
    return +found


def lost(ids: Sequence[str], sources: Sequence[str], steps: Sequence[Data]) -> list[Data]:
    """Rollouts of the whole run that nobody, or one learner, could use: by source and reason."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in steps:
        found += lost_in(line, ids, sources)
    names = ("learner", "source", "reason")
    return [{**dict(zip(names, key, strict=True)), "count": count} for key, count in found.most_common()]


def lost_by_step(ids: Sequence[str], sources: Sequence[str], steps: Sequence[Data]) -> dict[str, list[float]]:
    """Rollouts that could not be used, by reason, a number for each step."""
    series: dict[str, list[float]] = {}
    for i, line in enumerate(steps):
        for (learner, _, reason), count in lost_in(line, ids, sources).items():
            kind = ("dropped: " if learner else "unverified: ") + reason
            series.setdefault(kind, [0.0] * len(steps))[i] += count
    return dict(sorted(series.items()))


def mass(learner: str, source: str, steps: Sequence[Data]) -> float | None:
    """Gradient mass of a source in the updates of a learner, over the whole run."""
    name = f"{learner}/gradient_mass" if learner == source else f"{learner}/from_{source}/gradient_mass"
    total: float | None = rounded(added(column(steps, name)))
    return total


# --- fewer points ----------------------------------------------------------------------------------


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` positions of `count`, evenly spread, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)})


def thin(series: dict[str, list[float | None]], points: int) -> dict[str, list[float | None]]:
    """At most so many points a curve: the mean of as many steps in a row, or the last of a running count."""
    thinned = {}
    for name, values in series.items():
        width = max(math.ceil(len(values) / points), 1)
        parts = [values[i : i + width] for i in range(0, len(values), width)]
        cumulative = name.rpartition("/")[2] in CUMULATIVE
        thinned[name] = [rounded(last(part) if cumulative or width == 1 else mean(part)) for part in parts]
    return thinned


def rounded(value: Any) -> Any:
    """A float with five digits, which are more than a curve can show."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")


# --- a study ---------------------------------------------------------------------------------------


def study_data(folder: Path) -> tuple[Data, list[Path | None]]:
    """A study with the data of its runs, and the folders of these runs."""
    path = folder / "study.json"
    study = read_study(path)
    runs, folders = [], []
    for entry in study["runs"]:
        run_folder = folder / str(entry.get("dir"))
        if not run_folder.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path}: the run {entry.get('dir')} lies outside of the study's folder. Fix `dir`.")
        there = (run_folder / "config.yaml").is_file()
        data = run_data(run_folder, STUDY_POINTS) if there else None
        label = {name: entry.get(name) for name in ("team", "variant", "seed", "status", "error")}
        runs.append({**label, "data": data})
        folders.append(run_folder if there else None)
    kept = ("name", "title", "metric", "baseline", "teams", "variants", "seeds", "agents", "accounting", "comparisons")
    return {**{name: study.get(name) for name in kept}, "runs": runs, "curves": study_curves(runs)}, folders


def study_curves(runs: Sequence[Data]) -> list[Data]:
    """Accuracy of each team, agent and variant at each evaluation: mean, lowest and highest over the finished seeds."""
    groups: dict[tuple[Any, Any], list[Data]] = {}
    for run in runs:
        if run["status"] == "done" and run["data"]:
            groups.setdefault((run["team"], run["variant"]), []).append(run["data"])
    curves = []
    for (team, variant), members in groups.items():
        for agent in [agent["id"] for agent in members[0]["agents"]]:
            tables = [
                {row[0]: row for row in zip(*evals.values(), strict=True)}
                for data in members
                if (evals := data["evals"].get(agent))
            ]
            steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
            if not steps:
                continue
            cube = np.array([[table[step] for step in steps] for table in tables], dtype=float)
            shown = dict(zip((*EVALUATION[:-1], "mean"), cube.mean(axis=0).T, strict=True))
            shown |= {"low": cube[:, :, -1].min(axis=0), "high": cube[:, :, -1].max(axis=0)}
            curve: Data = {"team": team, "variant": variant, "agent": agent, "seeds": len(tables)}
            curve |= {name: [*map(rounded, column.tolist())] for name, column in shown.items()}
            curves.append(curve)
    return curves
