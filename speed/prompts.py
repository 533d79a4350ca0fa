"""The prompts and rewards of the speed comparisons, the same for every side.

    python speed/prompts.py arithmetic 256 arithmetic.json     # for the zoo's models
    python speed/prompts.py words 40 words.json                # word problems, for chat models

A file is a JSON list of strings. A model with a chat template gets each string as a user's message, every other
model gets it as it is. Only the standard library is imported here, because the peers import this file too.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapes import stop_tokens

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo")

TEMPLATES = (
    "{name} has {a} apples and buys {b} bags with {c} apples each. How many apples does {name} have now?",
    "A train has {b} cars with {a} seats each, and {c} seats are taken. How many seats are free?",
    "{name} reads {b} pages a day. After {c} days, how many of the {a} pages of a book are left?",
    "{name} has ${a}, earns ${b} an hour and works {c} hours. How much money does {name} have now?",
    "A farmer has {a} eggs and fills {c} boxes with {b} eggs each. How many eggs are left over?",
)


def word_problems(count: int) -> list[str]:
    """The first `count` of a fixed list of school problems, all different."""
    rng = random.Random("words")
    problems: dict[str, None] = {}
    while len(problems) < count:
        numbers = {"a": rng.randint(200, 299), "b": rng.randint(11, 19), "c": rng.randint(2, 9)}
        problems[TEMPLATES[len(problems) % len(TEMPLATES)].format(name=rng.choice(NAMES), **numbers)] = None
    return list(problems)


def arithmetic_prompts(count: int) -> list[str]:
    """The first `count` training prompts of the arithmetic task."""
    from hacrl.tasks.arithmetic import ArithmeticTask  # a peer's environment has no hacrl, and never calls this

    return [str(problem.prompt) for problem in ArithmeticTask(seed=0).train(0, count)]


@dataclass(frozen=True)
class Work:
    """What is sampled, written PROMPTSxANSWERSxTOKENS~MEAN: answers of so many tokens, or of a mean length up to it."""

    prompts: int
    answers: int
    tokens: int
    mean: float | None = None
    """Mean of geometric lengths, if none were cut off; None: all answers have `tokens` tokens."""

    @classmethod
    def parse(cls, text: str) -> "Work":
        sizes, _, mean = text.partition("~")
        return cls(*map(int, sizes.split("x")), float(mean) if mean else None)

    def __str__(self) -> str:
        return f"{self.prompts}x{self.answers}x{self.tokens}" + (f"~{self.mean:g}" if self.mean else "")

    @property
    def rows(self) -> int:
        return self.prompts * self.answers

    def stop_ids(self, vocabulary: int) -> list[int]:
        """The tokens that end an answer: a share of 1 / mean of them, from the second on."""
        return list(range(1, 1 + stop_tokens(vocabulary, self.mean))) if self.mean else []


KINDS = {"arithmetic": arithmetic_prompts, "words": word_problems}


def prompts_of_cycle(prompts: Sequence[str], cycle: int, count: int) -> list[str]:
    """The `count` different prompts of one cycle; the list starts again at its end."""
    if count > len(prompts):
        raise SystemExit(f"{count} prompts a cycle need a prompts file with at least as many, not {len(prompts)}")
    return [prompts[(cycle * count + i) % len(prompts)] for i in range(count)]


def solved_prompts(prompts: Sequence[Hashable], share: float) -> set[Hashable]:
    """An evenly spread share of the prompts: all of their completions are right, so their groups teach nothing."""
    return {prompt for i, prompt in enumerate(prompts) if int((i + 1) * share) > int(i * share)}


def alternating_rewards(prompts: Sequence[Hashable], solved: set[Hashable]) -> list[float]:
    """1 for every second completion of a prompt, and for all of a solved one: no other group has equal rewards."""
    seen: Counter[Hashable] = Counter()
    rewards = []
    for prompt in prompts:
        rewards.append(1.0 if prompt in solved else float(seen[prompt] % 2))
        seen[prompt] += 1
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("count", type=int)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    options.file.write_text(json.dumps(KINDS[options.kind](options.count), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
