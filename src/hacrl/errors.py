"""Errors that are the user's to mend, shown as one sentence, without a traceback, exit code 2; and warnings."""

import logging


class UserError(Exception):
    """What is wrong, where, and what to do about it."""


class TrainingDiverged(Exception):
    """Three updates in a row had a non-finite loss or gradient."""


def warn(message: str) -> None:
    """Something the user should know that does not stop the run: one line on standard error."""
    logging.getLogger("hacrl").warning(message)
