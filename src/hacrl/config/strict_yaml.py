"""Reads and writes all YAML. Anything that could surprise or overwhelm is refused with its line and column."""

import reprlib
from typing import Any

import yaml

from hacrl.errors import CONTROL, UserError, harmless

MAX_BYTES = 250_000
"""Size of the largest text that is read, which takes a second or two."""
MAX_DEPTH = 100
"""The deepest nesting, aliases included."""
MAX_SIZE = 250_000
"""The most values and characters, each alias counted as what it stands for."""
MAX_INTEGER = 10**100

PREFIX = "tag:yaml.org,2002:"
MERGE = f"{PREFIX}merge"
PLAIN = {PREFIX + name for name in ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge", "value")}

KINDS = {"int": "whole number", "float": "number", "bool": "boolean", "timestamp": "date"}


class Refused(yaml.MarkedYAMLError):
    """Raised for valid YAML that no setting needs."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class StrictLoader(yaml.SafeLoader):
    """A SafeLoader that takes plain data only, each key once, and nothing that grows without end."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._extent: dict[yaml.Node, tuple[int, int]] = {}
        """Size and depth of each node that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._level += 1
        if self._level > MAX_DEPTH:
            raise Refused(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(event, yaml.AliasEvent) and node not in self._extent:
            raise Refused(f"the alias *{event.anchor} refers to itself", event.start_mark)
        if node is not None and node not in self._extent:
            self._extent[node] = self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        """Return the size and depth of a node; refuse tags, duplicate keys, and what is too large or too deep."""
        if node.tag not in PLAIN:
            raise Refused(f"the tag {node.tag!r} has no meaning in settings", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value), 1
        children = node.value
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            children = [part for pair in node.value for part in pair]
        extents = [self._extent[child] for child in children]
        size, depth = 1 + sum(size for size, _ in extents), 1 + max((depth for _, depth in extents), default=0)
        if size > MAX_SIZE:
            raise Refused(f"more than {MAX_SIZE:,} values and characters, with aliases written out", node.start_mark)
        if depth > MAX_DEPTH:
            raise Refused(f"nested deeper than {MAX_DEPTH} levels, with aliases written out", node.start_mark)
        return size, depth

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Refuse duplicate keys. Merges, which may repeat keys, are carried out later."""
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise Refused("a key must be a text or a number", key_node.start_mark)
            key = key_node.value if key_node.tag in (MERGE, f"{PREFIX}value") else self.construct_object(key_node)
            if key in seen:
                problem = f"the key {key_node.value!r} is already in line {seen[key]}; remove one of them"
                raise Refused(problem, key_node.start_mark)
            seen[key] = key_node.start_mark.line + 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Convert a value. What the SafeLoader cannot convert, such as 2026-99-99, is an error with a place."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            kind = node.tag.removeprefix(PREFIX)
            problem = f"{reprlib.repr(node.value)} is not a valid {KINDS.get(kind, kind)}"
            if kind == "timestamp" and isinstance(error, ValueError):
                problem += f": {error}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise Refused("a number of more than 100 digits", node.start_mark)
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise Refused("an incomplete character (a lone surrogate, \\ud800 to \\udfff)", node.start_mark)
        return value


def load_yaml(text: str | bytes, where: str) -> Any:
    """Return the data of a YAML text. A UserError begins with `where` and names the line and column."""
    if len(text) > MAX_BYTES:
        raise UserError(f"{where}: {len(text):,} bytes are too many for settings; at most {MAX_BYTES:,} are read.")
    if isinstance(text, bytes):
        text = _decode(text, where)
    try:
        loader = StrictLoader(text)
    except yaml.reader.ReaderError as error:
        line, column = line_and_column(text[: error.position])
        raise UserError(
            f"{where}: line {line}, column {column}: not valid YAML: the character #x{error.character:04x} cannot be "
            'there; write it as "\\u...." in double quotes, or remove it.'
        ) from None
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        kind = "" if isinstance(error, Refused) else "not valid YAML: "
        said = ", ".join(part for part in (error.context, error.problem) if part)
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF"
        mark, kind, said = loader.get_mark(), "not valid YAML: ", str(error)
    raise UserError(f"{where}: line {mark.line + 1}, column {mark.column + 1}: {kind}{' '.join(said.split())}.")


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = line_and_column(content[: error.start].decode("utf-8"))
        raise UserError(
            f"{where}: line {line}, column {column}: not valid YAML: the byte {content[error.start]:#04x} is not "
            "UTF-8; save the file with the encoding UTF-8."
        ) from None


def line_and_column(before: str) -> tuple[int, int]:
    """Line and column of the place right after a text."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


class _Dumper(yaml.SafeDumper):
    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(f"{PREFIX}str", text, style='"' if CONTROL.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def dump_yaml(data: Any, **options: Any) -> str:
    """Data as YAML that is safe to print: control characters are escapes in double quotes."""
    return harmless(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))
