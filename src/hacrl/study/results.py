"""The results of a study: study.json, and the tables that are printed at its end."""

import importlib.util
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from hacrl.live.progress import duration
from hacrl.statistics import bootstrap_interval, effect_size, holm, sign_flip_p, t_interval
from hacrl.study.grid import Run, Study
from hacrl.terminal import decimals, new_table, say
from hacrl.training.records import Costs, read_study
from hacrl.training.run_dir import write_atomically

Row = dict[str, Any]

ALL = "all"
"""Stands for the mean over the agents of a team or, in place of a team, over the agents of all teams."""
OF_A_RUN = (*Costs.__annotations__, "seconds", "peak_memory_gib")
OF_AN_AGENT = (*Costs.__annotations__, "sample_seconds", "learn_seconds", "peak_memory_gib")
MEASURED = {
    "final_accuracy": "accuracy on held-out problems",
    "final_sampled": "accuracy of sampled answers to held-out problems",
}


# --- study.json ----------------------------------------------------------------------------------------------------


def collect(
    study: Study, running: Container[str], errors: dict[str, str], gpu_seconds: dict[str, float] | None = None
) -> Row:
    """Collect the results so far: runs, results and accounting of agents, comparisons with the baseline.

    `running`, `errors` and `gpu_seconds` are by name of the run. A run in neither of the first two is done or waits.
    """
    gpu_seconds = gpu_seconds or {}
    summaries = {run.name: run.summary for run in study.runs}
    agents, accounting = [], []
    for (team, variant), group in study.groups.items():
        place = {"team": team, "variant": variant}
        finished = {run.seed: summary for run in group if (summary := summaries[run.name])}
        agents += [{**place, **agent_row(study, agent.id, finished)} for agent in group[0].config.agents]
        costs = {key: mean([total(summary, key) for summary in finished.values()]) for key in OF_A_RUN}
        on_gpus = [gpu_seconds.get(run.name) for run in group if run.seed in finished]
        accounting.append({**place, **costs, "gpu_seconds": mean(on_gpus)})
    return {
        "name": study.config.name,
        "title": study.config.title,
        "metric": study.config.metric,
        "interval": study.config.interval,
        "baseline": study.baseline,
        "teams": study.teams,
        "variants": study.variants,
        "seeds": study.config.seeds,
        "runs": [
            {
                **run_row(study, run, summaries[run.name], running, errors),
                "gpu_seconds": gpu_seconds.get(run.name),
                "summary": summaries[run.name],
            }
            for run in study.runs
        ],
        "agents": agents,
        "accounting": accounting,
        "comparisons": compare(study, agents),
    }


def run_row(study: Study, run: Run, summary: Row | None, running: Container[str], errors: dict[str, str]) -> Row:
    """Identity and status of a run."""
    failed = summary is None and run.name in errors
    going_on = "running" if run.name in running else "waiting"
    return {
        "team": run.team,
        "variant": run.variant,
        "seed": run.seed,
        "dir": run.folder.path.relative_to(study.folder).as_posix(),
        "status": "done" if summary is not None else "failed" if failed else going_on,
        "error": errors[run.name] if failed else None,
    }


def write_results(study: Study, results: Row) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(study.folder / "study.json", text + "\n")


def read_gpu_seconds(study: Study) -> dict[str, float]:
    """GPU-seconds by name of the run, as earlier calls of the study wrote them down."""
    file = study.folder / "study.json"
    rows = read_study(file)["runs"] if file.exists() else []
    found = {run_name(row): seconds for row in rows if (seconds := row.get("gpu_seconds")) is not None}
    return {run.name: found[run.name] for run in study.runs if run.name in found}


def run_name(row: Mapping[str, Any]) -> str:
    """`Run.name` of a row of the results."""
    return f"{row.get('team')}/{row.get('variant')}/seed-{row.get('seed')}"


