"""Chains of additions and subtractions with worked answers.

The answer to the prompt `47+38-19=` is `47+38=85;85-19=66;#66`: every step is written out, and the number
after `#` is the result. Most characters are copies, and only the digits of the results are hard. So two small
models that know the format give each other's answers nearly the same probability per token.

    task = ArithmeticTask(seed=0)
    batch = task.train(position=0, count=64)
    test = task.heldout("test", 1000)
"""

import random
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from hacrl.errors import UserError
from hacrl.tasks.problem import Problem, Split, text_number

FOLLOWS_LEAN = 0.9
"""Share of a chain's operators that are the one it leans to."""
MAX_ATTEMPTS = 10_000
"""Draws for one problem before the task gives up: it seems to have no unseen problem left."""


def split_of(prompt: str) -> Split:
    """The split of a prompt, derived from the prompt alone: a tenth is for validation, a tenth for the test."""
    bucket = text_number(prompt, 4) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def worked_answer(problem: Problem) -> str:
    """The completion that a perfect model writes: one equation a step, then `#` and the result."""
    first, *steps = re.findall(r"[+-]?\d+", str(problem.prompt))
    totals = list(accumulate(map(int, steps), initial=int(first)))
    equations = [f"{total}{step}={then};" for (total, then), step in zip(pairwise(totals), steps, strict=True)]
    return "".join(equations) + f"#{totals[-1]}"


def verify(text: str, answer: str) -> float:
    """1 if the text ends in `#` and exactly the answer, else 0; the steps before are not checked."""
    _, mark, final = text.rpartition("#")
    return 1.0 if mark and final == answer else 0.0


def arithmetic_reward(prompts: Any, completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """`verify` for a batch, with the signature of every reward function."""
    return [verify(text, expected) for text, expected in zip(completions, answer, strict=True)]


@dataclass(frozen=True)
class ArithmeticTask:
    """An endless stream of chains whose first number and running totals lie between 0 and `max_total`.

    A share `minus_share` of the chains leans to subtraction, the others to addition; nine operators in ten follow
    the lean. Totals are drawn so that subtractions mirror additions: a total t takes the place of max_total - t.
    """

    seed: int = 0
    _: KW_ONLY
    min_operators: int = 2
    max_operators: int = 3
    max_operand: int = 99
    max_total: int = 99
    minus_share: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_operators <= self.max_operators:
            most = f"at most max_operators ({self.max_operators})"
            raise UserError(f"arithmetic: min_operators ({self.min_operators}) must be at least 1 and {most}")
        if self.max_operand < 1 or self.max_total < 2:
            raise UserError("arithmetic: max_operand must be at least 1 and max_total at least 2")
        if not 0 <= self.minus_share <= 1:
            raise UserError(f"arithmetic: minus_share is a share, between 0 and 1, not {self.minus_share}")

    def train(self, position: int, count: int) -> list[Problem]:
        """Problems `position` to `position + count - 1` of the seed's stream, all different."""
        return self._stream(f"train/{self.seed}", "train", position, count)

    def heldout(self, split: Literal["validation", "test"], count: int) -> list[Problem]:
        """The first `count` problems of a fixed set, the same for every seed. Never seen in training."""
        if split not in ("validation", "test"):
            raise UserError(f"arithmetic: the held-out splits are validation and test, not {split!r}")
        return self._stream(split, split, 0, count)

    def _stream(self, name: str, split: Split, position: int, count: int) -> list[Problem]:
        problems: dict[str, Problem] = {}
        for index in range(position, position + count):
            rng = random.Random(f"{name}/{index}")
            for _ in range(MAX_ATTEMPTS):
                problem = self._draw(rng)
                if problem.id not in problems and split_of(problem.id) == split:
                    problems[problem.id] = problem
                    break
            else:
                sizes = f"{self.max_operators} operators, operands up to {self.max_operand}"
                wanted = f"{count} different {split} problems with up to {sizes} and totals up to {self.max_total}"
                raise UserError(f"arithmetic: there are no {wanted}; allow larger ones")
        return list(problems.values())

    def _draw(self, rng: random.Random) -> Problem:
        num_operators = rng.randint(self.min_operators, self.max_operators)
        lean, other = "-+" if rng.random() < self.minus_share else "+-"
        total = rng.randint(0, self.max_total)
        prompt, num_minus = str(total), 0
        for steps_left in range(num_operators, 0, -1):
            operator = lean if rng.random() < FOLLOWS_LEAN else other
            room = {"+": self.max_total - total, "-": total}
            if room[operator] == 0:
                operator = "-" if operator == "+" else "+"
            # Use 1 / (`steps_left` + 1) of the room on average, so that chains do not end at its limits.
            widest = max(1, 2 * room[operator] // (steps_left + 1))
            operand = rng.randint(1, min(self.max_operand, widest))
            total += operand if operator == "+" else -operand
            num_minus += operator == "-"
            prompt += f"{operator}{operand}"
        columns = {"answer": str(total), "num_operators": num_operators, "num_minus": num_minus}
        return Problem(f"{prompt}=", f"{prompt}=", str(total), columns)
