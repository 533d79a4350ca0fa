"""Problems from reasoning-gym's generators, by position in an endless stream.

    task = GymTask("chain_sum", {"max_terms": 3}, seed=0)
    batch = task.train(position=0, count=64)
    test = task.heldout("test", 100)

The split of a problem depends only on its question, not on the seed, the options or the stage of a curriculum. So a
problem that is held out in one run is never trained on in another.
"""

import dataclasses
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from hacrl.errors import UserError, nearest, require
from hacrl.tasks.problem import Problem, Split, text_number

Form = Literal["tag", "last_line", "whole"]

INSTRUCTIONS: dict[str, str] = {
    "tag": "Write the final answer between <answer> and </answer>.",
    "last_line": "Write the final answer alone on the last line.",
    "whole": "Write the final answer and nothing else.",
}

CHUNK = 500
"""Size of one reasoning-gym data set. Some generators prepare all its problems when a data set is created."""
RETRY = CHUNK * 10**7
"""How far ahead in the stream to look if the problem at a position belongs to another split or is taken."""
MAX_ATTEMPTS = 200
"""Draws for one problem before the task gives up: the generator seems to have no unseen problem left."""
HASH_SEEDED = {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Generators that iterate over sets of strings, whose order differs between processes. For word_ladder only the
reference answers, which a warm-up learns from, depend on the order."""
GLOBALLY_RANDOM = {"codeio", "knight_swap", "list_functions"}
"""Generators that use the global random generators of the process, in addition to their own seed."""


def split_of(question: str) -> Split:
    """The split of a question, derived from the question alone: a fifth is for validation, a fifth for the test."""
    bucket = text_number(question, 8) % 5
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


class GymTask:
    """Problems of one generator with its options."""

    def __init__(
        self,
        generator: str,
        options: dict[str, Any] | None = None,
        seed: int = 0,
        *,
        form: Form = "tag",
        instruction: str | None = None,
    ) -> None:
        """`form` says where a completion has its answer; `instruction` asks for it, None uses a built-in sentence."""
        self.generator, self.options, self.seed, self.form = generator, options or {}, seed, form
        self.instruction = INSTRUCTIONS[form] if instruction is None else instruction
        self._columns = {"generator": generator, "options": self.options, "form": form}
        self._check()
        self._data = lru_cache(maxsize=16)(self._open)

    def _check(self) -> None:
        require(f"The task gym:{self.generator}", "gym", "reasoning_gym")
        from reasoning_gym.factory import DATASETS

        if self.generator not in DATASETS:
            raise UserError(f"reasoning-gym has no {self.generator!r}{nearest(self.generator, DATASETS)}")
        if self.generator == "composite":
            raise UserError("gym:composite cannot be used: write a mixture of tasks instead (task.mixture).")
        if self.generator in HASH_SEEDED and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
            raise UserError(
                f"The problems of gym:{self.generator} depend on Python's hash seed, which is another one in every "
                "process: start the command with PYTHONHASHSEED=0 in front of it."
            )
        known = {field.name for field in dataclasses.fields(DATASETS[self.generator][1])} - {"seed", "size"}
        for option in self.options:
            if option in ("seed", "size"):
                raise UserError(f"task.options: {option} of gym:{self.generator} is set by the run itself: remove it.")
            if option not in known:
                raise UserError(f"task.options: gym:{self.generator} has no {option!r}{nearest(option, sorted(known))}")
        self._open("check", 0, size=1)

    def train(self, position: int, count: int) -> list[Problem]:
        """Problems `position` to `position + count - 1` of the seed's stream, all different."""
        problems: dict[str, Problem] = {}
        for place in range(position, position + count):
            for attempt in range(MAX_ATTEMPTS):
                problem = self._problem(f"train/{self.seed}", place + attempt * RETRY, "train")
                if problem is not None and problem.id not in problems:
                    problems[problem.id] = problem
                    break
            else:
                raise UserError(
                    f"gym:{self.generator} has no {count} different training problems with the options {self.options}: "
                    "allow larger ones, or lower prompts_per_step."
                )
        return list(problems.values())

    def heldout(self, split: Literal["validation", "test"], count: int) -> list[Problem]:
        """The first `count` problems of a fixed set, the same for every seed; fewer if the generator has no more."""
        problems: dict[str, Problem] = {}
        for index in range(MAX_ATTEMPTS * count):
            if (problem := self._problem(split, index, split)) is not None:
                problems.setdefault(problem.id, problem)
            if len(problems) == count:
                break
        if not problems:
            raise UserError(f"gym:{self.generator} has too few different problems with the options {self.options}.")
        return list(problems.values())

    def solution(self, problem: Problem) -> str:
        """The shortest completion that has the generator's own answer."""
        if not problem.answer:
            raise UserError(f"gym:{self.generator} has no answers of its own, so there is nothing to warm up with.")
        return f"<answer>{problem.answer}</answer>" if self.form == "tag" else problem.answer

    def _problem(self, stream: str, index: int, split: Split) -> Problem | None:
        """The problem at this index of a stream; None if it belongs to another split."""
        chunk, offset = divmod(index, CHUNK)
        data = self._data(stream, chunk)
        with self._drawing(f"{stream}/{chunk}/{offset}"):
            entry = data[offset]
        question, answer = str(entry["question"]), entry["answer"]
        if split_of(question) != split:
            return None
        columns = {"answer": answer, "entry": entry, **self._columns}
        prompt = f"{question}\n{self.instruction}" if self.instruction else question
        name = f"{self.generator}-{text_number(question, 8):016x}"
        return Problem(name, prompt, "" if answer is None else str(answer), columns)

    def _open(self, stream: str, chunk: int, size: int = CHUNK) -> Any:
        from reasoning_gym import create_dataset

        seed = text_number(f"{stream}/{chunk}", 8) % 2**31  # numpy's generators accept at most 32 bits
        with self._drawing(f"{stream}/{chunk}"):
            return create_dataset(self.generator, seed=seed, size=size, **self.options)

    @contextmanager
    def _drawing(self, place: str) -> Iterator[None]:
        """Turn any error of the generator into a UserError. If it uses the global generators, these are seeded from
        `place` and restored afterwards."""
        states = (random.getstate(), np.random.get_state()) if self.generator in GLOBALLY_RANDOM else None
        if states:
            random.seed(text_number(place, 8))
            np.random.seed(text_number(place, 8) % 2**32)
        try:
            yield
        except Exception as error:
            failed = f"gym:{self.generator} makes no problems with the options {self.options}"
            raise UserError(f"{failed}: {str(error) or type(error).__name__}.") from error
        finally:
            if states:
                random.setstate(states[0])
                np.random.set_state(states[1])
