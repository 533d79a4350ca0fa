"""Loads users' own algorithms: subclasses of `Algorithm` in a file or module, named as reward functions are.

`path/to/file.py:Class` is relative to the working directory, `module:Class` is imported from there or from what is
installed. Every mistake is a ValueError whose message is a sentence.
"""

import copyreg
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import typing
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hacrl.algorithms import ALGORITHMS, Algorithm

BUILT_IN = {Algorithm, *ALGORITHMS.values()}
LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


def is_own(name: str) -> bool:
    """Whether a name has the form file.py:Class or module:Class."""
    return all(name.rpartition(":")[::2])


def resolved(name: str) -> str:
    """The name with an absolute path, so that the run finds the file again, wherever it is continued."""
    source, _, attribute = name.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(source))}:{attribute}" if source.endswith(".py") else name


def own_algorithm(name: str, folder: str | None = None) -> type[Algorithm]:
    """Load the class; `folder`, or else the working directory, is searched after what is installed."""
    source, _, attribute = name.rpartition(":")
    absolute, folder = resolved(name), folder or os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        path = Path(absolute.removesuffix(f":{attribute}"))
        module = _load_file(path) if source.endswith(".py") else _load_module(source, folder)
    except _Missing as error:
        raise ValueError(f"{name} does not exist: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}{_place(error)}") from error
    if attribute not in vars(module):
        theirs = [key for key, value in vars(module).items() if _is_subclass(value) and value not in BUILT_IN]
        raise ValueError(f"{name} does not exist: the algorithms of {source} are {', '.join(theirs) or '(none)'}")
    kind: type[Algorithm] = vars(module)[attribute]
    _check(kind, name)
    copyreg.pickle(kind, lambda algorithm: (_unpickled, (absolute, folder, _options(algorithm))))
    return kind


class _Missing(Exception):
    """Raised if there is no such file or module."""


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _Missing(f"there is no file {path}")
    stat = path.stat()
    return _loaded(path, stat.st_mtime_ns, stat.st_size)


@lru_cache
def _loaded(path: Path, *_version: int) -> ModuleType:
    """The file as a module, loaded once for each version of it."""
    # No installed module has this name, although the file may be called random.py.
    name = f"hacrl_algorithm_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, folder: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        advice = "for a file elsewhere write path/to/file.py:Class"
        raise _Missing(f"there is no module {error.name}, neither installed nor in {folder}; {advice}") from error


def _place(error: BaseException) -> str:
    """The last line of the user's own code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((__file__, "<frozen", *LIBRARIES))]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_subclass(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm)


def _check(kind: Any, name: str) -> None:
    """Raise ValueError unless the class can be used as an algorithm."""
    if not _is_subclass(kind):
        what = f"the class {kind.__name__}" if isinstance(kind, type) else f"a value of type {type(kind).__name__}"
        raise ValueError(f"{name} is {what}, which is not a subclass of hacrl.algorithms.Algorithm")
    if kind in BUILT_IN:
        raise ValueError(f"{name} is built in: write {kind.name or 'the name of an algorithm'}")
    if inspect.isabstract(kind):
        raise ValueError(f"{name} lacks the method {', '.join(sorted(kind.__abstractmethods__))}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    try:
        annotated = typing.get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise ValueError(f"{name}: a type of its options is unknown: {error}") from error
    for option in inspect.get_annotations(kind):
        if option not in fields and typing.ClassVar not in (annotated[option], typing.get_origin(annotated[option])):
            raise ValueError(f"{name}: {option} is not an option yet; write @dataclass(frozen=True) above the class")
    for option, field in fields.items():
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name}: the option {option} needs a default")
    try:
        kind()
    except Exception as error:
        raise ValueError(f"{name} refuses its own defaults: {type(error).__name__}: {error}") from error


def _options(algorithm: Algorithm) -> dict[str, Any]:
    return {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init}


def _unpickled(name: str, folder: str, options: dict[str, Any]) -> Algorithm:
    """The algorithm in another process, which cannot import the user's file by the name it has in this one."""
    return own_algorithm(name, folder)(**options)
