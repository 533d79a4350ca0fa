"""`hacrl export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import RunFolder, say
from hacrl.errors import UserError
from hacrl.signs import doing


def export(
    run: RunFolder,
    target: Annotated[
        str,
        Argument(metavar="FOLDER_OR_AGENT", help="New or empty folder for all models; with --push-to-hub, an agent."),
    ],
    checkpoint: Annotated[int | None, Option(help="Step of the checkpoint; default: the newest.")] = None,
    merge: Annotated[bool, Option("--merge", help="Make adapters part of their model's weights.")] = False,
    push_to_hub: Annotated[
        str | None, Option(metavar="ORG/NAME", help="Upload this agent's model to the Hugging Face hub.")
    ] = None,
    private: Annotated[bool, Option("--private", help="With --push-to-hub: a new repository is private.")] = False,
) -> None:
    """Save the trained models of a run in folders, or upload one of them to the Hugging Face hub."""
    if private and push_to_hub is None:
        raise UserError("--private is for --push-to-hub ORG/NAME.")
    with doing("starting"):
        from hacrl.training.export import export_run
        from hacrl.training.hub import push_agent

    with doing("uploading the model" if push_to_hub else "saving models"):
        if push_to_hub is not None:
            done = push_agent(run, target, push_to_hub, checkpoint, merge=merge, private=private)
            for name, size in done.files.items():
                say(f"Uploaded {name} ({size:,} bytes)")
            say(f"See {done.url}")
            return
        for path in export_run(run, Path(target), checkpoint, merge):
            say(f"Saved in {path}")
