"""Two rewards for chains of additions. A file of rewards needs nothing of hacrl.

A reward gets the prompts, the completions, and every column of the data under its name, here `answer` and `longest`.
It returns a number for each completion, or None where it has nothing to say.
"""

import re
from typing import Any

EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+);")


def right(completions: list[str], answer: list[str], longest: list[int], **columns: Any) -> list[float]:
    """1 for the right number after the last `#`, in at most as many characters as the row allows."""
    rows = zip(completions, answer, longest, strict=True)
    return [float(text.rpartition("#")[2] == gold and len(text) <= most) for text, gold, most in rows]


def steps(completions: list[str], **columns: Any) -> list[float | None]:
    """Share of the written equations that hold; None for a completion without equations."""
    return [share(EQUATION.findall(text)) for text in completions]


def share(equations: list[tuple[str, str, str, str]]) -> float | None:
    holds = [int(a) + (int(b) if sign == "+" else -int(b)) == int(total) for a, sign, b, total in equations]
    return sum(holds) / len(holds) if holds else None
