"""A check of the verifier on a benchmark's own answers: right ones must be right, and others' wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hacrl.evaluation.answers import VERIFY_SECONDS
from hacrl.seeding import permutation
from hacrl.tasks.benchmarks import ProblemSet
from hacrl.tasks.verify import MathPool, Verifier

WORKERS = 2


@dataclass
class Check:
    """What the verifier made of one benchmark; each list is of exceptions, ready to be read."""

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
    pool = MathPool("read_as_math", VERIFY_SECONDS, WORKERS)
    try:
        with Verifier([("math", 1.0)], timeout=VERIFY_SECONDS, workers=WORKERS) as verifier:
            for each in sets:
                yield _check(each, verifier, pool)
    finally:
        pool.close()


def _check(each: ProblemSet, verifier: Verifier, pool: MathPool) -> Check:
    problems = each.problems
    answers = [problem.answer for problem in problems]
    boxed = [rf"The answer is $\boxed{{{answer}}}$." for answer in answers]
    solved = [(problem, solution) for problem in problems if (solution := each.solution(problem)) is not None]
    check = Check(each.name, each.source, len(problems), len(solved), each.without_reference)

    def score(texts: Sequence[str], golds: Sequence[str]) -> list[tuple[float | None, str]]:
        verdicts = verifier.score([""] * len(texts), texts, {"answer": list(golds)})
        return [(v.reward, f" ({v.detail})" if v.detail else "") for v in verdicts]

    for problem, (reward, detail) in zip(problems, score(boxed, answers), strict=True):
        if reward != 1:
            check.not_right.append(f"{problem.id}: {problem.answer}{detail}")
    calls = [{"completions": [text], "answer": [answer]} for text, answer in zip(boxed, answers, strict=True)]
    for problem, reply in zip(problems, pool.threads.map(pool.call, calls), strict=True):
        if reply.values != [1.0]:
            check.spelling_only.append(f"{problem.id}: {problem.answer}")
    judged = score([solution for _, solution in solved], [problem.answer for problem, _ in solved])
    for (problem, _), (reward, detail) in zip(solved, judged, strict=True):
        if reward != 1:
            check.solutions_not_right.append(f"{problem.id}: {problem.answer}{detail}")
    others = _shuffled(answers)
    pairs = [(i, j) for i, j in enumerate(others) if j is not None]
    check.shuffled = len(pairs)
    judged = score([boxed[j] for _, j in pairs], [answers[i] for i, _ in pairs])
    for (i, j), (reward, detail) in zip(pairs, judged, strict=True):
        place = f"{problems[i].id}: {answers[i]} and {answers[j]}{detail}"
        if reward is None:
            check.shuffled_unverified.append(place)
        elif reward != 0:
            check.shuffled_right.append(place)
    return check


def _shuffled(answers: Sequence[str]) -> list[int | None]:
    """For each answer another one, spelled differently; None where there is none."""
    order = permutation(len(answers), 0)
    found: list[int | None] = []
    for position, answer in enumerate(answers):
        turned = order[position:] + order[:position] if len(set(answers)) > 1 else []
        found.append(next((other for other in turned if answers[other] != answer), None))
    return found
