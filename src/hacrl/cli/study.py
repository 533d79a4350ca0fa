"""`hacrl study`."""

import sys
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import console, continued_by
from hacrl.terminal import Terminal


def study(
    source: Annotated[str, Argument(metavar="STUDY", help="A bundled study, a YAML file, or a study's folder.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[KEY=VALUE]...", help="For example seeds=5 settings.max_steps=20.")
    ] = None,
    output_dir: Annotated[str | None, Option(help="Default: runs/study-NAME.")] = None,
    jobs: Annotated[int | None, Option(min=1, max=1024, help="Runs at once.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the grid, and stop.")] = False,
) -> None:
    """Run a grid of algorithms, teams, options and seeds, and compare; called again, it goes on."""
    from hacrl.config.study import StudyConfig
    from hacrl.study import results, runner
    from hacrl.study.grid import Study

    config = StudyConfig.load(source, overrides or [])
    if output_dir is not None:
        config = config.model_copy(update={"output_dir": output_dir})
    whole = Study.build(runner.with_earlier_threads(config))
    runner.check_unchanged(whole)
    places = runner.choose_places(whole, jobs)
    wide = console if console.is_terminal else Terminal(width=140)  # tables in a file need no fold
    results.print_grid(wide, whole, places.jobs, places.threads)
    if dry_run:
        return
    with continued_by(f"continue with `hacrl study {whole.folder}`."):
        found = runner.run_study(whole, places, console)
    results.print_results(wide, found)
    results.print_end(wide, whole, found)
    if any(run["status"] == "failed" for run in found["runs"]):
        sys.exit(1)
