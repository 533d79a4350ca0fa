"""`hacrl watch`."""

from typing import Annotated

from typer import Option

from hacrl.cli.common import RunFolder, console


def watch(
    run: RunFolder,
    once: Annotated[bool, Option("--once", help="Show it once and stop.")] = False,
) -> None:
    """Follow a run that is trained elsewhere, until it ends."""
    from hacrl.live.watch import watch as watch_run

    watch_run(console, run, once)
