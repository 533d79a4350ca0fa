"""The child process of a reward function: loads the function, then answers calls until its parent is gone.

`keeper.py` starts this file by its path. It imports only the standard library, so that it starts fast. Requests and
answers alternate on one socket, requests as pickles, answers as lines of JSON; `worker.py` is the other end:

    to the child            back
    (function, sys.path)    [0, true, null], or [0, false, what went wrong]
    (number, arguments)     [number, true, rewards], or [number, false, what went wrong]

The function is its name, or bytes: a function that cloudpickle has pickled. Nothing but answers goes back.

"What went wrong" continues the sentence "Reward function f ...". The number says which call an answer belongs to. If
a reward function forks and returns in both processes, the copy ends without an answer.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pickle
import reprlib
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Sequence[float | None]]
"""TRL's signature, fn(prompts, completions, **columns): for each completion a number, or None if it does not apply."""

LOAD_LIMIT = 120.0
"""Seconds that the import of a reward function may take."""
LARGEST = 1e9
"""Largest absolute value of a reward. Sums of squares of such numbers are far below the largest float32, and float64
still tells apart two that differ by 1e-6, the constant added to the standard deviation of a group."""
LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


class Unusable(Exception):
    """Raised if a reward function cannot be found, is of the wrong kind, or returned something other than rewards."""


def load(function: str | bytes) -> RewardFunction:
    """Load the function named by "module:function" or "path/to/file.py:function", or unpickle it."""
    if isinstance(function, bytes):
        return usable(_unpickle(function))
    source, _, attribute = function.rpartition(":")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    if attribute not in vars(module):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Unusable(f"does not exist: the functions of {source} are {', '.join(functions) or '(none)'}")
    return usable(vars(module)[attribute])


def _unpickle(content: bytes) -> object:
    try:
        return pickle.loads(content)
    except (ImportError, AttributeError) as error:  # what is in a module travels as its name
        raise Unusable(
            f"cannot be rebuilt in its own process ({error}): define it in the notebook or script itself, or in a "
            "module that can be imported"
        ) from error


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise Unusable(f"does not exist: there is no file {path}")
    # Use a name that no installed module has, because the file may be called random.py.
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
            raise  # the module exists, but imports one that does not
        raise Unusable(
            f"does not exist: there is no module {error.name}, neither installed nor in {os.getcwd()}; "
            "for a file elsewhere write path/to/file.py:function"
        ) from error


def usable(function: object) -> RewardFunction:
    """Return the function itself; Unusable if it is not callable, or is async."""
    if not callable(function):
        raise Unusable(f"is not a function but a value of type {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise Unusable("is async, and reward functions are called synchronously: define it with a plain def")
    return function


def call(function: RewardFunction, arguments: dict[str, Any]) -> list[float | None]:
    """Call the function; Unusable unless it returns a number within `LARGEST`, or None, for each completion."""
    count = len(arguments["completions"])  # before the function may change it
    values = function(**arguments)
    if hasattr(values, "tolist"):  # an array of numpy, a tensor of torch
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise Unusable(f"returned a {type(values).__name__}, expected a list of {count} numbers or None")
    if len(values) != count:
        raise Unusable(f"returned {len(values)} values, expected {count}, one for each completion")
    values = [value.item() if hasattr(value, "item") else value for value in values]  # numbers of numpy and torch
    for index, value in enumerate(values):
        size: Any = abs(value) if isinstance(value, numbers.Real) else math.nan
        if value is not None and not size <= LARGEST:
            expected = f"a number from {-LARGEST:g} to {LARGEST:g}" if size < math.inf else "a finite number"
            raise Unusable(
                f"returned {reprlib.repr(value)} ({type(value).__name__}) for completion {index}, "
                f"expected {expected} or None"
            )
    return [None if value is None else float(value) for value in values]


def explain(error: BaseException) -> str:
    """An exception's type and message, and the last line of the user's own code in its traceback."""
    if isinstance(error, Unusable):
        return str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((__file__, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    try:
        message = f": {error}"
    except Exception:  # raised by its own __str__
        message = ""
    return f"raised {type(error).__name__}{message}{place}"


def attempt(action: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Run the action; returns (True, its result) or (False, what went wrong)."""
    process = os.getpid()
    try:
        return True, action(*arguments)
    except (Exception, KeyboardInterrupt) as error:
        return False, explain(error)
    finally:
        if os.getpid() != process:  # a copy, made by a fork
            os._exit(0)


def serve(connection: socket.socket) -> None:
    """Load the function named by the first message, then answer one call after the other."""
    requests = connection.makefile("rb")
    order, path = pickle.load(requests)
    sys.path[:] = path
    loaded, function = attempt(load, order)
    connection.sendall(line((0, loaded, None if loaded else function)))
    while loaded:
        number, arguments = pickle.load(requests)
        connection.sendall(line((number, *attempt(call, function, arguments))))


def line(answer: tuple[int, bool, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        serve(channel)
    os._exit(0)  # without waiting for threads that the function may have left behind
