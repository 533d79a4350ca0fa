"""What a run is given from Python in place of a name: rows of data, and reward functions.

Files of the run name such an object by a text that begins with `GIVEN`. Nothing can be read back from that text.
"""

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, PlainSerializer, WithJsonSchema
from pydantic_core.core_schema import CoreSchema, is_instance_schema

GIVEN = "given from Python: "
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The part of an object's repr that differs from process to process."""
INSTEAD = {
    "DatasetDict": "a DatasetDict has several splits: give one of them, for example data['train']",
    "IterableDataset": "an IterableDataset has no length: give Dataset.from_list(list(data))",
    "dict": "a dict of columns is given as Dataset.from_dict(data)",
    "generator": "rows of a generator are given as a list: list(rows)",
    "DataFrame": "a DataFrame is given as Dataset.from_pandas(frame), or frame.to_dict('records')",
}
"""What to give in place of some types that are not accepted."""


class Given:
    """An object that pydantic checks by its class alone."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return is_instance_schema(cls)


@dataclass(frozen=True)
class GivenRows(Given):
    """Rows of data. Two are equal if their contents are."""

    rows: list[dict[str, Any]] = field(repr=False, compare=False)
    digest: str
    """Checksum of all columns."""

    def __str__(self) -> str:
        return f"{GIVEN}{len(self.rows)} rows, digest {self.digest}"


@dataclass(frozen=True)
class GivenReward(Given):
    """A reward function."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return name_of(self.function)

    def __str__(self) -> str:
        return GIVEN + self.name


def name_of(function: Callable[..., Any]) -> str:
    """The name of a reward function in metrics: its own, as in TRL, or that of its class."""
    named = inspect.isroutine(function) or inspect.isclass(function)
    return function.__name__.strip("<>") if named else type(function).__name__


def rows_given(rows: list[Any]) -> GivenRows:
    """Rows with their digest; ValueError unless each is a dict."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is a {type(row).__name__}, expected a dict with a prompt and an answer")
        if not all(isinstance(name, str) for name in row):
            raise ValueError(f"row {number} has a column whose name is not a text")
    if not rows:
        raise ValueError("there are no rows: at least one with a prompt and an answer is needed")
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps(sorted(row.items()), default=_stable, skipkeys=True).encode() + b"\n")
    return GivenRows([dict(row) for row in rows], content.hexdigest()[:16])


def _stable(value: object) -> Any:
    """What stands for a value that JSON has not: for an array its contents, for others how they are printed."""
    return value.tolist() if hasattr(value, "tolist") else ADDRESS.sub("", repr(value))


def _data(value: Any) -> Any:
    """Take what names data, or is data."""
    if value is None or isinstance(value, str | GivenRows):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    datasets = sys.modules.get("datasets")  # without it, nothing is a Dataset
    if datasets is not None and isinstance(value, datasets.Dataset):
        return rows_given(value.to_list())
    if isinstance(value, list | tuple):
        return rows_given(list(value))
    expected = "expected a file, a hub id, a datasets.Dataset or a list of dicts"
    raise ValueError(INSTEAD.get(type(value).__name__) or f"{expected}, not {type(value).__name__}")


def _reward(value: Any) -> Any:
    return GivenReward(value) if callable(value) else value


def _text(value: object) -> str | None:
    return None if value is None else str(value)


Data = Annotated[
    str | GivenRows | None,
    BeforeValidator(_data),
    PlainSerializer(_text, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
"""A file, a folder or a hub id; or rows."""
RewardName = Annotated[
    str | GivenReward,
    BeforeValidator(_reward),
    PlainSerializer(_text, when_used="json"),
    WithJsonSchema({"type": "string"}),
]
"""The name of a reward; or a function."""
