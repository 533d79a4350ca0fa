"""`hacrl train`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import Overrides, console, continued_by
from hacrl.cli.tables import print_plan
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.live.summary import print_summary
from hacrl.signs import doing


def train(
    source: Annotated[str, Argument(metavar="PRESET_OR_YAML", help="A preset, a YAML file, or a run to resume.")],
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in this folder.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be done, whether it fits, and stop.")] = False,
    gpu: Annotated[
        str | None, Option(help="With --dry-run: h200, h100, a100-80, l40s or 4090; default: this machine's.")
    ] = None,
) -> None:
    """Train the agents of a preset or a YAML file."""
    if gpu is not None and not dry_run:
        raise UserError("--gpu is for --dry-run: a run takes the devices that its config names.")
    config = None if resume else RunConfig.load(source, overrides or [])  # mistakes are told without delay
    with doing("starting"):
        from hacrl.run import resumed_config
        from hacrl.run import train as train_run

    config = config or resumed_config(source, overrides or [])
    if dry_run:
        print_plan(console, config, gpu)
        return
    folder = Path(config.output_dir)
    with continued_by(f"continue with `hacrl train {folder} --resume`.", needed=folder / "config.yaml"):
        result = train_run(config, resume=resume, console=console)
    print_summary(console, result.run_dir, result.summary, already_finished=result.already_finished)