def agent_row(study: Study, agent: str, finished: dict[int, Row]) -> Row:
    """What an agent has reached in each seed that is done, and what that has cost on average."""
    metric = study.config.metric
    own = {seed: summary["agents"].get(agent, {}) for seed, summary in finished.items()}
    judged = {seed: row for seed, row in own.items() if row.get(metric) is not None}
    values = {str(seed): row[metric] for seed, row in judged.items()}
    return {
        "agent": agent,
        "start": mean([row.get(metric.replace("final", "start")) for row in judged.values()]),
        "values": values,
        **with_interval(study, "mean", list(values.values())),
        "accounting": {key: mean([row.get(key) for row in own.values()]) for key in OF_AN_AGENT},
    }


def total(summary: Row, key: str) -> float | None:
    """What a run cost; where its summary has no single number, the sum over its agents."""
    if key in summary or key == "peak_memory_gib":
        return summary.get(key)
    parts = [agent.get(key) for agent in summary["agents"].values()]
    return None if None in parts else sum(parts)


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def with_interval(study: Study, name: str, values: Sequence[float]) -> Row:
    """The mean of values, under this name, with its interval."""
    interval = bootstrap_interval if study.config.interval == "bootstrap" else t_interval
    low, high = interval(values) if len(values) > 1 else (None, None)
    return {name: mean(values), "low": low, "high": high}


def compare(study: Study, agents: list[Row]) -> list[Row]:
    """Compare every variant with the baseline, seed by seed: for each agent, for each team, and over all teams.

    Holm's correction covers all of these comparisons.
    """
    ids = {place: [agent.id for agent in group[0].config.agents] for place, group in study.groups.items()}
    others = [variant for variant in study.variants if variant != study.baseline]
    same = {(team, variant) for team, variant in ids if ids[team, variant] == ids[team, study.baseline]}
    places = []
    for team in study.teams:
        for variant in others:
            shared = [agent for agent in ids[team, variant] if agent in ids[team, study.baseline]]
            both = [ALL] if (team, variant) in same and len(shared) > 1 else []
            places += [(team, agent, variant) for agent in [*shared, *both]]
    if len(study.teams) > 1:
        places += [(ALL, ALL, variant) for variant in others if all((team, variant) in same for team in study.teams)]
    rows = []
    for team, agent, variant in places:
        own, base = (
            mean_by_seed([row["values"] for row in agents if is_at(row, team, agent, label)])
            for label in (variant, study.baseline)
        )
        differences = [own[seed] - base[seed] for seed in own if seed in base]
        place = {"team": team, "agent": agent, "variant": variant, "baseline": study.baseline}
        rows.append({**place, **comparison(study, differences)})
    for row, p_holm in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p_holm
    return rows


def is_at(row: Row, team: str, agent: str, variant: str) -> bool:
    """Whether an agent's row counts for a comparison, in which `ALL` stands for every team or agent."""
    return row["variant"] == variant and team in (row["team"], ALL) and agent in (row["agent"], ALL)


