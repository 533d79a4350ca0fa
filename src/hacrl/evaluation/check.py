"""A check of the verifier on a benchmark's own answers: right ones must be right, and others' wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hacrl.evaluation.answers import Judge
from hacrl.seeding import permutation
from hacrl.tasks.benchmarks import ProblemSet
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import MathPool


@dataclass
class Check:
    """What the verifier made of one benchmark; each list holds exceptions, ready to be read."""

    name: str
    source: str
    references: int
    solutions: int
    without_reference: list[str]
    not_right: list[str] = field(default_factory=list)
    """References that, in a box, are not right."""
    spelling_only: list[str] = field(default_factory=list)
    """References that math-verify cannot read or does not find equal to themselves: right if spelled the same."""
    solutions_not_right: list[str] = field(default_factory=list)
    shuffled: int = 0
    """References that were judged against another problem's; fewer where all are spelled alike."""
    shuffled_right: list[str] = field(default_factory=list)
    """Another problem's reference, of another spelling, that is right all the same."""
    shuffled_unverified: list[str] = field(default_factory=list)


def check_verifier(sets: Sequence[ProblemSet]) -> Iterator[Check]:
    """Check the verifier on each benchmark, one after the other."""
    with Judge(workers=2) as judge:
        reading = judge.pool("read_as_math")
        for each in sets:
            yield _check(each, judge, reading)


def _check(each: ProblemSet, judge: Judge, reading: MathPool) -> Check:
    problems = each.problems
    boxed = {problem.id: rf"The answer is $\boxed{{{problem.answer}}}$." for problem in problems}
    solved = [(problem, solution) for problem in problems if (solution := each.solution(problem)) is not None]
    check = Check(each.name, each.source, len(problems), len(solved), each.without_reference)

    def not_right(pairs: Sequence[tuple[Problem, str]]) -> list[str]:
        verdicts = judge.score([problem for problem, _ in pairs], [text for _, text in pairs])
        wrong = [(problem, v) for (problem, _), v in zip(pairs, verdicts, strict=True) if v.reward != 1]
        return [f"{problem.id}: {problem.answer}{_reason(v.detail)}" for problem, v in wrong]

    check.not_right = not_right([(problem, boxed[problem.id]) for problem in problems])
    calls = [{"completions": [boxed[problem.id]], "answer": [problem.answer]} for problem in problems]
    for problem, reply in zip(problems, reading.threads.map(reading.call, calls), strict=True):
        if reply.values != [1.0]:
            check.spelling_only.append(f"{problem.id}: {problem.answer}")
    check.solutions_not_right = not_right(solved)
    pairs = _shuffled(problems)
    check.shuffled = len(pairs)
    verdicts = judge.score([problem for problem, _ in pairs], [boxed[other.id] for _, other in pairs])
    for (problem, other), verdict in zip(pairs, verdicts, strict=True):
        place = f"{problem.id}: {problem.answer} and {other.answer}{_reason(verdict.detail)}"
        if verdict.reward is None:
            check.shuffled_unverified.append(place)
        elif verdict.reward != 0:
            check.shuffled_right.append(place)
    return check


def _reason(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _shuffled(problems: Sequence[Problem]) -> list[tuple[Problem, Problem]]:
    """Each problem with another one whose answer is spelled differently, where there is one."""
    order = [problems[position] for position in permutation(len(problems), 0)]
    if len({problem.answer for problem in problems}) < 2:
        return []
    pairs = []
    for position, problem in enumerate(problems):
        turned = order[position:] + order[:position]
        pairs.append((problem, next(other for other in turned if other.answer != problem.answer)))
    return pairs
