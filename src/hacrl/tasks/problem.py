"""One question of a task, and numbers that depend on a text alone."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Prompt = str | list[dict[str, str]]
"""A plain string, or chat messages."""


Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Problem:
    """A prompt with its reference answer."""

    id: str
    prompt: Prompt
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the data row, for the reward functions (`answer` among them)."""
    part: str | None = None
    """Which part of a mixture it comes from."""


def text_number(text: str, num_bytes: int) -> int:
    """A number that the text alone decides, the same in every process: splits and seeds are derived from it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big")


def digest(problems: Iterable[Problem]) -> str:
    """A checksum of questions and answers: it changes when the data do."""
    content = "\0".join(f"{problem.prompt}\0{problem.answer}" for problem in problems)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]
