"""A reward function in a process of its own, killed when it takes too long and started anew when it is gone.

The process is a fresh interpreter, not a fork: the parent has torch's threads.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hacrl.tasks import child


@dataclass(frozen=True)
class Reply:
    """What came of a call. `detail` continues the sentence "Reward function f ..."."""

    outcome: Literal["returned", "raised", "died", "timeout", "unloadable"]
    values: list[float | None] = field(default_factory=list)
    detail: str = ""


class Worker:
    """The parent's end of `child.py`; one call at a time."""

    def __init__(self, function: str, path: list[str], memory: int | None = None) -> None:
        """Start a child that imports `function`, "module:name" or "/path/to/file.py:name", with `path` as its
        sys.path and no more than `memory` bytes, without waiting for it."""
        self._order = (function, path, memory)
        self._lock = threading.Lock()
        self._reaping = threading.Lock()
        self._start()

    def load(self) -> Reply:
        """Wait until the function is imported."""
        with self._lock:
            return self._load()

    def call(self, arguments: dict[str, Any], limit: float) -> Reply:
        """Call the function; if it takes longer than `limit` seconds, the child is killed."""
        with self._lock:
            loading = self._load()
            return self._exchange((arguments, limit), limit) if loading.outcome == "returned" else loading

    def close(self) -> None:
        """End the child. A call under way in another thread gets the outcome "died"."""
        self._kill()
        with self._lock:
            self._discard()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", child.__file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._replies = self._socket.makefile("rb")
        self._socket.sendall(pickle.dumps(self._order))
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

    def _exchange(self, message: object, limit: float) -> Reply:
        """Send a message, if any, and wait for the answer; killing the child ends either, so neither hangs."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._kill()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        answer: tuple[bool, Any] | None = None
        try:
            if message is not None:
                self._socket.sendall(pickle.dumps(message))
            answer = pickle.load(self._replies)
        except (EOFError, OSError, pickle.UnpicklingError):
            pass  # the child is gone: how is told below
        except BaseException:
            self._discard()  # or its answer to this message would be taken for one to the next
            raise
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set():
            self._discard()
            return Reply("timeout", detail=f"took longer than {limit:g} s")
        if answer is None:
            return Reply("died", detail=f"ended its process ({self._discard(grace=1.0)})")
        succeeded, result = answer
        return Reply("returned", values=result or []) if succeeded else Reply("raised", detail=result)

    def _kill(self) -> None:
        """Kill the child with its own children, also where it ended by itself, and end the send or receive that waits
        for it."""
        with self._reaping:
            if self._process.returncode is None:  # not reaped: its number is still that of its group and of no other
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody in it is alive
                    os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def _discard(self, grace: float = 0.0) -> str:
        """Clear away the child, which has `grace` seconds to end by itself; returns how it ended."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not self._has_ended():
            time.sleep(0.01)
        self._kill()
        with self._reaping:
            code = self._process.wait()
        self._replies.close()
        self._socket.close()
        self._running = False
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _has_ended(self) -> bool:
        """Without reaping the child, where the system can tell."""
        if self._process.returncode is None and hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # reaped elsewhere
                return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._process.poll() is not None
