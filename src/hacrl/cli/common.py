"""What several commands share: the console, options, and how a command ends that cannot go on."""

import errno
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text
from typer import Argument

from hacrl import terminal
from hacrl.errors import TrainingDiverged, UserError, harmless, system_error
from hacrl.terminal import OUTPUT_CLOSED, OutputClosed, Terminal

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_MESSAGE = 10_000
"""Characters of an error that are shown: a value in it may be a whole file."""

console = Terminal()
say = partial(terminal.say, console)
"""Prints texts as they are, without breaking their lines."""

RunFolder = Annotated[Path, Argument(help="The folder of a run.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="For example max_steps=20 seed=1.")]


def finite(number: float | None) -> float | None:
    """Refuse nan, which is inside every range."""
    if number is not None and math.isnan(number):
        raise typer.BadParameter("nan is not a number.")
    return number


def fail(message: str, code: int) -> NoReturn:
    """End the program with an error in one sentence."""
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 2 :]}"
    with suppress(OutputClosed):
        Terminal(stderr=True).print(Text.assemble(("error ", "bold red"), harmless(message)), soft_wrap=True)
    sys.exit(code)


@contextmanager
def continued_by(advice: str, needed: Path | None = None) -> Iterator[None]:
    """Say how to continue what was interrupted by hand, by a closed output or by a full disk.

    Without the file that is `needed` for it, nothing can be continued.
    """

    def end(reason: str, code: int) -> NoReturn:
        fail(f"{reason}; {advice if needed is None or needed.is_file() else 'nothing was saved yet.'}", code)

    try:
        yield
    except KeyboardInterrupt:  # here, because typer would end the program without a word
        end("interrupted", 130)
    except OutputClosed:
        end("stopped, because the program that read the output closed it", OUTPUT_CLOSED)
    except (UserError, TrainingDiverged):
        raise
    except Exception as error:
        if system_error(error) in OUT_OF_SPACE:
            end(f"The disk is full ({error}). Free some space", 2)
        raise
