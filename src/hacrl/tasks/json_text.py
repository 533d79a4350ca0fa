"""Strict reading of users' JSON: duplicate keys, deep nesting and bad text are errors that name their place."""

import json
import re
import reprlib
from typing import Any

from hacrl.config.strict_yaml import MAX_DEPTH, line_and_column
from hacrl.errors import UserError

TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")\s*(:?)|[\[{]|[\]}]', re.DOTALL)
"""Matches the tokens that matter for keys and nesting: strings, with a colon if they are keys, and brackets."""


class _Twice(ValueError):
    """Raised if an object has the same key twice."""


def parse_json(content: bytes, place: str) -> Any:
    """Parse a JSON text; a UserError names the place, the column and, if there are several lines, the line."""
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        # A text with few brackets cannot nest deeply, even if some of them are inside strings.
        if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        return value
    except (RecursionError, _Twice):
        text = content.decode(json.detect_encoding(content), "replace")
        position, fault = _first_fault(text)
        raise UserError(f"{place}, {_place(text[:position], text)}: {fault}. Fix or delete it.") from None
    except json.JSONDecodeError as error:
        where, fault = _place(error.doc[: error.pos], error.doc), error.msg
    except UnicodeDecodeError as error:
        text = content.decode(error.encoding, "replace")
        before = content[: error.start].decode(error.encoding, "replace")
        where, fault = _place(before, text), f"not text in {error.encoding} ({error.reason})"
    except ValueError:  # Python reads integers of up to 4,300 digits
        where, fault = "", "a number has too many digits"
    raise UserError(f"{place} is not valid JSON: {f'{where}: ' if where else ''}{fault}. Fix or delete it.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _first_fault(text: str) -> tuple[int, str]:
    """The first position where a key is repeated or the nesting is too deep, and a message saying which."""
    keys: list[set[str]] = []
    for token in TOKEN.finditer(text):
        if token[0] in "[{":
            keys.append(set())
            if len(keys) > MAX_DEPTH:
                return token.start(), f"nested deeper than {MAX_DEPTH} levels"
        elif token[0] in "]}":
            keys.pop()
        elif token[2]:
            key = json.loads(token[1])
            if key in keys[-1]:
                return token.start(), f"the key {reprlib.repr(key)} is there twice"
            keys[-1].add(key)
    raise AssertionError("a text without a fault was refused")


def _place(before: str, text: str) -> str:
    line, column = line_and_column(before)
    return f"line {line}, column {column}" if "\n" in text.rstrip() else f"column {column}"
