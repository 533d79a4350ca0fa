"""The `math` reward: whether two mathematical expressions are equal. Runs in child processes only.

Imports nothing of ours, so that a child starts fast, and math-verify at the top, so that loading it does not
count as time spent on the first completion. Its own time limits are off: they are signals, which a long
multiplication does not see, while the parent kills the child.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns when its time limits are off

DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""Where LaTeX begins in a text."""


def math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the completion's last answer equals the reference, else 0.0; None for an unreadable reference."""
    return [_compare(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def _compare(completion: str, gold: str) -> float | None:
    reference = _parse_gold(gold)
    if not reference:
        return None
    if completion.strip() == gold.strip():
        return 1.0
    return float(verify(reference, _parse(_delimit(completion)), timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> list[Any]:
    """A reference without delimiters is an expression as a whole, LaTeX or plain, perhaps with a full stop."""
    return _parse(gold if DELIMITED.search(gold) else rf"\boxed{{{gold.rstrip(' .,')}}}")


def _delimit(completion: str) -> str:
    r"""Mark bare LaTeX in the last line as such: of "3\sqrt{13}", math-verify would read the 3."""
    last_line = completion.rstrip().rpartition("\n")[2].rpartition("####")[2]
    bare = "\\" in last_line and not DELIMITED.search(completion)
    return rf"\boxed{{{last_line}}}" if bare else completion


def _parse(text: str) -> list[Any]:
    # Without the fallback, which is the unparsed text: of "a + b + c" it keeps "a +".
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)
