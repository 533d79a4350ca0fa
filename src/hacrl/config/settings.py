"""Reads settings before they are checked: presets, YAML files and `key=value`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacrl.config.strict_yaml import MAX_DEPTH, load_yaml
from hacrl.errors import UserError, nearest

PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the bundled configs of runs."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_source(source: str | Path) -> tuple[dict[str, Any], str]:
    """Return the settings in a preset or a YAML file, and its name for error messages."""
    path = Path(source)
    if str(source) in preset_names():
        path = PRESETS / f"{source}.yaml"
    elif not os.path.isfile(path):  # os.path.isfile returns False for a name that is too long
        if (path / "config.yaml").is_file():
            how = f"`hacrl train {path} --resume` (in Python: resume=True)"
            raise UserError(f"{path} is the folder of a run. Continue it with {how}.")
        if path.suffix in (".yaml", ".yml") or path.parent != Path():
            raise UserError(
                f"There is no file {path}. A preset ({', '.join(preset_names())}) or a YAML file is needed."
            )
        raise UserError(f"{str(source)!r} is neither a file nor a preset{nearest(str(source), preset_names())}")
    data = load_yaml(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold keys and values (algorithm, agents, task, ...).")
    return data, str(source)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply each `a.b.c=value`. The last one wins; another algorithm.name starts from that algorithm's defaults."""
    values: dict[tuple[str, ...], Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r} is not of the form key=value, for example max_steps=20.")
        if key.count(".") >= MAX_DEPTH:
            raise UserError(f"{key[:40]}...: more than {MAX_DEPTH} names with dots between them.")
        path = tuple(key.split("."))
        values.pop(path, None)
        values[path] = load_yaml(text, f"The value of {key}")
    # The name decides which options exist, so it comes before them wherever it stands.
    naming = ("algorithm",), ("algorithm", "name")
    for path, value in sorted(values.items(), key=lambda item: item[0] not in naming):
        section = data.get("algorithm")
        name = section.get("name", value) if isinstance(section, dict) else None  # options without a name stay
        renamed = path == ("algorithm", "name") and name != value
        if renamed or (path == ("algorithm",) and isinstance(value, str)):
            data = {**data, "algorithm": {"name": value}}
        else:
            data = _replace(data, path, value, ".".join(path))
    return data


def with_overrides(where: str, overrides: Sequence[str]) -> str:
    """The place of a mistake for error messages. It names the overrides too, because one of them may be wrong."""
    return " ".join([where, "with", *overrides] if overrides else [where])


def find_item(items: Sequence[Any], path: Sequence[str], where: str) -> tuple[int, Sequence[str]]:
    """The position of the item that a path begins with, by its id or its position, and the rest of the path."""
    ids = [str(item.get("id", position)) if isinstance(item, dict) else "" for position, item in enumerate(items)]
    # An id may contain dots: the longest that fits is meant.
    parts = next((n for n in range(len(path), 0, -1) if ".".join(path[:n]) in ids), 1)
    key = ".".join(path[:parts])
    position = ids.index(key) if key in ids else int(key) if key.isdecimal() and len(key) < 10 else -1
    if not 0 <= position < len(items):
        raise UserError(f"{where}: there is no item {key!r}{nearest(key, ids)}")
    return position, path[parts:]


def _replace(node: Any, path: Sequence[str], value: Any, where: str) -> Any:
    """A copy of the tree with one place changed."""
    if not path:
        return value
    if isinstance(node, list):
        position, rest = find_item(node, path, where)
        return [_replace(item, rest, value, where) if i == position else item for i, item in enumerate(node)]
    key, rest = path[0], path[1:]
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise UserError(f"{where}: {key!r} cannot be set, because its parent is the value {node!r}.")
    return {**node, key: _replace(node.get(key), rest, value, where)}
