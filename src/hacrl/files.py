"""Reads JSON files and checks that they hold what we wrote; records.py lists those of runs and studies.

A crash or a person may have damaged a file. Then a `UserError` names the file and the line, and says what is wrong
there and what to do.
"""

import codecs
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from hacrl.errors import UserError

Line = dict[str, Any]
Number = float | None
"""A number; None stands for one that is not finite or not known."""
LINE_ADVICE = "Fix or delete that line."
Shape = Any
"""What a value must be: a type, a tuple of alternative shapes, [shape of each item], or {key: shape} for an
object, where `key?` may be missing and `*` stands for all other keys."""


@dataclass(frozen=True)
class Kind:
    """A kind of JSON object that we write, alone in a file or one a line."""

    what: str
    """What an error message calls it."""
    shape: Shape
    advice: str
    """What an error message tells the user to do with a damaged one."""
    exact: bool = False
    """Whether numbers that are not finite stay as they are; otherwise they become None."""
    grows: bool = False
    """Whether the file grows line by line: a last line without its end was interrupted, and does not count."""


NUMBER = (int, float, NoneType)
"""A number in JSON, where null stands for one that is not finite."""
LARGEST = 2**63
"""Whole numbers in our files are smaller than this. Not all larger ones fit into a float."""


def shape_of(annotation: Any) -> Shape:
    """The shape that a type describes. Keys that a TypedDict does not list may hold anything."""
    if is_typeddict(annotation):
        types, required = get_type_hints(annotation), annotation.__required_keys__
        return {name if name in required else f"{name}?": shape_of(each) for name, each in types.items()}
    origin, parts = get_origin(annotation), [shape_of(part) for part in get_args(annotation)]
    if origin is dict:
        return {"*": parts[1]}
    if origin in (list, UnionType):
        return parts if origin is list else tuple(parts)
    return (int, float) if annotation is float else annotation


def read_object(path: Path, kind: Kind) -> Line:
    """The JSON object that a file holds."""
    return _parsed(read_bytes(path).removeprefix(codecs.BOM_UTF8), kind, str(path))


def read_lines(path: Path, kind: Kind) -> list[Line]:
    """The JSON objects of a file, one a line."""
    return [line for _, line in each_line(path, kind)]


def each_line(path: Path, kind: Kind) -> Iterator[tuple[str, Line]]:
    """Yield each line of a file, as text and as an object; UserError when a damaged line is reached."""
    return parse_lines(read_bytes(path).removeprefix(codecs.BOM_UTF8), path, kind)


def parse_lines(data: bytes, path: Path, kind: Kind, first: int = 1) -> Iterator[tuple[str, Line]]:
    """Yield the lines in a piece of a file; `first` is the number of its first line."""
    texts = data.split(b"\n")
    if kind.grows:
        texts.pop()
    for n, text in enumerate(texts, first):
        if text.strip():
            line = _parsed(text, kind, f"{path}, line {n},", is_line=True)
            yield text.decode("utf-8", "surrogatepass"), line


def read_bytes(path: Path, start: int = 0) -> bytes:
    """Read a file from an offset on, or its last bytes if `start` is negative; FileNotFoundError if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(start if start >= 0 else max(os.fstat(file.fileno()).st_size + start, 0))
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


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


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def mismatch(value: Any, shape: Shape, name: str = "") -> str | None:
    """Say what is wrong with a value that does not have this shape; None if it has."""
    if isinstance(shape, tuple):
        faults = [mismatch(value, each, name) for each in shape]
        return None if None in faults else max(faults, key=lambda fault: len(str(fault)))  # the one found deepest
    if isinstance(shape, list) and isinstance(value, list):
        return next((fault for item in value if (fault := mismatch(item, shape[0], name))), None)
    if isinstance(shape, dict) and isinstance(value, dict):
        return _mismatched_key(value, shape, f"{name}." if name else "")
    if isinstance(shape, type) and isinstance(value, shape):
        number_fits = not isinstance(value, int) or (not isinstance(value, bool) and abs(value) < LARGEST)
        if number_fits or shape in (object, bool):
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
