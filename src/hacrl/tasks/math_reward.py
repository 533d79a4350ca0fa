"""The `math` reward: whether two mathematical expressions are equal. Runs in child processes only.

Imports nothing of ours, so that a child starts fast, and math-verify at the top, so that loading it does not
count as time spent on the first completion. Its own time limits are off: they are signals, which a long
multiplication does not see, while the parent kills the child.
"""

import logging
import re
import runpy
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns when its time limits are off

# By its path: importing hacrl would import torch.
_boxed = runpy.run_path(str(Path(__file__).with_name("boxed.py")))
same_text, scientific, stated, tidy, tidy_boxes = (
    _boxed[name] for name in ("same_text", "scientific", "stated", "tidy", "tidy_boxes")
)

DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""Where LaTeX begins in a text."""
ARGUMENT = re.compile(r"\\[a-zA-Z]+\s*\{[^{}]*\}")
"""A command with what stands in its braces: \\text{square units}."""
WORD = re.compile(
    r"(?<!\S)[^\w\s\\{}^]*"
    r"(?:(?:(?!and\b)[a-z]{3,}|am|an|as|at|be|by|do|he|if|in|is|it|me|my|no|of|on|so|to|up|us|we)(?:['’-][a-z]+)*"
    r"|a(?=\s+(?:\d|\\[$\\]|[a-z]{2})))"
    r"[^\w\s\\{}^]*(?!\S)",
    re.IGNORECASE,
)
"""A word of a sentence with its punctuation. "Or" and "and" may join the parts of an answer; other short ones are
variables, xy, or units."""


def math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the completion's last answer equals the reference, else 0.0; None for an unreadable reference."""
    return [_compare(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def same_answer(completions: list[str], others: list[list[str]], **columns: Any) -> list[float | None]:
    """Which of the other completions has the same answer: the position of the first, -1 if none has, None without
    an answer."""
    return [_first_equal(completion, among) for completion, among in zip(completions, others, strict=True)]


def read_as_math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 where math-verify finds completion and reference equal, whether or not they are spelled alike."""
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
    """A reference without delimiters is an expression as a whole, LaTeX or plain, perhaps with a full stop."""
    return _parse(tidy_boxes(gold) if DELIMITED.search(gold) else rf"\boxed{{{tidy(gold)}}}")


@lru_cache(maxsize=1024)
def _parse_completion(completion: str) -> list[Any]:
    return _parse(_delimit(completion))


def _delimit(completion: str) -> str:
    r"""Mark the answer in the last line as such where no box does: bare LaTeX (of "3\sqrt{13}", math-verify would
    read the 3), and what stands behind #### (it would rather take a number near the word "answer")."""
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
    """A line cut up before and behind each word of a sentence."""
    hidden = ARGUMENT.sub(lambda found: "\\" * len(found[0]), line)
    cuts = [cut for word in WORD.finditer(hidden) for cut in word.span()]
    return [line[start:end] for start, end in pairwise([0, *cuts, len(line)])]


def _in_dollars(latex: str) -> str:
    latex = tidy(latex).strip("*= ")
    return f" ${latex}$ " if latex else " "


def _parse(text: str) -> list[Any]:
    # Without the fallback, which is the unparsed text: of "a + b + c" it keeps "a +".
    return list(parse(text, fallback_mode="no_fallback", parsing_timeout=None))
