"""`hacrl export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import RunFolder, say
from hacrl.signs import doing


def export(
    run: RunFolder,
    folder: Annotated[Path, Argument(help="Where to save the models; must not exist, or be empty.")],
    checkpoint: Annotated[int | None, Option(help="Step of the checkpoint; default: the newest.")] = None,
    merge: Annotated[bool, Option("--merge", help="Make adapters part of their model's weights.")] = False,
) -> None:
    """Save the trained models of a run, each in a folder of its agent's name."""
    with doing("saving models"):
        from hacrl.training.export import export_run

        for path in export_run(run, folder, checkpoint, merge):
            say(f"Saved in {path}")
