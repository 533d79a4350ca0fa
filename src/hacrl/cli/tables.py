"""What commands print as tables."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hacrl.config import RunConfig


def print_models(console: Console) -> None:
    from hacrl.agents.zoo.catalog import catalog
    from hacrl.config.settings import PRESETS, preset_names, read_source

    table = Table(title="The zoo: tiny models for experiments on a laptop; validation accuracy", title_justify="left")
    for name in ("model", "architecture", "tokenizer", "parameters", "sampled", "greedy"):
        left = name in ("model", "architecture", "tokenizer")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "model")
    for row in catalog():
        accuracies = [f"{accuracy:.2f}" for accuracy in (row.sampled_accuracy, row.validation_accuracy)]
        table.add_row(f"zoo:{row.name}", row.architecture, row.tokenizer, f"{row.parameters:,}", *accuracies)
    console.print(table)
    presets = Table(title="Presets", title_justify="left")
    for name in ("preset", "agents", "about"):
        presets.add_column(name, no_wrap=name == "preset", overflow="fold")
    for name in preset_names():
        data, _ = read_source(name)
        first_line = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        presets.add_row(name, " + ".join(agent["model"] for agent in data["agents"]), first_line.removeprefix("# "))
    console.print(presets)


def print_plan(console: Console, config: RunConfig) -> None:
    from hacrl.live.browse import prompt_text, shortened
    from hacrl.live.progress import duration
    from hacrl.training.plan import first_problem, plan, step_seconds

    plans = plan(config)
    console.print(Text(config.to_yaml()), soft_wrap=True)
    table = Table(title="Per step", title_justify="left")
    for name in ("agent", "parameters", "rollouts sampled", "rollouts used", "updates"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for row in plans:
        parameters = f"{row.parameters:,}" + (f" + {row.adapters:,} in adapters" if row.adapters else "")
        counts = (row.rollouts_sampled, row.rollouts_used, row.updates)
        table.add_row(row.id, parameters, *[f"{count:,}" for count in counts])
    console.print(table)
    for row in plans:
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in row.memory.items())
        memory = f"{row.id}: memory (GiB, estimate) {sum(row.memory.values()):.2f} = {parts}"
        if row.host_memory:
            memory += f"; {row.host_memory:.2f} in the computer's memory"
        console.print(memory, highlight=False, markup=False, soft_wrap=True)
    times = Table(title="Seconds of a step (estimate)", title_justify="left")
    for name in ("agent", "device", "sampling", "learning"):
        times.add_column(name, justify="right" if name.endswith("ing") else "left")
    for row in plans:
        times.add_row(row.id, row.device, f"{row.sampling:,.2f}", f"{row.learning:,.2f}")
    console.print(times)
    seconds = step_seconds(config, plans)
    console.print(
        f"{config.max_steps} steps of {config.prompts_per_step} prompts: "
        f"{config.max_steps * config.rollouts_per_step:,} rollouts in all.\n"
        f"All agents: {seconds:,.2f} s a step, {duration(config.max_steps * seconds)} in all, if every completion has "
        "its full length and no work can be saved; verification, evaluation and checkpoints come on top."
    )
    problem, remarks = first_problem(config)
    told = config.algorithm.imitation.sentence(), config.algorithm.explain(len(config.agents)).decision
    remarks += [sentence for sentence in told if sentence]
    for remark in remarks:
        console.print(f"note {remark}", highlight=False, markup=False, soft_wrap=True)
    if problem is not None:
        console.print(Panel(prompt_text(problem.prompt), title="the first prompt", title_align="left"))
        console.print(Text.assemble("Its answer: ", shortened(problem.answer)))
    console.print(
        "The settings are valid. Tokenizers, lengths of prompts and devices are looked at when the run starts."
    )


def print_summary(console: Console, run_dir: Path, summary: dict[str, Any]) -> None:
    table = Table(title=f"{summary.get('algorithm')}, {summary['steps']} steps", title_justify="left")
    for name in ("agent", "start", "final", "rollouts", "updates", "unverified", "dropped"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent_id, agent in summary["agents"].items():
        accuracies = [
            "–" if agent.get(key) is None else f"{agent[key]:.3f}" for key in ("start_accuracy", "final_accuracy")
        ]
        counts = [f"{agent.get(name, 0):,}" for name in ("rollouts", "updates", "unverified", "dropped")]
        table.add_row(agent_id, *accuracies, *counts)
    console.print(table)
    look = f"Run: {run_dir}   look at it with: hacrl rollouts {run_dir}"
    console.print(look, highlight=False, markup=False, soft_wrap=True)


def print_benchmarks(console: Console, results: dict[str, Any], folder: Path, names: list[str]) -> None:
    def cells(figure: dict[str, Any]) -> list[str]:
        numbers = ["–" if figure[name] is None else f"{figure[name]:.3f}" for name in ("value", "low", "high")]
        return [numbers[0], f"{numbers[1]} – {numbers[2]}" if figure["low"] is not None else "–"]

    for agent_id, agent in results["agents"].items():
        table = Table(title=Text(f"{agent_id}: {agent['model']}"), title_justify="left")
        for name in ("benchmark", "problems", "figure", "value", "95 % interval"):
            table.add_column(name, justify="left" if name in ("benchmark", "figure") else "right")
        remarks = []
        for name in names:
            row = agent["benchmarks"][name]
            k, figures = row["settings"]["k"], row["figures"]
            table.add_row(Text(name), f"{row['settings']['problems']:,}", "avg@1", *cells(figures["avg@1"]))
            between = [f"pass@{n}" for n in range(2, k) if f"pass@{n}" in figures]  # 1 and k are avg@k and best@k
            for figure in [f"avg@{k}", f"maj@{k}", *between, f"best@{k}"] if k > 1 else []:
                table.add_row("", "", figure, *cells(figures[figure]))
            for count, what in (
                (row["unverified"], "have no verdict"),
                (row["cut_off"], "were cut off"),
                (row["no_room"], "are wrong because the prompt does not fit into the model"),
            ):
                if count:
                    remarks.append(f"{name}: {count:,} of {row['completions']:,} completions {what}.")
        if len(names) > 1:
            mean = agent["mean"]
            table.add_section()
            table.add_row("mean", "", "avg@1", *cells(mean["avg@1"]))
            for figure, shown in (("avg", "avg@k"), ("paper", "avg@1, AIME by best@k")):
                if mean[figure] != mean["avg@1"]:
                    table.add_row("", "", shown, *cells(mean[figure]))
        console.print(table)
        for remark in remarks:
            console.print(remark, highlight=False, markup=False, emoji=False)
    console.print(f"Completions and all figures: {folder}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_checks(console: Console, names: list[str] | None, data: Path) -> None:
    from hacrl.evaluation.check import check_verifier
    from hacrl.tasks.benchmarks import found_in, load_benchmarks

    for check in check_verifier(load_benchmarks(names or found_in(data), data)):
        wrong = check.shuffled - len(check.shuffled_right) - len(check.shuffled_unverified)
        lines = [f"{check.name}: {check.references - len(check.not_right)} of {check.references} references right"]
        if check.solutions:
            right = check.solutions - len(check.solutions_not_right)
            lines[0] += f", {right} of {check.solutions} worked solutions right"
        lines[0] += f", {wrong} of {check.shuffled} shuffled references wrong ({check.source})"
        for exceptions, what in (
            (check.without_reference, "no reference"),
            (check.not_right, "reference not right"),
            (check.spelling_only, "right only if spelled the same"),
            (check.solutions_not_right, "solution not right"),
            (check.shuffled_right, "shuffled but right"),
            (check.shuffled_unverified, "shuffled, no verdict"),
        ):
            lines += [f"  {what}: {exception}" for exception in exceptions]
        for line in lines:
            console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
