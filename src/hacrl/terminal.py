"""The console that everything is printed through, and what is printed alike everywhere.

The console escapes control characters, and says when its output was closed.
"""

import logging
import os
import sys
import traceback
from collections.abc import Container, Iterable
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hacrl.errors import CONTROL, harmless

OUTPUT_CLOSED = 141
"""Exit code after the output was closed, the same as that of programs which SIGPIPE ends."""


class OutputClosed(BaseException):
    """The program that read the output is gone, as in `hacrl train demo | head -1`; an interruption, not an error."""


class Terminal(Console):
    """A console that takes texts literally, escapes their control characters, and says when its output was closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_text = segment.control is None and CONTROL.search(segment.text)
            yield Segment(harmless(segment.text), segment.style) if is_text else segment

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        # What is still in the buffer goes nowhere, so that Python does not fail when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise OutputClosed


def say(console: Console, *texts: str) -> None:
    """Print each text as it is, without breaking its lines."""
    for text in texts:
        console.print(Text(text), soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Print a remark that is no warning."""
    console.print(Text.assemble(("note ", "yellow"), text), soft_wrap=True)


def new_table(title: str, *columns: str, left: Container[str] = ("agent", "model"), **options: Any) -> Table:
    """An empty table with numbers to the right, and texts, whose columns are named, to the left."""
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", **options)
    return table


def decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def bar(width: int, done: int, total: int) -> Text:
    """How much is done, as a bar of this width."""
    filled = min(width, width * done // total)
    return Text.assemble(("━" * filled, "green"), ("╌" * (width - filled), "dim"))


class _HarmlessRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return harmless(super().getMessage())


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody caught, with control characters escaped; used as sys.excepthook."""
    print(harmless("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def guard_logs() -> None:
    """Escape control characters in all log messages of this process: those of transformers quote a model's files."""
    logging.setLogRecordFactory(_HarmlessRecord)
