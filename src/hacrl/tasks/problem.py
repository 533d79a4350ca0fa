"""One question of a task."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[dict[str, str]]
"""A plain string, or chat messages."""


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: Prompt
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the data row, for the reward functions (`answer` among them)."""
    part: str | None = None
    """Which part of a mixture it comes from."""


def digest(problems: Iterable[Problem]) -> str:
    """Tells whether they are the same questions with the same answers."""
    content = "\0".join(f"{problem.prompt}\0{problem.answer}" for problem in problems)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]
