"""A private Ray instance, started for one run on this machine: it listens on loopback and ends with the run."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from hacrl.errors import warn

LOOPBACK = "127.0.0.1"
LONGEST = 30
"""Bytes of the path of the temporary folder: the path of a Unix socket has at most 107, and Ray adds 77."""
OWNER = "owner"
"""The file in the folder that the process which started it keeps locked as long as it lives."""
ENDING = 10.0
"""Seconds for Ray's processes to write their last lines."""


def start(**options: Any) -> Path:
    """Start it and connect to it; returns the folder of its sockets and logs, which belongs to it alone."""
    place = _short_folder()
    _clear_away(place)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place))
    _take(folder)
    try:
        with _on_loopback():
            ray.init(
                address="local",
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _system_config={"enable_metrics_collection": False},
                _temp_dir=str(folder),
                **options,
            )
        if (address := ray.util.get_node_ip_address()) != LOOPBACK:
            warn(f"Ray {ray.__version__} listens on {address}, where other machines may reach it. Use Ray 2.60.")
    except BaseException:
        ray.shutdown()
        remove(folder)
        raise
    return folder


def remove(folder: Path) -> None:
    deadline = time.monotonic() + ENDING
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def leave(folder: Path) -> None:
    """Leave the folder to the user, who was told of its logs: the next start does not remove it."""
    (folder / OWNER).unlink(missing_ok=True)


def _take(folder: Path) -> None:
    """Lock the folder's owner file until this process ends; it has its name only once it is locked."""
    file = os.open(folder / "new", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / "new").rename(folder / OWNER)


def _clear_away(place: str) -> None:
    """Remove the folders of instances whose process was killed: nobody locks their owner file any more."""
    for owner in Path(place).glob(f"ray-*/{OWNER}"):
        with suppress(OSError), owner.open("rb") as file:  # locked, gone, or somebody else's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take the loopback address that it is given, and listen there alone. On Linux it replaces it by one that
    other machines reach, unless its constant says that clusters are not supported, as on macOS."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _short_folder() -> str:
    """Ray's or the system's temporary folder, or /tmp if Ray's sockets would have paths that are too long there."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= LONGEST else "/tmp"
