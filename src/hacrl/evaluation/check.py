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

    def verdicts(pairs: Sequence[tuple[Problem, str]]) -> Iterator[tuple[Problem, float | None, str]]:
        """Each problem with the reward of the text beside it, and the reason if there is none."""
        judged = judge.score([problem for problem, _ in pairs], [text for _, text in pairs])
        for (problem, _), verdict in zip(pairs, judged, strict=True):
            yield problem, verdict.reward, f" ({verdict.detail})" if verdict.detail else ""

    for pairs, exceptions in (
        ([(problem, boxed[problem.id]) for problem in problems], check.not_right),
        (solved, check.solutions_not_right),
    ):
        exceptions += [f"{own.id}: {own.answer}{why}" for own, reward, why in verdicts(pairs) if reward != 1]
    calls = [{"completions": [boxed[problem.id]], "answer": [problem.answer]} for problem in problems]
    for problem, reply in zip(problems, reading.threads.map(reading.call, calls), strict=True):
        if reply.values != [1.0]:
            check.spelling_only.append(f"{problem.id}: {problem.answer}")
    shuffled = _shuffled(problems)
    check.shuffled = len(shuffled)
    found = verdicts([(problem, boxed[other.id]) for problem, other in shuffled])
    for (_, other), (problem, reward, why) in zip(shuffled, found, strict=True):
        if reward != 0:
            exceptions = check.shuffled_unverified if reward is None else check.shuffled_right
            exceptions.append(f"{problem.id}: {problem.answer} and {other.answer}{why}")
    return check


def _shuffled(problems: Sequence[Problem]) -> list[tuple[Problem, Problem]]:
    """Each problem with another one whose answer is spelled differently; nothing where all are spelled alike."""
    if len({problem.answer for problem in problems}) < 2:
        return []
    order = [problems[position] for position in permutation(len(problems), 0)]
    pairs = []
    for position, problem in enumerate(problems):
        turned = order[position:] + order[:position]
        pairs.append((problem, next(other for other in turned if other.answer != problem.answer)))
    return pairs
