"""Verifying a step's completions: a call for each, and a call for a batch, in turns within one process.

    python speed/verify.py                     # 512 completions, two child processes
    python speed/verify.py --workers 4

A batch has the time of a single completion, and if it does not return, each of them gets a call of its own.
"""

import argparse
import time
from statistics import median
from typing import Any

from hacrl.tasks import verify
from hacrl.tasks.gym import GymTask
from hacrl.tasks.verify import GYM, Verifier

ROUNDS = 5
BATCHES = (1, verify.BATCH)


def gym(count: int) -> tuple[list[str], dict[str, list[Any]]]:
    problems = GymTask("chain_sum", form="last_line", instruction="").train(0, count)
    columns = {name: [problem.columns[name] for problem in problems] for name in problems[0].columns}
    return [f"1 + 1 = 2\n{problem.answer}" for problem in problems], columns


def math(count: int) -> tuple[list[str], dict[str, list[Any]]]:
    texts = [rf"So it is {i} halves, \boxed{{\frac{{{i}}}{{2}}}}." for i in range(count)]
    return texts, {"answer": [str(i / 2) for i in range(count)]}


def seconds(verifier: Verifier, texts: list[str], columns: dict[str, list[Any]], batch: int) -> float:
    verify.BATCH = batch
    start = time.perf_counter()
    verdicts = verifier.score([""] * len(texts), texts, columns)
    taken = time.perf_counter() - start
    assert all(verdict.reward == 1.0 for verdict in verdicts)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for reward, made in ((GYM, gym(options.completions)), ("math", math(options.completions))):
        with Verifier([(reward, 1.0)], workers=options.workers) as verifier:
            seconds(verifier, *made, verify.BATCH)  # the children import their package
            rounds = [[seconds(verifier, *made, batch) for batch in BATCHES] for _ in range(ROUNDS)]
        single, batched = (1000 * median(column) for column in zip(*rounds, strict=True))
        print(
            f"{reward}: calls for one {single:.0f} ms, for {BATCHES[1]} {batched:.0f} ms, {single / batched:.1f} times"
        )


if __name__ == "__main__":
    main()
