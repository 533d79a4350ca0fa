"""What came out of a study: study.json, and the tables at its end."""

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hacrl.live.progress import duration
from hacrl.statistics import bootstrap_interval, effect_size, holm, sign_flip_p, t_interval
from hacrl.study.grid import Run, Study
from hacrl.training.files import STUDY, read_object
from hacrl.training.run_dir import write_atomically

ALL = "all"
"""In place of an agent: the mean over the pair's agents; in place of a pair: over the agents of all pairs."""
OF_AN_AGENT = (
    "rollouts",
    "tokens",
    "tokens_trained",
    "tokens_forward",
    "updates",
    "sample_seconds",
    "learn_seconds",
    "peak_memory_gib",
)
OF_A_RUN = ("rollouts", "tokens", "tokens_trained", "tokens_forward", "updates", "seconds", "peak_memory_gib")
MEASURED = {
    "final_accuracy": "accuracy on held-out problems",
    "final_sampled": "accuracy of sampled answers to held-out problems",
}


# --- study.json ----------------------------------------------------------------------------------------------------


def collect(
    study: Study, running: dict[str, str], errors: dict[str, str], gpu_seconds: dict[str, float] | None = None
) -> dict[str, Any]:
    """Everything that is known: runs, results and accounting of agents, comparisons with the baseline.

    `running`, `errors` and `gpu_seconds` are by name of the run; one in neither of the first two is done, or waits.
    """
    gpu_seconds = gpu_seconds or {}
    summaries = {run.name: run.summary for run in study.runs}
    agents = [
        agent_row(study, pair, variant, agent, summaries)
        for pair in study.pairs
        for variant in study.variants
        for agent in agent_ids(study, pair, variant)
    ]
    return {
        "name": study.config.name,
        "title": study.config.title,
        "metric": study.config.metric,
        "interval": study.config.interval,
        "baseline": study.baseline,
        "pairs": study.pairs,
        "variants": study.variants,
        "seeds": study.config.seeds,
        "runs": [run_row(study, run, summaries[run.name], running, errors, gpu_seconds) for run in study.runs],
        "agents": agents,
        "accounting": [
            cost_row(study, pair, variant, summaries, gpu_seconds) for pair in study.pairs for variant in study.variants
        ],
        "comparisons": compare(study, agents),
    }


def write_results(study: Study, results: dict[str, Any]) -> None:
    write_atomically(
        study.folder / "study.json", json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )


def read_gpu_seconds(study: Study) -> dict[str, float]:
    """By name of the run: what earlier calls of the study wrote down."""
    file = study.folder / "study.json"
    rows = read_object(file, STUDY)["runs"] if file.is_file() else []
    found = {(row.get("pair"), row.get("variant"), row.get("seed")): row.get("gpu_seconds") for row in rows}
    by_name = {run.name: found.get((run.pair, run.variant, run.seed)) for run in study.runs}
    return {name: seconds for name, seconds in by_name.items() if seconds is not None}


def run_row(
    study: Study,
    run: Run,
    summary: dict[str, Any] | None,
    running: dict[str, str],
    errors: dict[str, str],
    gpu_seconds: dict[str, float],
) -> dict[str, Any]:
    status = "done" if summary else "failed" if run.name in errors else running.get(run.name, "waiting")
    return {
        "pair": run.pair,
        "variant": run.variant,
        "seed": run.seed,
        "dir": run.folder.path.relative_to(study.folder).as_posix(),
        "status": status,
        "error": errors.get(run.name) if status == "failed" else None,
        "gpu_seconds": gpu_seconds.get(run.name),
        "summary": summary,
    }


def agent_ids(study: Study, pair: str, variant: str) -> list[str]:
    return [agent.id for agent in study.group(pair, variant)[0].config.agents]


Summaries = dict[str, dict[str, Any] | None]


def done(study: Study, pair: str, variant: str, summaries: Summaries) -> dict[int, dict[str, Any]]:
    """Summaries by seed."""
    found = {run.seed: summaries[run.name] for run in study.group(pair, variant)}
    return {seed: summary for seed, summary in found.items() if summary is not None}


def agent_row(study: Study, pair: str, variant: str, agent: str, summaries: Summaries) -> dict[str, Any]:
    own = {seed: summary["agents"].get(agent, {}) for seed, summary in done(study, pair, variant, summaries).items()}
    metric = study.config.metric
    judged = {seed: row for seed, row in own.items() if row.get(metric) is not None}
    values = {str(seed): row[metric] for seed, row in judged.items()}
    low, high = interval(study, list(values.values()))
    return {
        "pair": pair,
        "variant": variant,
        "agent": agent,
        "start": mean([row.get(metric.replace("final", "start")) for row in judged.values()]),
        "values": values,
        "mean": mean(list(values.values())),
        "low": low,
        "high": high,
        "accounting": {key: mean([row.get(key) for row in own.values()]) for key in OF_AN_AGENT},
    }


