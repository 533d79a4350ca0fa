"""What commands print as tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hacrl.config import RunConfig
from hacrl.config.strict_yaml import dump_yaml
from hacrl.errors import UserError, nearest
from hacrl.evaluation.options import Options
from hacrl.signs import doing
from hacrl.terminal import decimals, new_table, note, say

if TYPE_CHECKING:  # the command starts without torch
    from hacrl.training.fit import Memories
    from hacrl.training.plan import AgentPlan


def print_models(console: Console) -> None:
    from hacrl.agents.zoo.catalog import catalog
    from hacrl.config.settings import PRESETS, preset_names, read_source

    title = "The zoo: tiny models for experiments on a laptop; validation accuracy"
    texts = ("model", "architecture", "tokenizer")
    table = new_table(title, *texts, "parameters", "sampled", "greedy", left=texts)
    table.columns[0].no_wrap = True
    for row in catalog():
        accuracies = [f"{accuracy:.2f}" for accuracy in (row.sampled_accuracy, row.validation_accuracy)]
        table.add_row(f"zoo:{row.name}", row.architecture, row.tokenizer, f"{row.parameters:,}", *accuracies)
    console.print(table)
    texts = ("preset", "agents", "about")
    presets = new_table("Presets", *texts, left=texts, overflow="fold")
    presets.columns[0].no_wrap = True
    for name in preset_names():
        data, _ = read_source(name)
        first_line = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        presets.add_row(name, " + ".join(agent["model"] for agent in data["agents"]), first_line.removeprefix("# "))
    console.print(presets)


def print_plan(console: Console, config: RunConfig, gpu: str | None = None) -> None:
    """What a run would do and cost, and whether it fits, for `--dry-run`."""
    from hacrl.live.browse import prompt_text, shortened
    from hacrl.training.fit import GPUS, Memories
    from hacrl.training.plan import first_problem

    if gpu is not None and gpu not in GPUS:
        raise UserError(f"--gpu: unknown GPU {gpu!r}{nearest(gpu, GPUS)}")
    problem, remarks = first_problem(config)
    memories = Memories(gpu)
    say(console, config.to_yaml())
    print_costs(console, *memories.plan(config))
    for remark in (*remarks, *config.remarks()):
        note(console, remark)
    if problem is not None:
        console.print(Panel(prompt_text(problem.prompt), title="the first prompt", title_align="left"))
        console.print(Text.assemble("Its answer: ", shortened(problem.answer)))
    print_fit(console, config, memories)


def print_fit(console: Console, config: RunConfig, memories: "Memories") -> None:
    """Whether each agent and all together fit into memory; if not, what would make them fit."""
    needs = memories.needs(config)
    texts = ("agent", "memory", "verdict")
    table = new_table("Does it fit? (GiB, estimate)", "agent", "memory", "needed", "there", "verdict", left=texts)
    for need in needs:
        there = "–" if need.there is None else f"{need.there:,.1f}"
        table.add_row(" + ".join(need.agents), memories.name(need.place), f"{need.planned:,.1f}", there, need.verdict)
    console.print(table)
    remarks = memories.remarks(needs)
    if all(need.fits is not False for need in needs):
        remarks.append("The settings are valid. Tokenizers and lengths of prompts are looked at when the run starts.")
    else:
        with doing("looking for a change with which it fits"):
            changes = memories.smallest_change(config)
        what = "take smaller models or more memory" if changes is None else f"it would with {' '.join(changes)}"
        remarks.append(f"The run does not fit: {what}. Estimated at full lengths (docs/scaling.md).")
    say(console, *remarks)


def print_costs(console: Console, config: RunConfig, plans: "Sequence[AgentPlan]") -> None:
    """Rollouts, updates, memory and seconds that a run would need."""
    from hacrl.live.progress import duration
    from hacrl.training.plan import step_seconds

    table = new_table("Per step", "agent", "parameters", "rollouts sampled", "rollouts used", "updates")
    times = new_table(
        "Seconds of a step (estimate)", "agent", "device", "sampling", "learning", left=("agent", "device")
    )
    for row in plans:
        parameters = f"{row.parameters:,}" + (f" + {row.adapters:,} in adapters" if row.adapters else "")
        counts = (row.rollouts_sampled, row.rollouts_used, row.updates)
        table.add_row(row.id, parameters, *[f"{count:,}" for count in counts])
        times.add_row(row.id, row.device, f"{row.sampling:,.2f}", f"{row.learning:,.2f}")
    console.print(table)
    for row in plans:
        held = {name: gib for name, gib in row.memory.items() if name != "cache"}
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in held.items())
        memory = f"{row.id}: memory (GiB, estimate) {sum(held.values()):.2f} = {parts}"
        memory += f"; up to {row.memory['cache']:.2f} for the cache of sampling"
        if row.host_memory:
            memory += f"; {row.host_memory:.2f} in the computer's memory"
        say(console, memory)
    console.print(times)
    for source in config.sources:
        asked = config.prompts_per_step * source.num_generations
        what = "requests" if source.endpoint else "stored rollouts"
        when = " for prompts that no agent solves" if source.when == "hard" else ""
        limit = source.budget.requests or config.max_steps * asked
        most = f", {min(limit, config.max_steps * asked):,} in all" if source.endpoint else ""
        console.print(Text(f"{source.id}: at most {asked:,} {what} a step{when}{most}."), soft_wrap=True)
    seconds = step_seconds(config, plans)
    imitation = "" if config.algorithm.imitation.when == "never" else "imitation, "
    console.print(
        f"{config.max_steps} steps of {config.prompts_per_step} prompts: "
        f"{config.max_steps * config.rollouts_per_step:,} rollouts in all.\n"
        f"All agents: {seconds:,.2f} s a step, {duration(config.max_steps * seconds)} in all, if every completion has "
        f"its full length and no work can be saved; verification, {imitation}evaluation and checkpoints come on top."
    )


def print_warmup(console: Console, summary: dict[str, Any], models: dict[str, Path]) -> None:
    measured = ("start_loss", "final_loss", "start_accuracy", "final_accuracy")
    columns = [*(name.replace("_", " ") for name in measured), "rows", "dropped"]
    table = new_table(f"Warm-up, {summary['steps']} steps", "agent", *columns)
    for agent_id, agent in summary["agents"].items():
        counts = (agent.get("rows", 0), sum(agent.get("dropped", {}).values()))
        table.add_row(agent_id, *(decimals(agent.get(name)) for name in measured), *(f"{n:,}" for n in counts))
    console.print(table)
    agents = [{"id": agent_id, "model": str(model)} for agent_id, model in models.items()]
    console.print(Text(f"Use them in a config:\n{dump_yaml({'agents': agents})}"), end="", soft_wrap=True)


def print_accuracies(console: Console, target: str, options: Options) -> None:
    """Held-out accuracy of a model or of a run's agents; parts of a mixture below each."""
    with doing("starting"):
        from hacrl.evaluation.heldout import evaluate_target
        from hacrl.evaluation.subjects import config_of
        from hacrl.report.collect import describe_task

    config = options.config or "demo"
    task = describe_task(config_of(target, config).task.model_dump())
    columns = ("agent", "model", "accuracy", "95 % interval", "problems", "unverified")
    table = new_table(f"Held-out accuracy of {target} on {task}", *columns, overflow="fold")
    for row in evaluate_target(target, config, options.checkpoint, options.limit, options.output):
        labels = (Text(row.agent), Text(row.model)) if row.part is None else (Text(""), Text(row.part, style="dim"))
        interval = f"{row.low:.3f} – {row.high:.3f}"
        table.add_row(*labels, f"{row.accuracy:.3f}", interval, str(row.problems), str(row.unverified))
    console.print(table)


