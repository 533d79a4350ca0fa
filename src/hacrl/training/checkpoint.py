"""Writes and reads checkpoints; only whole ones are used.

A checkpoint is written into a folder of another name, closed by a marker file with the size and the checksum of every
file, flushed to disk and renamed. Whatever kills the process, a folder named `checkpoint-<step>` was complete when it
got its name. Its files are compared with the marker before it is used.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hacrl.errors import UserError, system_error, warn
from hacrl.files import Kind, read_object
from hacrl.signs import doing

MARKER = "COMPLETE"
PREFIX = "checkpoint-"
NAME = re.compile(r"checkpoint-\d+")
PARTIAL = re.compile(r"\.checkpoint-\d+\.partial")
CONTENTS = Kind("a list of checksums", {"checksum": str, "files": {"*": {"size": int, "sha256": str}}}, "")
THREADS = 8
"""How many files are read at the same time."""
SHOWN = 3
"""How many damaged files of a checkpoint a message names; it only counts the others."""

Contents = dict[str, dict[str, Any]]
"""Size and checksum of each file by its path in the checkpoint."""


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"{PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


# --- writing ---------------------------------------------------------------------------------------


def save_checkpoint(run_dir: Path, step: int, state: dict[str, Any], save_agents: Callable[[Path], None]) -> None:
    final = checkpoint_dir(run_dir, step)
    aside = run_dir / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / "state").mkdir(parents=True)
        save_agents(aside)
        (aside / "trainer.json").write_text(json.dumps(state), encoding="utf-8")
        write_marker(aside)
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


def write_marker(folder: Path) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MARKER]
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as threads:
        told = threads.map(lambda path: {"size": path.stat().st_size, "sha256": sha256(path)}, paths)
        files = dict(zip(names, told, strict=True))
    marker = {"checksum": checksum_of(files), "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Checksum of a file: about 1 GB a second on one core, hardly slower than CRC-32; a minute for an 8B optimizer."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_of(files: Contents) -> str:
    """The marker's own checksum: damage to the list must not be taken for damage to a file."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- finding them ----------------------------------------------------------------------------------


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints that have their marker, oldest first. Their files are not checked."""
    return [path for path in all_checkpoints(run_dir) if (path / MARKER).is_file()]


def all_checkpoints(run_dir: Path) -> list[Path]:
    found = [path for path in run_dir.glob(f"{PREFIX}*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def prune(run_dir: Path, keep: int | None, best: int | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best one."""
    candidates = [path for path in complete_checkpoints(run_dir) if step_of(path) != best]
    for path in candidates[:-keep] if keep is not None else []:
        # It is renamed first: a half-deleted checkpoint must not look like a damaged one.
        aside = path.with_name(f".{path.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(path.rename(aside))


def remove_leftovers(run_dir: Path) -> None:
    """Delete what an interrupted save or removal left behind, and nothing else."""
    for path in run_dir.iterdir():
        if path.is_dir() and PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)


# --- reading ---------------------------------------------------------------------------------------


@doing("checking the files of a checkpoint")
def damage(checkpoint: Path, part: str = "") -> str | None:
    """Say what is wrong with a checkpoint's files, or with those whose path begins with `part`; None: nothing."""
    marker = checkpoint / MARKER
    if not marker.is_file():
        return f"{MARKER} is missing"
    try:
        if marker.read_bytes().strip().isdigit():  # earlier versions wrote only the step, without checksums
            warn(f"{checkpoint} was saved by an earlier version, without checksums: its files cannot be checked.")
            return None
        told = read_object(marker, CONTENTS)
    except (UserError, OSError):
        told = {}
    if not told or told["checksum"] != checksum_of(told["files"]):
        return f"{MARKER} is damaged itself"
    names = [name for name in told["files"] if name.startswith(part)]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda name: _fault(checkpoint, name, told["files"][name]), names)
        faults = [fault for fault in found if fault]
    more = f", and {len(faults) - SHOWN} more files" if len(faults) > SHOWN else ""
    return ", ".join(faults[:SHOWN]) + more if faults else None


def _fault(checkpoint: Path, name: str, told: dict[str, Any]) -> str | None:
    """Say how one file differs from what the marker says; None if it does not."""
    path = checkpoint / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != told["size"]:
        return f"{name} has {size:,} bytes instead of {told['size']:,}"
    try:
        same = sha256(path) == told["sha256"]
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} has changed: its checksum does not match"


def newest_whole(run_dir: Path, part: str = "") -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint, None if there is none at all, and what is wrong with newer ones."""
    damaged: dict[Path, str] = {}
    for path in reversed(all_checkpoints(run_dir)):
        fault = damage(path, part)
        if fault is None:
            return path, damaged
        damaged[path] = fault
    if damaged:
        faults = "; ".join(f"in {path.name} {fault}" for path, fault in damaged.items())
        raise UserError(
            f"Every checkpoint of {run_dir} is damaged: {faults}. Restore these files, or delete the checkpoint-* "
            "folders to start over with --resume."
        )
    return None, {}


def to_continue_from(run_dir: Path) -> Path | None:
    """Return the newest whole checkpoint, or None if there are none at all. Newer, damaged ones are renamed."""
    remove_leftovers(run_dir)
    found, damaged = newest_whole(run_dir)
    for path, fault in damaged.items():
        assert found is not None
        names = (f"{path.name}.damaged{n or ''}" for n in itertools.count())
        aside = path.rename(next(run_dir / name for name in names if not (run_dir / name).exists()))
        warn(f"{path} is damaged: {fault}. Going on from {found.name}; the damaged one is now {aside.name}.")
    return found


def find_checkpoint(run_dir: Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the newest one with whole models; UserError if there is none."""
    if not all_checkpoints(run_dir):
        raise UserError(f"{run_dir} has no checkpoint yet.")
    if step is None:
        newest, damaged = newest_whole(run_dir, "agents/")
        assert newest is not None
        for path, wrong in damaged.items():
            warn(f"{path} is damaged: {wrong}. Using {newest.name} instead.")
        return newest
    chosen = checkpoint_dir(run_dir, step)
    steps = ", ".join(str(step_of(path)) for path in complete_checkpoints(run_dir))
    if not (chosen / MARKER).is_file():
        lack = f" {chosen.name} lacks its file {MARKER}." if chosen.is_dir() else ""
        raise UserError(f"{run_dir} has no checkpoint of step {step}; there are: {steps}.{lack}")
    if fault := damage(chosen, "agents/"):
        raise UserError(f"{chosen} is damaged: {fault}. There are checkpoints of the steps {steps}.")
    return chosen


def refuse_damaged_model(place: str, model: str) -> None:
    """Raise UserError if a model belongs to a checkpoint and its files are not those that were saved."""
    folder = Path(model).expanduser()
    checkpoint = folder.parent.parent
    if folder.parent.name != "agents" or not (checkpoint / MARKER).is_file():
        return
    if fault := damage(checkpoint, f"agents/{folder.name}/"):
        raise UserError(
            f"{place}: {checkpoint} is damaged: {fault}. If you changed the model on purpose, copy {folder} to "
            "another place and give that."
        )


def load_state(checkpoint: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Read trainer.json; UserError if it lacks one of these keys."""
    advice = f"Delete {checkpoint}: the checkpoint before it is used then."
    return read_object(
        checkpoint / "trainer.json", Kind("the state of a trainer", dict.fromkeys(keys, object), advice, exact=True)
    )
