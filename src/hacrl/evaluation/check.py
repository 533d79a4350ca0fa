"""Checks the verifier on a benchmark's own answers: each must be right for its problem and wrong for another one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hacrl.evaluation.answers import Judge
from hacrl.seeding import permutation
from hacrl.signs import doing
from hacrl.tasks.benchmarks import ProblemSet
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Pool


@dataclass(frozen=True)
class Check:
    """What the verifier made of one benchmark; each list holds exceptions, ready to be read."""

    name: str
    source: str
    references: int
    solutions: int
    without_reference: list[str]
    not_right: list[str]
    """References that, in a box, are not right."""
    spelling_only: list[str]
    """References that math-verify cannot read or does not find equal to themselves: right if spelled the same."""
    solutions_not_right: list[str]
    shuffled: int
    """References that were judged against another problem's; fewer where all are spelled alike."""
    shuffled_right: list[str]
    """Another problem's reference, of another spelling, that is right all the same."""
    shuffled_unverified: list[str]


def check_verifier(sets: Sequence[ProblemSet]) -> Iterator[Check]:
    """Check the verifier on each benchmark, one after the other."""
    with Judge(workers=2) as judge:
        reading = judge.pool("read_as_math")
        for each in sets:
            with doing(f"checking {each.name}"):
                check = _check(each, judge, reading)
            yield check


def _check(each: ProblemSet, judge: Judge, reading: Pool) -> Check:
    def verdicts(rows: Sequence[tuple[Problem, str, str]]) -> list[tuple[float | None, str]]:
        """The reward of a text for each (problem, text, what to say behind the problem), and a line about it."""
        judged = judge.score([problem for problem, _, _ in rows], [text for _, text, _ in rows])
        whys = [f" ({verdict.detail})" if verdict.detail else "" for verdict in judged]
        lines = [f"{own.id}: {own.answer}{more}{why}" for (own, _, more), why in zip(rows, whys, strict=True)]
        return [(verdict.reward, line) for verdict, line in zip(judged, lines, strict=True)]

    references = verdicts([(own, _boxed(own), "") for own in each.problems])
    solved = [(own, solution, "") for own in each.problems if (solution := each.solution(own)) is not None]
    columns = {"completions": list(map(_boxed, each.problems)), "answer": [own.answer for own in each.problems]}
    read = zip(each.problems, reading.score(columns), strict=True)
    shuffled = verdicts([(own, _boxed(other), f" and {other.answer}") for own, other in _shuffled(each.problems)])
    return Check(
        each.name,
        each.source,
        len(each.problems),
        len(solved),
        each.without_reference,
        not_right=[line for reward, line in references if reward != 1],
        spelling_only=[f"{own.id}: {own.answer}" for own, verdict in read if verdict.reward != 1],
        solutions_not_right=[line for reward, line in verdicts(solved) if reward != 1],
        shuffled=len(shuffled),
        shuffled_right=[line for reward, line in shuffled if reward not in (0, None)],
        shuffled_unverified=[line for reward, line in shuffled if reward is None],
    )


def _boxed(problem: Problem) -> str:
    return rf"The answer is $\boxed{{{problem.answer}}}$."


def _shuffled(problems: Sequence[Problem]) -> Iterator[tuple[Problem, Problem]]:
    """Each problem with another one whose answer is spelled differently; nothing where all are spelled alike."""
    if len({problem.answer for problem in problems}) < 2:
        return
    order = [problems[position] for position in permutation(len(problems), 0)]
    for position, problem in enumerate(problems):
        turned = order[position:] + order[:position]
        yield problem, next(other for other in turned if other.answer != problem.answer)
