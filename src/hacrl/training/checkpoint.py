"""Checkpoints that are whole or not there at all.

A checkpoint is written into a folder of another name, closed by a marker file, flushed to disk and renamed.
Whatever kills the process, a folder named `checkpoint-<step>` with its marker is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacrl.errors import UserError

MARKER = "COMPLETE"
PREFIX = "checkpoint-"
NAME = re.compile(r"checkpoint-\d+")
PARTIAL = re.compile(r"\.checkpoint-\d+\.partial")


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"{PREFIX}{step}"


def save_checkpoint(run_dir: Path, step: int, state: dict[str, Any], save_agents: Callable[[Path], None]) -> Path:
    final = checkpoint_dir(run_dir, step)
    aside = run_dir / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / "state").mkdir(parents=True)
        save_agents(aside)
        (aside / "trainer.json").write_text(json.dumps(state), encoding="utf-8")
        (aside / MARKER).write_text(f"{step}\n", encoding="utf-8")
        for path in [*aside.rglob("*"), aside]:
            sync(path)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        number = system_error(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(final)) from error
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    sync(run_dir)
    return final


def system_error(error: BaseException | None) -> int | None:
    """The errno behind a library's own error: torch chains the OSError, the Rust libraries quote its number."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        quoted = re.search(r"\(os error (\d+)\)", str(error))
        if quoted:
            return int(quoted[1])
        error = error.__context__
    return None


def load_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    return state


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in run_dir.glob(f"{PREFIX}*") if NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=step_of)


def find_checkpoint(run_dir: Path, step: int | None) -> Path:
    """That of a step, or the newest; UserError if there is none."""
    found = complete_checkpoints(run_dir)
    if not found:
        raise UserError(f"{run_dir} has no checkpoint yet.")
    chosen = found[-1] if step is None else checkpoint_dir(run_dir, step)
    if chosen not in found:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise UserError(f"{run_dir} has no checkpoint of step {step}; there are: {steps}.")
    return chosen


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def remove_leftovers(run_dir: Path) -> None:
    """What an interrupted save or removal left behind, and nothing else that lies there."""
    for path in run_dir.iterdir():
        half_deleted = NAME.fullmatch(path.name) and not (path / MARKER).is_file()
        if path.is_dir() and (PARTIAL.fullmatch(path.name) or half_deleted):
            shutil.rmtree(path)


def prune(run_dir: Path, keep: int | None, best: int | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best one."""
    if keep is None:
        return
    candidates = [path for path in complete_checkpoints(run_dir) if step_of(path) != best]
    for path in candidates[:-keep]:
        # The marker goes first: a half-deleted checkpoint must not look complete.
        (path / MARKER).unlink()
        shutil.rmtree(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
