"""Errors that are the user's to mend: shown as one sentence, without a traceback, exit code 2."""


class UserError(Exception):
    """What is wrong, where, and what to do about it."""


class TrainingDiverged(Exception):
    """Three updates in a row had a non-finite loss or gradient."""
