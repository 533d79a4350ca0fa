"""The console that everything is printed through. It escapes control characters, and its output may be closed."""

import logging
import os
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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


class _HarmlessRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return harmless(super().getMessage())


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody caught, with control characters escaped; used as sys.excepthook."""
    print(harmless("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def guard_logs() -> None:
    """Escape control characters in all log messages of this process: those of transformers quote a model's files."""
    logging.setLogRecordFactory(_HarmlessRecord)
