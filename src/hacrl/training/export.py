"""Copies the trained models of a run into folders of their own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from hacrl.agents.loading import load_model
from hacrl.errors import UserError
from hacrl.learners.lora import CONFIG_FILE
from hacrl.training.checkpoint import find_checkpoint
from hacrl.training.run_dir import RunDir


def export_run(run_dir: Path, folder: Path, step: int | None, merge: bool) -> Iterator[Path]:
    """Copy each agent of a checkpoint to `folder`/<id>; with `merge`, adapters become part of their model's weights."""
    run = RunDir.open(run_dir)
    chosen = find_checkpoint(run.path, step)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Choose another.")
    for agent in run.config().agents:
        source, target = chosen / "agents" / agent.id, folder / agent.id
        if not merge or not (source / CONFIG_FILE).is_file():
            shutil.copytree(source, target)
        else:
            load_model(agent.model_copy(update={"device": "cpu"}), source).save_pretrained(target)
            for path in source.iterdir():
                if not path.name.startswith("adapter_"):  # files of the tokenizer
                    shutil.copy(path, target)
        yield target
