"""`hacrl eval`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import console, continued_by, finite
from hacrl.cli.tables import print_accuracies, print_benchmarks, print_checks
from hacrl.evaluation.options import Options
from hacrl.signs import doing


def evaluate(
    target: Annotated[
        str | None, Argument(metavar="MODEL_OR_RUN", help="zoo:NAME, a folder, a hub id, or a run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, Argument(metavar="[KEY=VALUE]...", help="With --benchmarks: dtype=bfloat16 top_p=0.95.")
    ] = None,
    benchmarks: Annotated[
        str | None, Option(help="For example gsm8k,math500,aime25; default: the task's held-out problems.")
    ] = None,
    data: Annotated[Path | None, Option(help="Folder with the benchmarks' files; default: the hub.")] = None,
    k: Annotated[
        int | None, Option(min=1, max=65_536, help="Completions of each problem; default: 1, AIME 30.")
    ] = None,
    config: Annotated[
        str | None, Option(help="A preset or YAML file with task and settings for a model; default: demo.")
    ] = None,
    checkpoint: Annotated[int | None, Option(help="Step of the run's checkpoint; default: the newest.")] = None,
    problems: Annotated[
        int | None,
        Option("--problems", "--limit", min=1, max=1_000_000, help="How many problems (of each benchmark)."),
    ] = None,
    output: Annotated[
        Path | None, Option(help="File for every answer with its verdict; with --benchmarks, a folder.")
    ] = None,
    system_prompt: Annotated[
        str | None, Option(help="Default: the run's; for a model, a request to put the answer into a box.")
    ] = None,
    max_completion_length: Annotated[int | None, Option(min=1, max=2**20, help="Default: the run's, or 4096.")] = None,
    temperature: Annotated[
        float | None,
        Option(min=0, max=1000, callback=finite, help="Default: 0 for k = 1, else the run's or 1."),
    ] = None,
    seed: Annotated[int | None, Option(min=0, max=2**63 - 1, help="Default: the run's, or 0.")] = None,
    batch_size: Annotated[
        int | None, Option(min=1, max=1_000_000, help="Completions at once; default: the run's, or 64.")
    ] = None,
    check_verifier: Annotated[
        bool, Option("--check-verifier", help="Judge the benchmarks' own answers in --data; no model.")
    ] = False,
) -> None:
    """Accuracy of a model, or of every agent of a run: on held-out problems, or on the usual benchmarks."""
    names = None if benchmarks is None else [name.strip().lower() for name in benchmarks.split(",") if name.strip()]
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
    if check_verifier:
        print_checks(console, names, options.folder_to_check(target))
    elif names is None:
        print_accuracies(console, options.model_or_run(target), options)
    else:
        run_benchmarks(options.model_or_run(target), options)


def run_benchmarks(target: str, options: Options) -> None:
    with doing("starting"):
        from hacrl.evaluation.benchmarks import evaluate_benchmarks

    with continued_by("the same command goes on where it stopped."):
        results, folder = evaluate_benchmarks(target, options, console)
    print_benchmarks(console, results, folder, options.benchmarks or [])
