"""A task: an endless stream of problems by position, held-out problems, and a verifier for answers."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hacrl.config.task import CurriculumConfig
from hacrl.errors import UserError
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Lengths, Verdict, Verifier

LOOKAHEAD = 10_000
"""Number of positions of a mixture searched for the step that takes the most problems from one part."""


class Curriculum:
    """The current stage of a task, from easy to hard. The next begins when the mean reward of `window` steps reaches
    the threshold."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config, self.stage = config, 0
        self._recent: deque[float] = deque(maxlen=config.window)
        """Mean rewards of the last steps in this stage."""

    def observe(self, reward: float) -> None:
        """Record the mean reward of a step over all agents, and go to the next stage if it is time."""
        self._recent.append(reward)
        full, is_last = len(self._recent) == self.config.window, self.stage + 1 == len(self.config.stages)
        if full and not is_last and sum(self._recent) / len(self._recent) >= self.config.threshold:
            self.stage += 1
            self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage = state["stage"]
        self._recent = deque(state["recent"], maxlen=self.config.window)


@dataclass(eq=False)
class Task:
    """Problems of one data set or generator, and the verifier of their answers."""

    train: Callable[[int, int], list[Problem]]
    """A function (position, count) that returns `count` training problems from `position` on, all different."""
    eval_problems: list[Problem]
    verifier: ExitStack
    """The verifier, or those of a mixture's parts; ends their processes on exit."""
    listed: Sequence[Problem] = ()
    """Training problems that are known beforehand: all of a data set; empty if problems are generated."""
    curriculum: Curriculum | None = None
    write_solution: Callable[[Problem], str] | None = None

    def score(self, problems: Sequence[Problem], texts: Sequence[str], num_tokens: Lengths = None) -> list[Verdict]:
        """Verify the texts; returns a verdict on each."""
        names = {name for problem in problems for name in problem.columns}
        columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
        assert isinstance(self.verifier, Verifier)
        return self.verifier.score([problem.prompt for problem in problems], list(texts), columns, num_tokens)

    def solution(self, problem: Problem) -> str:
        """A completion that earns the full reward; UserError if the task knows none."""
        if self.write_solution is None:
            raise UserError("A task from data has no completions to learn from: give files with prompt and completion.")
        return self.write_solution(problem)

    def observe(self, rewards: Sequence[tuple[Problem, float]]) -> None:
        """Tell the curriculum the rewards of one step: a pair (problem, reward) for each answer of each agent."""
        if self.curriculum is not None and rewards:
            self.curriculum.observe(sum(reward for _, reward in rewards) / len(rewards))

    def metrics(self) -> dict[str, int]:
        return {} if self.curriculum is None else {"curriculum_stage": self.curriculum.stage}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.curriculum is None else self.curriculum.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state)


class Interleaving:
    """An endless order of the parts of a mixture, in which every stretch has about the right share of each part."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self._order = bytearray()
        self._counts = [0] * len(weights)

    def parts(self, position: int, count: int) -> list[int]:
        """Indices of the parts at the `count` positions from `position` on."""
        while len(self._order) < position + count:
            size = len(self._order) + 1
            part = max(range(len(self.shares)), key=lambda k: self.shares[k] * size - self._counts[k])
            self._order.append(part)
            self._counts[part] += 1
        return list(self._order[position : position + count])

    def most(self, part: int, count: int) -> int:
        """Largest number of problems from one part among `count` problems in a row."""
        so_far = [0, *accumulate(place == part for place in self.parts(0, count + LOOKAHEAD))]
        return max(end - start for start, end in zip(so_far, so_far[count:], strict=False))

    def before(self, position: int) -> list[int]:
        """How many of the first `position` problems come from each part."""
        self.parts(position, 0)
        return [self._order.count(part, 0, position) for part in range(len(self.shares))]


class Mixture(Task):
    """Several tasks as one. Each problem names its part, and its id begins with the part's label."""

    def __init__(self, parts: dict[str, Task], weights: Sequence[float], verifiers: ExitStack) -> None:
        """`verifiers` ends the processes of all parts on exit."""
        heldout = [_of_part(problem, label) for label, part in parts.items() for problem in part.eval_problems]
        listed = [_of_part(problem, label) for label, part in parts.items() for problem in part.listed]
        super().__init__(self._train, heldout, verifiers, listed)
        self.parts = parts
        self._order = Interleaving(weights)
        self._checked = 0
        """Largest step size, in problems, for which every part was checked to have enough."""

    def _train(self, position: int, count: int) -> list[Problem]:
        if count > self._checked:
            self._check(count)
        order, before = self._order.parts(position, count), self._order.before(position)
        parts = list(self.parts.items())
        drawn = {k: iter(parts[k][1].train(before[k], order.count(k))) for k in sorted(set(order))}
        return [_of_part(next(drawn[k]), parts[k][0]) for k in order]

    def _check(self, count: int) -> None:
        """Raise UserError if a part has too few problems for this step or a later one of the same size."""
        for k, (label, part) in enumerate(self.parts.items()):
            size = len(part.listed)
            if size and (most := self._order.most(k, count)) > size:
                raise UserError(
                    f"The part {label} of the mixture has {size} problems, fewer than the {most} that a step of "
                    f"{count} can take from it: add rows to it, lower its weight, or lower prompts_per_step."
                )
        self._checked = count

    def score(self, problems: Sequence[Problem], texts: Sequence[str], num_tokens: Lengths = None) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        for label, part in self.parts.items():
            rows = [row for row, problem in enumerate(problems) if problem.part == label]
            lengths = None if num_tokens is None else [num_tokens[row] for row in rows]
            scored = part.score([problems[row] for row in rows], [texts[row] for row in rows], lengths)
            verdicts |= zip(rows, scored, strict=True)
        return [verdicts[row] for row in range(len(problems))]

    def solution(self, problem: Problem) -> str:
        return self.parts[str(problem.part)].solution(problem)

    def observe(self, rewards: Sequence[tuple[Problem, float]]) -> None:
        for label, part in self.parts.items():
            part.observe([(problem, reward) for problem, reward in rewards if problem.part == label])

    def metrics(self) -> dict[str, int]:
        return {f"{name}/{label}": n for label, part in self.parts.items() for name, n in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        return {label: part.state_dict() for label, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for label, part in self.parts.items():
            part.load_state_dict(state[label])


def _of_part(problem: Problem, label: str) -> Problem:
    return replace(problem, id=f"{label}/{problem.id}", part=label)
