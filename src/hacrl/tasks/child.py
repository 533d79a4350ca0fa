"""The child process of a reward function: loads it, then answers calls until its parent is gone.

Run by its path, with the standard library alone, so that it starts fast whatever `hacrl` imports. Messages are
pickles of plain tuples, in turn, over one socket; `worker.py` is the other end:

    to the child                          back
    (function, sys.path, memory limit)    (True, None), or (False, what went wrong)
    (arguments, time limit)               (True, rewards), or (False, what went wrong)

"What went wrong" continues the sentence "Reward function f ...".
"""

import contextlib
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import pickle
import reprlib
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Sequence[float | None]]
"""TRL's signature, fn(prompts, completions, **columns): a number for each completion, or None: does not apply."""

LOAD_LIMIT = 120.0
"""Seconds for the import of a reward function."""
ORPHAN_GRACE = 10.0
"""Seconds past its time limit after which a child ends itself, because its parent was killed and cannot."""
LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


class Unusable(Exception):
    """A reward function that cannot be found, is of the wrong kind, or returned something else than rewards."""


def load(name: str) -> RewardFunction:
    """The function that "module:function" or "path/to/file.py:function" names."""
    source, _, attribute = name.rpartition(":")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    if attribute not in vars(module):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Unusable(f"does not exist: the functions of {source} are {', '.join(functions) or '(none)'}")
    return usable(vars(module)[attribute])


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise Unusable(f"does not exist: there is no file {path}")
    # Under a name that no installed module has, for the file may be called random.py.
    spec = importlib.util.spec_from_file_location("hacrl_reward_function", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise Unusable(
            f"does not exist: there is no module {error.name}, neither installed nor in {os.getcwd()}; "
            "for a file elsewhere write path/to/file.py:function"
        ) from error


def usable(function: object) -> RewardFunction:
    if not callable(function):
        raise Unusable(f"is not a function but a value of type {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise Unusable("is async, and reward functions are called synchronously: define it with a plain def")
    return function


def call(function: RewardFunction, arguments: dict[str, Any]) -> list[float | None]:
    """What the function returns, if it is a finite number or None for each completion."""
    values, count = function(**arguments), len(arguments["completions"])
    if not isinstance(values, list | tuple):
        raise Unusable(f"returned a {type(values).__name__}, expected a list of {count} numbers or None")
    if len(values) != count:
        raise Unusable(f"returned {len(values)} values, expected {count}, one for each completion")
    for index, value in enumerate(values):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise Unusable(
                f"returned {reprlib.repr(value)} ({type(value).__name__}) for completion {index}, "
                "expected a finite number or None"
            )
    return [None if value is None else float(value) for value in values]


def explain(error: Exception) -> str:
    """What an exception says, and the last line of the user's own code that it came through."""
    if isinstance(error, Unusable):
        return str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((__file__, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"raised {type(error).__name__}: {error}{place}"


def attempt(limit: float, action: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """(True, what the action returned), or (False, what went wrong)."""
    signal.setitimer(signal.ITIMER_REAL, limit + ORPHAN_GRACE)
    try:
        return True, action(*arguments)
    except Exception as error:
        return False, explain(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(connection: socket.socket) -> None:
    requests = connection.makefile("rb")
    name, path, memory = pickle.load(requests)
    sys.path[:] = path
    if memory is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    loaded, function = attempt(LOAD_LIMIT, load, name)
    connection.sendall(pickle.dumps((loaded, None if loaded else function)))
    while loaded:
        arguments, limit = pickle.load(requests)
        connection.sendall(pickle.dumps(attempt(limit, call, function, arguments)))


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        serve(channel)
    os._exit(0)  # without waiting for threads that the function may have left behind
