"""Turns library errors about a user's files into one sentence that names agent, folder and file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hacrl.errors import UserError, lack_of_memory

LONGEST_REASON = 400
"""Most characters of a reason; for an unknown model, transformers lists every model it knows."""
AGAIN = "Download or save it again."
OWN_CODE = "it brings Python code of its own, which was not run. If you trust it, set trust_remote_code: true."


@contextmanager
def opening(where: str, source: str | Path, file: str = "") -> Iterator[None]:
    """Turn any error inside into a UserError about `source`, a folder or hub id, and the `file` in it that is read.

    Use this only around library calls that read a user's files, because these raise errors of any type.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a TypeError of transformers about a config is as much about the file as its OSError
        if isinstance(error, RuntimeError) and lack_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise not_loaded(where, source, OWN_CODE) from error
        why = f"{file}: {reason(error)}." if file else f"{reason(error)}."
        about_files = Path(source).expanduser().exists() and not isinstance(error, ImportError)
        raise not_loaded(where, source, f"{why} {AGAIN}" if about_files else why) from error


def not_loaded(where: str, source: str | Path, why: str) -> UserError:
    what = str(source)
    if not what.startswith("zoo:") and not Path(what).expanduser().exists():
        what = f"there is no folder {what}, and the hub's model of that name"
    return UserError(f"{where}: {what} could not be loaded: {why}")


def reason(error: Exception) -> str:
    """An error's message on one line, without its full stop; with the error's type if the message alone says little."""
    said = " ".join(str(error).split()).rstrip(".")
    if not said or not isinstance(error, OSError | ValueError | RuntimeError) or isinstance(error, RecursionError):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]} ..."