def cost_row(
    study: Study, pair: str, variant: str, summaries: Summaries, gpu_seconds: dict[str, float]
) -> dict[str, Any]:
    """Means over the runs that are done."""
    finished = {run.name: summary for run in study.group(pair, variant) if (summary := summaries[run.name])}
    return {
        "pair": pair,
        "variant": variant,
        **{key: mean([total(summary, key) for summary in finished.values()]) for key in OF_A_RUN},
        "gpu_seconds": mean([gpu_seconds.get(name) for name in finished]),
    }


def total(summary: dict[str, Any], key: str) -> float | None:
    """What a run cost; where its summary has no single number, the sum over its agents."""
    if key in summary or key == "peak_memory_gib":
        return summary.get(key)
    parts = [agent.get(key) for agent in summary["agents"].values()]
    return None if None in parts else sum(parts)


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def interval(study: Study, values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    return (bootstrap_interval if study.config.interval == "bootstrap" else t_interval)(values)


def compare(study: Study, agents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every variant with the baseline, seed by seed: by agent, for the pair, over all pairs. Holm over all of it."""
    values = {(row["pair"], row["variant"], row["agent"]): row["values"] for row in agents}
    for pair in study.pairs:
        for variant in study.variants:
            own = [values[pair, variant, agent] for agent in agent_ids(study, pair, variant)]
            values[pair, variant, ALL] = mean_by_seed(own)
    for variant in study.variants:
        values[ALL, variant, ALL] = mean_by_seed([row["values"] for row in agents if row["variant"] == variant])
    rows = []
    for pair in study.pairs:
        of_baseline = agent_ids(study, pair, study.baseline)
        for variant in study.variants:
            ids = agent_ids(study, pair, variant)
            shared = [agent for agent in ids if agent in of_baseline]
            for agent in [*shared, *([ALL] if ids == of_baseline and len(ids) > 1 else [])]:
                if variant != study.baseline:
                    rows.append(compare_values(study, values, pair, agent, variant))
    if len(study.pairs) > 1:
        for variant in study.variants:
            same = all(agent_ids(study, p, variant) == agent_ids(study, p, study.baseline) for p in study.pairs)
            if variant != study.baseline and same:
                rows.append(compare_values(study, values, ALL, ALL, variant))
    for row, p_holm in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p_holm
    return rows


def mean_by_seed(agents: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over agents for each seed that all of them have."""
    common = [seed for seed in agents[0] if all(seed in others for others in agents)]
    return {seed: float(np.mean([agent[seed] for agent in agents])) for seed in common}


def compare_values(
    study: Study, values: dict[tuple[str, str, str], dict[str, float]], pair: str, agent: str, variant: str
) -> dict[str, Any]:
    own, base = values[pair, variant, agent], values[pair, study.baseline, agent]
    differences = [own[seed] - base[seed] for seed in own if seed in base]
    where = {"pair": pair, "agent": agent, "variant": variant, "baseline": study.baseline}
    return {**where, **comparison(study, differences)}


def comparison(study: Study, differences: list[float]) -> dict[str, Any]:
    """Mean, interval and wins of paired differences, one for each seed."""
    differences = [round(difference, 12) for difference in differences]  # equal means may differ by rounding
    count = len(differences)
    low, high = interval(study, differences)
    notes = {
        0: "no seed is done in both: nothing to compare",
        1: "one seed only: no interval and no test, the difference may be chance",
        2: "two seeds only: the interval is of little use and p cannot be below 0.5",
    }
    return {
        "seeds": count,
        "difference": mean(differences),
        "low": low,
        "high": high,
        "p": sign_flip_p(differences) if count > 1 else None,
        "p_holm": None,
        "effect": effect_size(differences),
        "wins": sum(difference > 0 for difference in differences),
        "losses": sum(difference < 0 for difference in differences),
        "note": notes.get(count),
    }


# --- tables --------------------------------------------------------------------------------------------------------


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def print_results(console: Console, results: dict[str, Any]) -> None:
    compared = {(row["pair"], row["agent"], row["variant"]): row for row in results["comparisons"]}
    for pair in results["pairs"]:
        title = (
            f"{results['title'] or results['name']}, {pair}: {MEASURED[results['metric']]}, 95 % intervals over seeds"
        )
        columns = ("seeds", "start", "final", f"difference to {results['baseline']}", "p (Holm)", "effect", "ahead")
        table = new_table(title, ("agent", "variant"), columns)
        rows = [row for row in results["agents"] if row["pair"] == pair]
        for agent in dict.fromkeys(row["agent"] for row in rows):
            for row in rows:
                if row["agent"] == agent:
                    cells = (str(len(row["values"])), number(row["start"]), spread(row, "mean"))
                    table.add_row(
                        agent, row["variant"], *cells, *difference(compared.get((pair, agent, row["variant"])))
                    )
            table.add_section()
        for variant in results["variants"]:
            if (pair, ALL, variant) in compared:
                row = compared[pair, ALL, variant]
                table.add_row("all: mean", variant, str(row["seeds"]), "", "", *difference(row))
        console.print(table)
    if any(key[0] == ALL for key in compared):
        title = f"{results['title'] or results['name']}: mean over the agents of all pairs"
        overall = ("seeds", f"difference to {results['baseline']}", "p (Holm)", "effect", "ahead")
        table = new_table(title, ("variant",), overall)
        for variant in results["variants"]:
            if (ALL, ALL, variant) in compared:
                row = compared[ALL, ALL, variant]
                table.add_row(variant, str(row["seeds"]), *difference(row))
        console.print(table)
    for remark in remarks(results):
        console.print(Text(remark), soft_wrap=True)
    print_accounting(console, results)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def spread(row: dict[str, Any], key: str, scale: float = 1, form: str = ".3f") -> str:
    if row[key] is None:
        return "–"
    text = f"{scale * row[key]:{form}}"
    return text if row["low"] is None else f"{text} [{scale * row['low']:{form}}, {scale * row['high']:{form}}]"


def difference(row: dict[str, Any] | None) -> tuple[str, str, str, str]:
    if row is None:
        return "", "", "", ""
    ahead = f"{row['wins']} of {row['seeds']}" if row["seeds"] else "–"
    effect = "–" if row["effect"] is None else f"{row['effect']:+.1f}"
    return spread(row, "difference", 100, "+.1f"), number(row["p_holm"]), effect, ahead


def remarks(results: dict[str, Any]) -> list[str]:
    """How far the table can be trusted."""
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


def print_accounting(console: Console, results: dict[str, Any]) -> None:
    """What each result cost: neither equal rollouts nor equal updates go without saying."""
    on_gpus = any(row["gpu_seconds"] is not None for row in results["accounting"])
    counted = any(row["tokens_forward"] for row in results["accounting"])  # runs of earlier versions have not
    hidden = {"gpu_seconds": not on_gpus, "tokens_forward": not counted}
    shown = [key for key in COSTS if not hidden.get(key)]
    title = "What it cost: one run, mean over seeds"
    table = new_table(title, ("pair", "variant", "agent"), [COSTS[key] for key in shown])
    for whole in results["accounting"]:
        for row in results["agents"]:
            if (row["pair"], row["variant"]) == (whole["pair"], whole["variant"]):
                own = row["accounting"]
                parts = [own["sample_seconds"], own["learn_seconds"]]
                own = {**own, "seconds": None if None in parts else sum(parts)}
                table.add_row(row["pair"], row["variant"], row["agent"], *(cost(own, key) for key in shown))
        table.add_row(whole["pair"], whole["variant"], "the run", *(cost(whole, key) for key in shown))
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


def cost(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return "–" if value is None else f"{value:.2f}" if key == "peak_memory_gib" else f"{value:,.0f}"


def decisions(study: Study) -> list[str]:
    """What is our choice in some of the runs, because the paper does not settle it."""
    told = []
    for pair in study.pairs:
        for variant in study.variants:
            config = study.group(pair, variant)[0].config
            if decision := config.algorithm.explain(len(config.agents)).decision:
                told.append(f"{pair}, {variant}: {decision}")
    return told


def print_plan(console: Console, study: Study, jobs: int, threads: int) -> None:
    """The grid, what each of its runs will cost, and what is done."""
    columns = ("runs", "done", "rollouts of a run", "rollouts used", "updates")
    table = new_table(study.config.title or study.config.name, ("pair", "variant", "learner"), columns)
    for pair in study.pairs:
        for variant in study.variants:
            runs = study.group(pair, variant)
            finished = sum(run.summary is not None for run in runs)
            first = runs[0]
            counts = (f"{len(runs)}", f"{finished}", f"{first.config.max_steps * first.config.rollouts_per_step:,}")
            for position, agent in enumerate(first.updates):
                shown = (pair, variant, agent, *counts) if position == 0 else ("", "", agent, "", "", "")
                table.add_row(*shown, f"{first.rollouts_used[agent]:,}", f"{first.updates[agent]:,}")
        table.add_section()
    console.print(table)
    missing = sum(run.summary is None for run in study.runs)
    console.print(
        Text(
            f"{len(study.runs)} runs, {missing} to do; {jobs} at once, threads of each: {threads}. "
            f"Baseline: {study.baseline}. Folder: {study.folder}"
        ),
        soft_wrap=True,
    )
    for decision in decisions(study):
        console.print(Text(decision), soft_wrap=True)


def print_end(console: Console, study: Study, results: dict[str, Any]) -> None:
    """What failed, how long it took, and what to do next."""
    failed = [row for row in results["runs"] if row["status"] == "failed"]
    finished = [row["summary"] for row in results["runs"] if row["status"] == "done"]
    seconds = sum(summary["seconds"] for summary in finished)
    lines = [
        f"{len(finished)} of {len(results['runs'])} runs done, {duration(seconds)} of training. Files: {study.folder}"
    ]
    lines += decisions(study)
    for row in failed:
        log = study.folder / "logs" / row["pair"] / row["variant"] / f"seed-{row['seed']}.log"
        lines.append(f"Failed: {row['pair']}/{row['variant']}/seed-{row['seed']}, see {log}")
    if failed:
        lines.append(f"Try the failed ones again with: hacrl study {study.folder}")
    elif importlib.util.find_spec("plotly") is not None:  # what a report needs
        lines.append(f"Look at it with: hacrl report {study.folder}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
