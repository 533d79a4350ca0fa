"""The `math` reward: whether two mathematical expressions are equal. It runs only in child processes.

This file imports nothing from hacrl, so that a child starts fast. It imports math-verify at the top, so that the import
does not count as time spent on the first completion. math-verify's own time limits are off: they use signals, which do
not interrupt a long multiplication. The parent kills the child instead.
"""

import logging
import re
import runpy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns if its time limits are off

# Load it by its path, because importing hacrl would import torch.
_boxed = runpy.run_path(str(Path(__file__).with_name("boxed.py")))
same_text, scientific, stated, tidy, tidy_boxes = (
    _boxed[name] for name in ("same_text", "scientific", "stated", "tidy", "tidy_boxes")
)

DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""Matches the beginning of LaTeX in a text."""
ARGUMENT = re.compile(r"\\[a-zA-Z]+\s*\{[^{}]*\}")
"""Matches a command with its argument in braces: \\text{square units}."""
WORD = re.compile(
    r"(?<!\S)[^\w\s\\{}^]*"
    r"(?:(?:(?!and\b)[a-z]{3,}|am|an|as|at|be|by|do|he|if|in|is|it|me|my|no|of|on|so|to|up|us|we)(?:['’-][a-z]+)*"
    r"|a(?=\s+(?:\d|\\[$\\]|[a-z]{2})))"
    r"[^\w\s\\{}^]*(?!\S)",
    re.IGNORECASE,
)
"""Matches a word of a sentence with its punctuation. "Or" and "and" are left out because they may join parts of an
answer; other short words are variables, such as xy, or units."""


def math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 if the completion's last answer equals the reference, else 0.0; None if the reference is unreadable."""
    return [_compare(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def same_answer(completions: list[str], others: list[list[str]], **columns: Any) -> list[float | None]:
    """For each completion, the position of the first of `others` with the same answer; -1 if there is none, None if the
    completion has no answer."""
    return [_first_equal(completion, among) for completion, among in zip(completions, others, strict=True)]


def read_as_math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 if math-verify finds completion and reference equal, else 0.0; equal spelling is not used as a shortcut."""
    pairs = zip(completions, answer, strict=True)
    return [float(_equal(_parse_gold(gold), _parse_completion(completion))) for completion, gold in pairs]


def _compare(completion: str, gold: str) -> float | None:
    if not gold.strip():
        return None
    answer = stated(completion)
    if answer is not None and same_text(answer, gold):
        return 1.0
    reference = _parse_gold(gold)
    if not reference:
        return None
    if completion.strip() == gold.strip():
        return 1.0
    return float(_equal(reference, _parse_completion(completion)))


def _first_equal(completion: str, among: list[str]) -> float | None:
    answer, own = stated(completion), _parse_completion(completion)
    if not own and not (answer or "").strip():
        return None
    for position, other in enumerate(among):
        others = stated(other)
        if answer is not None and others is not None and same_text(answer, others):
            return float(position)
        reading = _parse_completion(other)
        if own and reading and _equal(reading, own):
            return float(position)
    return -1.0


def _equal(reference: list[Any], own: list[Any]) -> bool:
    return bool(verify(reference, own, timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> list[Any]:
    """Parse a reference. Without delimiters, all of it is one expression, LaTeX or plain, perhaps with a full stop."""
    return _parse(tidy_boxes(gold) if DELIMITED.search(gold) else rf"\boxed{{{tidy(gold)}}}")


@lru_cache(maxsize=1024)
def _parse_completion(completion: str) -> list[Any]:
    return _parse(_delimit(completion))


def _delimit(completion: str) -> str:
    r"""Put delimiters around the answer in the last line if there is no box: bare LaTeX (in "3\sqrt{13}", math-verify
    would read only the 3), and the text after #### (it would prefer a number near the word "answer")."""
    if "\\boxed" in completion:
        return str(tidy_boxes(completion))
    text, newline, last_line = completion.rstrip().rpartition("\n")
    _, marked, answer = last_line.rpartition("####")
    if marked:
        return rf"\boxed{{{tidy(answer)}}}"
    if DELIMITED.search(completion):
        return str(scientific(completion))
    if "\\" not in last_line:
        return completion
    pieces = _between_words(last_line)
    if len(pieces) == 1:
        return rf"\boxed{{{tidy(last_line)}}}"
    return text + newline + "".join(_in_dollars(piece) if "\\" in piece else piece for piece in pieces)


def _between_words(line: str) -> list[str]:
    """Cut a line before and after each word of a sentence."""
    hidden = ARGUMENT.sub(lambda found: "\\" * len(found[0]), line)
    cuts = [cut for word in WORD.finditer(hidden) for cut in word.span()]
    return [line[start:end] for start, end in pairwise([0, *cuts, len(line)])]


def _in_dollars(latex: str) -> str:
    latex = tidy(latex).strip("*= ")
    return f" ${latex}$ " if latex else " "


def _parse(text: str) -> list[Any]:
    # No fallback: it is the unparsed text, and keeps "a +" of "a + b + c".
    return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None))
