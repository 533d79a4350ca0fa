"""Runs a reward function in its own process, which is killed if it takes too long and restarted if it is gone.

The process is a fresh interpreter, not a fork, because the parent has torch's threads. The process of `keeper.py`
stands between parent and child.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import IO, Any, Literal, cast

import cloudpickle

from hacrl.errors import harmless
from hacrl.opening import reason
from hacrl.tasks import child, keeper

LONGEST_LINE = 10_000
"""Most characters that a function prints without a line break before they are shown."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a call. `detail` continues the sentence "Reward function f ..."."""

    outcome: Literal["returned", "raised", "died", "memory", "timeout", "unloadable"]
    values: list[float | None] = field(default_factory=list)
    detail: str = ""


class Worker:
    """The parent's side of `child.py`; it handles one call at a time."""

    def __init__(self, function: str | bytes, path: list[str], memory_gib: float | None = None) -> None:
        """Start a child that loads `function` with `path` as its sys.path, without waiting for it: "module:name",
        "/path/to/file.py:name", or a function that `pickled` has made into bytes. The child and all processes that it
        starts may use `memory_gib` of memory together."""
        self._order = (function, path)
        self._memory_gib = memory_gib
        self._lock = threading.Lock()
        self._start()

    def load(self) -> Reply:
        """Wait until the function is imported."""
        with self._lock:
            return self._load()

    def call(self, arguments: dict[str, Any], limit: float) -> Reply:
        """Call the function; if it takes longer than `limit` seconds, the child is killed."""
        with self._lock:
            loading = self._load()
            if loading.outcome != "returned":
                return loading
            self._number += 1
            try:
                message = pickled((self._number, arguments))
            except Unpicklable as error:
                return Reply("raised", detail=f"cannot get the columns of the data in its own process: {error}")
            return self._exchange(message, limit)

    def close(self) -> None:
        """End the child. A call in progress in another thread gets the outcome "died"."""
        self._kill()
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._control, its = socket.socketpair()
        fds = [theirs.fileno(), its.fileno()]
        memory = int((self._memory_gib or 0) * 2**30)
        command = [sys.executable, "-I", "-S", keeper.__file__, *map(str, [*fds, os.getpid(), memory])]
        with theirs, its:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=fds,
                start_new_session=True,
            )
        self._printing = threading.Thread(target=show, args=(self._process.stdout,), daemon=True)
        self._printing.start()
        self._control.settimeout(1.0)
        self._replies = self._socket.makefile("rb")
        self._socket.sendall(pickle.dumps(self._order))
        self._number = 0
        self._running = True
        self._loaded = False

    def _load(self) -> Reply:
        if not self._running:
            self._start()
        if self._loaded:
            return Reply("returned")
        reply = self._exchange(None, child.LOAD_LIMIT)
        self._loaded = reply.outcome == "returned"
        if self._loaded:
            return reply
        self._discard()
        when = "" if reply.outcome == "raised" else " while it was imported"
        return Reply("unloadable", detail=reply.detail + when)

    def _exchange(self, message: bytes | None, limit: float) -> Reply:
        """Send a message, if any, and wait for the answer. Neither hangs, because killing the child ends both."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._kill()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        answer: tuple[int, bool, Any] | None = None
        try:
            if message is not None:
                self._socket.sendall(message)
            while answer is None or answer[0] != self._number:  # skip answers to other calls
                answer = read_answer(self._replies.readline())
        except (OSError, ValueError):
            answer = None  # the child is gone; `_gone` says how
        except BaseException:
            self._discard()  # otherwise its answer to this message would come before the next one
            raise
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set():
            self._discard()
            return Reply("timeout", detail=f"took longer than {limit:g} s")
        if answer is None:
            return self._gone()
        _, succeeded, result = answer
        return Reply("returned", values=result or []) if succeeded else Reply("raised", detail=result)

    def _gone(self) -> Reply:
        word = self._discard(grace=1.0)
        if word == keeper.MEMORY:
            limit = f"{self._memory_gib:g} GiB"
            return Reply("memory", detail=f"used more than the {limit} of memory that task.reward_memory_gib allows")
        return Reply("died", detail=f"ended its process ({word or signal.SIGKILL.name})")

    def _kill(self) -> None:
        """Make the keeper kill the child and its descendants, and end any send or receive that waits for the child."""
        for end in (self._control, self._socket):
            with contextlib.suppress(OSError):  # not connected any more
                end.shutdown(socket.SHUT_RDWR)

    def _discard(self, grace: float = 0.0) -> str:
        """Clean up the child, which has `grace` seconds to end by itself; returns the keeper's last message."""
        for action, seconds in ((self._kill, grace), (self._process.kill, 2 * keeper.ENDING)):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                action()
        self._process.wait()
        self._printing.join(0.2)  # shows its last output; a process that outlives it may keep the pipe open
        word = b""
        with contextlib.suppress(OSError):  # already closed, or another process holds a copy of its end
            word = self._control.recv(100)
        for end in (self._replies, self._socket, self._control):
            end.close()
        self._running = False
        return word.decode()


class Unpicklable(Exception):
    """Raised if an object cannot be copied to another process."""


def pickled(value: object) -> bytes:
    """The value as a pickle, also if it is or holds functions and classes of a notebook. Only children read it."""
    try:
        return cast(bytes, cloudpickle.dumps(value))
    except Exception as error:  # raised by whatever the value holds
        raise Unpicklable(reason(error)) from error


def read_answer(line: bytes) -> tuple[int, bool, Any]:
    """Parse the child's answer in this line; ValueError if there is none, as after the child has ended."""
    answer = json.loads(line)
    if not isinstance(answer, list) or len(answer) != 3:
        raise ValueError("not an answer")
    return answer[0], answer[1], answer[2]


def show(printed: IO[str]) -> None:
    """Show what a reward function prints on standard error, with control characters escaped."""
    with contextlib.suppress(OSError, ValueError), printed:  # either end is closed
        for line in iter(lambda: printed.readline(LONGEST_LINE), ""):
            sys.stderr.write(harmless(line))
            sys.stderr.flush()
