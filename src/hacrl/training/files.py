"""Reads the JSON files of runs, evaluations and studies.

A crash or a person may have damaged them. What is not what we wrote is a `UserError` that names file and line, says
what is wrong there and what to do.
"""

import codecs
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from hacrl.errors import UserError

Line = dict[str, Any]
Shape = Any
"""What a value must be: a type, a tuple of shapes of which one fits, [shape of each item], or {key: shape} of an
object, in which `key?` may be missing and `*` stands for all other keys."""


@dataclass(frozen=True)
class Kind:
    """A kind of JSON object that we write, alone in a file or one a line."""

    what: str
    shape: Shape
    advice: str
    """What to do with a damaged one."""
    exact: bool = False
    """Numbers that are not finite stay as they are; else they are None."""
    grows: bool = False
    """The file grows line by line: a last line without its end was interrupted, and does not count."""


NUMBER = (int, float, NoneType)
"""JSON has no word for a number that is not finite: null stands for it."""
LARGEST = 2**63
"""Whole numbers beyond it are none of ours, and floats cannot be made of all of them."""

METRICS = Kind("a line of metrics", {"step": int, "*": NUMBER}, "Fix or delete that line.", grows=True)
ROLLOUT = Kind(
    "a rollout",
    {
        "source": str,
        "prompt": (str, [{"role": str, "content": object}]),
        "text": str,
        "prompt_id?": str,
        "index?": int,
        "reward?": NUMBER,
        "num_tokens?": int,
        "logp_sum?": NUMBER,
        "learners?": {"*": {"advantage?": NUMBER, "ratio?": NUMBER}},
    },
    "Fix or delete that line.",
)
SUMMARY = Kind(
    "the summary of a run",
    {"steps": int, "seconds": NUMBER, "agents": {"*": {"model?": object, "dropped?": object, "*": NUMBER}}},
    "Delete the file: continuing with --resume writes it again.",
)
STUDY = Kind(
    "the results of a study",
    {
        "runs": [
            {"pair?": str, "variant?": str, "seed?": int, "dir?": str, "status?": str, "gpu_seconds?": NUMBER},
        ],
        "name?": (str, NoneType),
        "title?": (str, NoneType),
    },
    "Delete the file: `hacrl study` writes it again.",
)
ANYTHING = Kind("a JSON object", {}, "Fix or delete that line.")
PROGRESS = Kind(
    "the progress of a run",
    {
        "phase": str,
        "since": (int, float),
        "agents": [str],
        "save_seconds": (int, float),
        "warning": (str, NoneType),
    },
    "Delete the file: a run that goes on writes it again.",
)


def read_object(path: Path, kind: Kind) -> Line:
    """The JSON object that a file holds."""
    return _parsed(_read(path), kind, str(path))


def read_lines(path: Path, kind: Kind) -> list[Line]:
    """The JSON objects of a file, one a line."""
    return [line for _, line in each_line(path, kind)]


def each_line(path: Path, kind: Kind) -> Iterator[tuple[str, Line]]:
    """The lines of a file, as they stand there and as objects; each is read when it is asked for."""
    return parse_lines(_read(path), path, kind)


def parse_lines(data: bytes, path: Path, kind: Kind, first: int = 1) -> Iterator[tuple[str, Line]]:
    """The lines in a piece of a file; `first` is the number of its first line."""
    texts = data.split(b"\n")
    if kind.grows:
        texts.pop()
    for n, text in enumerate(texts, first):
        if text.strip():
            line = _parsed(text, kind, f"{path}, line {n},", is_line=True)
            yield text.decode("utf-8", "surrogatepass"), line


def _parsed(data: bytes, kind: Kind, place: str, is_line: bool = False) -> Line:
    to_float = float if kind.exact else _finite
    problem = fault = None
    try:
        text = data.decode("utf-8", "surrogatepass")
        value: Line = json.loads(text, parse_constant=to_float, parse_float=to_float)
        fault = mismatch(value, kind.shape)
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:
        problem = f"is not valid JSON ({error})" if data.strip() else "is empty"
    if problem:
        fault = f"it {problem}"
    if fault is None:
        return value
    wrong = problem if problem and not is_line else f"is not {kind.what}: {fault}"
    raise UserError(f"{place} {wrong}. {kind.advice}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def mismatch(value: Any, shape: Shape, name: str = "") -> str | None:
    """What is wrong with a value that does not have this shape; None if it has."""
    if isinstance(shape, tuple):
        faults = [mismatch(value, each, name) for each in shape]
        return None if None in faults else max(faults, key=lambda fault: len(str(fault)))  # the one that looked deepest
    if isinstance(shape, list) and isinstance(value, list):
        return next((fault for item in value if (fault := mismatch(item, shape[0], name))), None)
    if isinstance(shape, dict) and isinstance(value, dict):
        return _mismatched_key(value, shape, f"{name}." if name else "")
    plain = isinstance(shape, type) and isinstance(value, shape)
    number_fits = not isinstance(value, int) or (not isinstance(value, bool) and abs(value) < LARGEST)
    if plain and (shape is object or number_fits):
        return None
    return f"{name or 'it'} is {_shown(value)}"


def _mismatched_key(value: Line, shape: Line, prefix: str) -> str | None:
    required = [key for key in shape if key != "*" and not key.endswith("?")]
    missing = next((key for key in required if key not in value), None)
    if missing is not None:
        return f"{prefix}{missing} is missing"
    for key, item in value.items():
        expected = shape.get(key, shape.get(f"{key}?", shape.get("*", object)))
        shown = key if key.isprintable() else ascii(key)
        if fault := mismatch(item, expected, f"{prefix}{shown[:80]}"):
            return fault
    return None


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
