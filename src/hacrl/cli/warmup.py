"""`hacrl warmup`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import Overrides, console, continued_by
from hacrl.cli.tables import print_warmup
from hacrl.signs import doing


def warmup(
    source: Annotated[str, Argument(metavar="YAML", help="A YAML file, or a warm-up to resume.")],
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Continue the warm-up in its folder.")] = False,
) -> None:
    """Teach models the form of answers from written ones, before reinforcement learning."""
    with doing("starting"):
        from hacrl.warmup.stage import given_config, warm_up

    config = given_config(source, overrides or [], resume)
    folder = Path(config.output_dir)
    with continued_by(f"continue with `hacrl warmup {folder} --resume`.", needed=folder / "warmup.yaml"):
        result = warm_up(config, resume=resume, console=console)
    if result.already_finished:
        console.print(f"{result.run_dir} is already finished. Nothing to do.")
    print_warmup(console, result.summary, result.models)
