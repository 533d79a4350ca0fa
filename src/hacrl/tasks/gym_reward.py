"""The reward of tasks from reasoning-gym: the generator's own scorer. It runs only in child processes.

Some scorers evaluate what a model wrote, which can take long. This file imports nothing from hacrl. It imports
reasoning-gym at the top, so that the import does not count as time spent on the first completion.
"""

import json
import os
from functools import lru_cache
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # scorers need only one, and agents need the cores

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer


def gym(
    completions: list[str], entry: list[Any], generator: list[str], options: list[Any], form: list[str], **columns: Any
) -> list[float | None]:
    """Score the answer in each completion with the generator's scorer."""
    datasets = [_dataset(name, json.dumps(own)) for name, own in zip(generator, options, strict=True)]
    answers = map(read_answer, completions, form)
    rows = zip(datasets, answers, entry, strict=True)
    return [float(dataset.score_answer(answer, own)) for dataset, answer, own in rows]


def read_answer(completion: str, form: str) -> str | None:
    """The part of a completion that counts as its answer; None if there is none."""
    if form == "tag":
        answer: str | None = extract_answer(completion)
        return answer
    text = completion.strip()
    return text.rpartition("\n")[2].strip() if form == "last_line" else text


@lru_cache(maxsize=64)
def _dataset(generator: str, options: str) -> Any:
    return create_dataset(generator, seed=0, size=1, **json.loads(options))