def mean_by_seed(agents: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over agents for each seed that all of them have."""
    common = [seed for seed in agents[0] if all(seed in others for others in agents)]
    return {seed: float(np.mean([agent[seed] for agent in agents])) for seed in common}


def comparison(study: Study, differences: list[float]) -> Row:
    """Mean, interval and wins of paired differences, one for each seed."""
    differences = [round(difference, 12) for difference in differences]  # equal means may differ by rounding
    count = len(differences)
    notes = {
        0: "no seed is done in both: nothing to compare",
        1: "one seed only: no interval and no test, the difference may be chance",
        2: "two seeds only: the interval is of little use and p cannot be below 0.5",
    }
    return {
        "seeds": count,
        **with_interval(study, "difference", differences),
        "p": sign_flip_p(differences) if count > 1 else None,
        "p_holm": None,
        "effect": effect_size(differences),
        "wins": sum(difference > 0 for difference in differences),
        "losses": sum(difference < 0 for difference in differences),
        "note": notes.get(count),
    }


# --- tables --------------------------------------------------------------------------------------------------------

LAYOUT: dict[str, Any] = {"left": ("team", "variant", "agent", "learner"), "overflow": "fold"}


def print_results(console: Console, results: Row) -> None:
    """Print the tables of accuracies and differences, how far they can be trusted, and what they cost."""
    compared = {(row["team"], row["agent"], row["variant"]): row for row in results["comparisons"]}
    name = results["title"] or results["name"]
    columns = (f"difference to {results['baseline']}", "p (Holm)", "effect", "ahead")
    for team in results["teams"]:
        title = f"{name}, {team}: {MEASURED[results['metric']]}, 95 % intervals over seeds"
        table = new_table(title, "agent", "variant", "seeds", "start", "final", *columns, **LAYOUT)
        rows = [row for row in results["agents"] if row["team"] == team]
        for agent in dict.fromkeys(row["agent"] for row in rows):
            for row in (row for row in rows if row["agent"] == agent):
                cells = (str(len(row["values"])), decimals(row["start"]), spread(row, "mean"))
                table.add_row(agent, row["variant"], *cells, *difference(compared.get((team, agent, row["variant"]))))
            table.add_section()
        for variant in results["variants"]:
            if row := compared.get((team, ALL, variant)):
                table.add_row("all: mean", variant, str(row["seeds"]), "", "", *difference(row))
        console.print(table)
    overall = {variant: row for (team, _, variant), row in compared.items() if team == ALL}
    if overall:
        table = new_table(f"{name}: mean over the agents of all teams", "variant", "seeds", *columns, **LAYOUT)
        for variant, row in overall.items():
            table.add_row(variant, str(row["seeds"]), *difference(row))
        console.print(table)
    say(console, *remarks(results))
    print_accounting(console, results)


def spread(row: Row, key: str, scale: float = 1, form: str = ".3f") -> str:
    """A value with its interval, as text."""
    if row[key] is None:
        return "–"
    text = f"{scale * row[key]:{form}}"
    return text if row["low"] is None else f"{text} [{scale * row['low']:{form}}, {scale * row['high']:{form}}]"


def difference(row: Row | None) -> tuple[str, str, str, str]:
    """The table cells of a comparison with the baseline."""
    if row is None:
        return "", "", "", ""
    ahead = f"{row['wins']} of {row['seeds']}" if row["seeds"] else "–"
    effect = "–" if row["effect"] is None else f"{row['effect']:+.1f}"
    return spread(row, "difference", 100, "+.1f"), decimals(row["p_holm"]), effect, ahead


def remarks(results: Row) -> list[str]:
    """Sentences that say how far the table can be trusted."""
    found = ["Differences are in points, seed by seed; p is an exact sign-flip test, corrected by Holm over the table."]
    counts = {row["seeds"] for row in results["comparisons"] if row["seeds"] > 1}
    if counts and min(counts) < 6:
        fewest = min(counts)
        found.append(
            f"With {fewest} seeds p cannot be below {2 / 2**fewest:g}, whatever the difference; six give 0.03."
        )
    found += sorted({f"Note: {row['note']}." for row in results["comparisons"] if row["note"]})
    return found


COSTS = {
    "rollouts": "rollouts",
    "tokens": "tokens sampled",
    "tokens_trained": "tokens trained",
    "tokens_forward": "tokens forward",
    "updates": "updates",
    "seconds": "seconds",
    "gpu_seconds": "GPU-seconds",
    "peak_memory_gib": "peak memory (GiB)",
}


def print_accounting(console: Console, results: Row) -> None:
    """Print the table of what each result cost: variants need not have had equal rollouts or equal updates."""
    on_gpus = any(row["gpu_seconds"] is not None for row in results["accounting"])
    counted = any(row["tokens_forward"] for row in results["accounting"])  # earlier versions did not count them
    hidden = {"gpu_seconds": not on_gpus, "tokens_forward": not counted}
    shown = [key for key in COSTS if not hidden.get(key)]
    title = "What it cost: one run, mean over seeds"
    table = new_table(title, "team", "variant", "agent", *(COSTS[key] for key in shown), **LAYOUT)
    for whole in results["accounting"]:
        for row in results["agents"]:
            if (row["team"], row["variant"]) == (whole["team"], whole["variant"]):
                own = row["accounting"]
                parts = [own["sample_seconds"], own["learn_seconds"]]
                own = {**own, "seconds": None if None in parts else sum(parts)}
                table.add_row(row["team"], row["variant"], row["agent"], *(cost(own, key) for key in shown))
        table.add_row(whole["team"], whole["variant"], "the run", *(cost(whole, key) for key in shown))
        table.add_section()
    console.print(table)
    notes = [
        "Seconds of an agent are for sampling and learning; of the run, all of its training on the wall clock, while "
        "other runs may have shared the machine. Memory of an agent is that of a GPU."
    ]
    if counted:
        notes.append(
            "Tokens forward went through a model outside sampling; tokens trained, a part of them, through a backward "
            "pass too. Scoring other agents' rollouts counts as learning."
        )
    if on_gpus:
        notes.append("GPU-seconds are what the run had of its GPU, shared evenly with those beside it.")
    console.print(" ".join(notes), highlight=False)


def cost(row: Row, key: str) -> str:
    value = row.get(key)
    return "–" if value is None else f"{value:.2f}" if key == "peak_memory_gib" else f"{value:,.0f}"


def decisions(study: Study) -> list[str]:
    """Sentences about choices of this project that runs follow, because the paper leaves them open."""
    told = []
    for (team, variant), (first, *_) in study.groups.items():
        if decision := first.config.algorithm.explain(len(first.config.agents)).decision:
            told.append(f"{team}, {variant}: {decision}")
    return told


def print_grid(console: Console, study: Study, jobs: int, threads: int) -> None:
    """Print the grid, what each of its runs will cost, and how many are done."""
    columns = ("runs", "done", "rollouts of a run", "rollouts used", "updates")
    table = new_table(study.config.title or study.config.name, "team", "variant", "learner", *columns, **LAYOUT)
    for (team, variant), runs in study.groups.items():
        first, finished = runs[0], sum(run.summary is not None for run in runs)
        counts = (f"{len(runs)}", f"{finished}", f"{first.config.max_steps * first.config.rollouts_per_step:,}")
        for position, agent in enumerate(first.updates):
            shown = (team, variant, agent, *counts) if position == 0 else ("", "", agent, "", "", "")
            table.add_row(*shown, f"{first.rollouts_used[agent]:,}", f"{first.updates[agent]:,}")
        if variant == study.variants[-1]:
            table.add_section()
    console.print(table)
    missing = sum(run.summary is None for run in study.runs)
    say(
        console,
        f"{len(study.runs)} runs, {missing} to do; {jobs} at once, threads of each: {threads}. "
        f"Baseline: {study.baseline}. Folder: {study.folder}",
        *decisions(study),
    )


def print_end(console: Console, study: Study, results: Row) -> None:
    """Print what failed, how long the runs took, and what to do next."""
    failed = [row for row in results["runs"] if row["status"] == "failed"]
    seconds = [row["summary"]["seconds"] for row in results["runs"] if row["status"] == "done"]
    done = f"{len(seconds)} of {len(results['runs'])} runs done, {duration(sum(seconds))} of training."
    lines = [f"{done} Files: {study.folder}", *decisions(study)]
    lines += [f"Failed: {run_name(row)}, see {study.folder / 'logs' / run_name(row)}.log" for row in failed]
    if failed:
        lines.append(f"Try the failed ones again with: hacrl study {study.folder}")
    elif importlib.util.find_spec("plotly") is not None:  # what a report needs
        lines.append(f"Look at it with: hacrl report {study.folder}")
    say(console, *lines)
