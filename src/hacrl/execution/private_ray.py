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

from ray._private import ray_constants

import ray
from hacrl.errors import warn

LOOPBACK = "127.0.0.1"
LONGEST = 30
"""Most bytes in the path of the temporary folder: a Unix socket path has at most 107, and Ray adds 77."""
OWNER = "owner"
"""Name of the file in the folder that the process which started Ray keeps locked while it lives."""
ENDING = 10.0
"""Seconds that Ray's processes get to finish writing before `remove` gives up."""


def start(**options: Any) -> Path:
    """Start a Ray instance and connect to it; returns the folder of its sockets and logs, which nothing else uses."""
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
    """Keep the folder for the user, who was told about its logs: the next start does not remove it."""
    (folder / OWNER).unlink(missing_ok=True)


def _take(folder: Path) -> None:
    """Lock the folder's owner file until this process ends; the file gets its name only after it is locked."""
    file = os.open(folder / "new", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / "new").rename(folder / OWNER)


def _clear_away(place: str) -> None:
    """Remove the folders of instances whose process was killed: their owner files are no longer locked."""
    for owner in Path(place).glob(f"ray-*/{OWNER}"):
        with suppress(OSError), owner.open("rb") as file:  # locked, gone, or of another user
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on the given loopback address only. On Linux, Ray replaces it by an address that other machines
    can reach, unless its constant says that clusters are not supported, as on macOS."""
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
