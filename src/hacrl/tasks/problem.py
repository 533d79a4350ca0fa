"""One problem of a task, and hashes of texts."""

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
    """All columns of the data row, including `answer`, for the reward functions."""
    part: str | None = None
    """Label of the part of a mixture that the problem comes from; None without a mixture."""


def text_number(text: str, num_bytes: int) -> int:
    """Hash of a text as a number, the same in every process; splits and seeds are derived from it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big")


def digest(problems: Iterable[Problem]) -> str:
    """Checksum of prompts and answers; it changes if the data change."""
    content = "\0".join(f"{problem.prompt}\0{problem.answer}" for problem in problems)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]
