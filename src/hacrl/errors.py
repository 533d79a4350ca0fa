"""Warnings, and errors that a user can fix: these are shown without a traceback and end with exit code 2."""

import difflib
import logging
import re
from collections.abc import Iterable
from importlib.util import find_spec

OUT_OF_MEMORY = 3
"""Exit code of a run that ran out of memory; it may succeed if less runs at the same time."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, change colours or reverse the text direction; and unpaired surrogates."""

LACK_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong, where, and what to do."""

    def __str__(self) -> str:
        return harmless(super().__str__())  # Python shows it, too, when a script lets it pass


class TrainingDiverged(Exception):
    """Three updates in a row had a non-finite loss or gradient."""


def lack_of_memory(error: RuntimeError) -> str | None:
    """The line of an error that says that memory ran out; None if the error has another reason.

    torch has a class for this, which is not imported here; CUDA, and torch on a CPU, say it only in the message.
    """
    said = [line.strip() for line in str(error).splitlines() if any(words in line for words in LACK_OF_MEMORY)]
    return said[0] if said else str(error) if type(error).__name__ == "OutOfMemoryError" else None


def system_error(error: BaseException | None) -> int | None:
    """The errno behind a library's error: torch chains the OSError, Rust libraries quote its number in the message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        quoted = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
        if quoted:
            return int(quoted[1] or quoted[2])
        error = error.__context__
    return None


def require(what: str, extra: str, *packages: str) -> None:
    """Raise UserError unless the packages of an optional part of hacrl are installed; `what` needs them."""
    for package in packages:
        if find_spec(package) is None:
            missing = package.replace("_", "-")
            raise UserError(f"{what} needs the package {missing}: run pip install 'hacrl[{extra}]'.")


def warn(message: str) -> None:
    """Print a warning on standard error; the run goes on."""
    logging.getLogger("hacrl").warning(harmless(message))


def harmless(text: str) -> str:
    """Escape control characters, as \\x1b or \\u202e, so that a terminal can show text that others wrote."""
    return CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)


def nearest(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: the closest known name, or all known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; choose from {', '.join(known)}"
