"""Errors that are the user's to mend, shown as one sentence, without a traceback, exit code 2; and warnings."""

import difflib
import logging
from collections.abc import Iterable


class UserError(Exception):
    """What is wrong, where, and what to do about it."""


class TrainingDiverged(Exception):
    """Three updates in a row had a non-finite loss or gradient."""


def warn(message: str) -> None:
    """Something the user should know that does not stop the run: one line on standard error."""
    logging.getLogger("hacrl").warning(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: what may have been meant, or what there is."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; choose from {', '.join(known)}"