def print_benchmarks(console: Console, results: dict[str, Any], folder: Path, names: Sequence[str]) -> None:
    for agent_id, agent in results["agents"].items():
        columns = ("benchmark", "problems", "figure", "value", "95 % interval")
        table = new_table(f"{agent_id}: {agent['model']}", *columns, left=("benchmark", "figure"))
        for name in names:
            add_benchmark(table, name, agent["benchmarks"][name])
        if len(names) > 1:
            mean = agent["mean"]
            table.add_section()
            table.add_row("mean", "", "avg@1", *cells(mean["avg@1"]))
            for figure, shown in (("avg", "avg@k"), ("paper", "avg@1, AIME by best@k")):
                if mean[figure] != mean["avg@1"]:
                    table.add_row("", "", shown, *cells(mean[figure]))
        console.print(table)
        for name in names:
            row = agent["benchmarks"][name]
            for count, what in (
                (row["unverified"], "have no verdict"),
                (row["cut_off"], "were cut off"),
                (row["no_room"], "are wrong because the prompt does not fit into the model"),
            ):
                if count:
                    console.print(Text(f"{name}: {count:,} of {row['completions']:,} completions {what}."))
    say(console, f"Completions and all figures: {folder}")


def add_benchmark(table: Table, name: str, row: dict[str, Any]) -> None:
    """One line for each figure of a benchmark."""
    k, figures = row["settings"]["k"], row["figures"]
    table.add_row(Text(name), f"{row['settings']['problems']:,}", "avg@1", *cells(figures["avg@1"]))
    between = [f"pass@{n}" for n in range(2, k) if f"pass@{n}" in figures]  # 1 and k are avg@k and best@k
    for figure in [f"avg@{k}", f"maj@{k}", *between, f"best@{k}"] if k > 1 else []:
        table.add_row("", "", figure, *cells(figures[figure]))


def cells(figure: dict[str, Any]) -> tuple[str, str]:
    """A figure and its interval."""
    low, high = figure["low"], figure["high"]
    return decimals(figure["value"]), "–" if low is None else f"{decimals(low)} – {decimals(high)}"


def print_checks(console: Console, names: list[str] | None, data: Path) -> None:
    """What the verifier says of the benchmarks' own answers."""
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
        say(console, *lines)
