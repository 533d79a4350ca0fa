"""Four kinds of problems whose worked answers have 150 to 600 tokens, and the reward of one of them.

    python docs/results/long/problems.py runs/long/data                     # writes multiply-train.jsonl and so on
    python docs/results/long/problems.py --lengths FOLDER_OF_A_TOKENIZER    # how long the answers are

The last line of a right answer is "Answer: ...". `exact` verifies it for all kinds but countdown, where many ways are
right: there it is `left_to_right` below. A worked answer comes in three styles. *plain*: each step is right. *detours*:
one step in ten is first done wrong, then noticed and done again. *noisy*: one step is wrong, nobody notices, and the
answer is wrong.

A hash of the problem decides to which split it belongs, so no problem is in two splits, whatever the seed.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value", int, str)

SPLITS = {"warm": 50, "train": 30, "validation": 10, "test": 10}
"""Share of all problems, in percent: worked answers for warm-ups, prompts of runs, held-out problems."""
ROWS = {"warm": 6000, "train": 2000, "validation": 200, "test": 400}
"""Rows of a file, for each kind."""
STYLES = ("plain", "detours", "noisy")
DETOURS = 0.1
"""Share of steps that are first done wrong, in the style of that name."""
SHORTEST, LONGEST = 150, 600
"""Tokens of an answer."""
TOKEN = re.compile(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s")
"""Matches the tokens of SmolLM2 in these texts: it sets digits apart, and knows all words and signs used here."""


@dataclass
class Trace:
    """The lines of a worked answer while it is written, with the wrong steps that its style asks for."""

    rng: random.Random
    detours: float = 0.0
    slip: int | None = None
    """The number of the step that is wrong without being noticed."""
    lines: list[str] = field(default_factory=list)
    steps: int = 0

    def step(self, said: str, right: Value, wrong: Value) -> Value:
        """Write a step and its result; returns what the next steps go on from."""
        self.steps += 1
        if self.steps - 1 == self.slip:
            self.lines.append(f"{said} {wrong}")
            return wrong
        if self.rng.random() < self.detours:
            self.lines += [f"{said} {wrong}", "No, that is wrong."]
        self.lines.append(f"{said} {right}")
        return right

    def count(self, said: str, right: int) -> int:
        """A step whose result is a number; a wrong one is off by one in some digit."""
        off = self.rng.choice([-1, 1]) * 10 ** self.rng.randrange(len(str(right)))
        return self.step(said, right, right + off if right + off >= 0 else right + 1)


@dataclass(frozen=True)
class Problem:
    """A problem, how to work it out, and what is right."""

    prompt: str
    key: str
    """Equal for problems that differ in the order of their numbers only."""
    work: Callable[[Trace], str | None]
    """Writes the steps and returns the answer they lead to; None if they lead nowhere."""
    right: Callable[[str], bool]
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)
    """What the reward needs besides the answer."""


def multiply(rng: random.Random) -> Problem:
    """Long multiplication, digit by digit."""
    digits = rng.randint(3, 5)
    a, b = rng.randrange(10 ** (digits - 1), 10**digits), rng.randint(100, 999)

    def work(trace: Trace) -> str:
        total = 0
        for place, digit in enumerate(reversed(str(b))):
            carry, row = 0, "0" * place
            for other in reversed(str(a)):
                found = trace.count(f"{digit} * {other} + {carry} =", int(digit) * int(other) + carry)
                carry, row = found // 10, f"{found % 10}{row}"
            row = str(int(f"{carry}{row}"))
            trace.lines.append(f"row: {row}")
            total = trace.count(f"{total} + {row} =", total + int(row)) if place else int(row)
        return str(total)

    return unique(f"Multiply {a} by {b}, digit by digit.", sorted([a, b]), work, str(a * b))


def add(rng: random.Random) -> Problem:
    """A sum of many terms, with running totals."""
    terms = [rng.randint(10, 9_999) for _ in range(rng.randint(11, 24))]

    def work(trace: Trace) -> str:
        total = terms[0]
        for term in terms[1:]:
            total = trace.count(f"{total} + {term} =", total + term)
        return str(total)

    return unique(f"Add {', '.join(map(str, terms))}.", sorted(terms), work, str(sum(terms)))


def sort(rng: random.Random) -> Problem:
    """Insertion sort, each comparison written out."""
    numbers = rng.sample(range(10, 100), rng.randint(7, 11))

    def work(trace: Trace) -> str:
        done = str(numbers[0])
        for number in numbers[1:]:
            before, after, said = done.split(), list[str](), list[str]()
            while before and number < int(before[-1]):
                said.append(f"{number} < {before[-1]}")
                after.insert(0, before.pop())
            said += [f"{number} > {before[-1]}"] if before else []
            right, others = [*before, str(number), *after], before + after
            place = trace.rng.choice([i for i in range(len(right)) if i != len(before)])
            wrong = [*others[:place], str(number), *others[place:]]
            done = trace.step(f"{', '.join(said)} so", " ".join(right), " ".join(wrong))
        return done

    asked = f"Sort {', '.join(map(str, numbers))} by insertion."
    return unique(asked, sorted(numbers), work, " ".join(map(str, sorted(numbers))))


def countdown(rng: random.Random) -> Problem:
    """Three numbers and a target: ways to combine them are tried, and rejected, until one reaches it."""
    numbers = rng.sample(range(2, 26), 3)
    ways = combinations(numbers)
    target = rng.choice([value for _, value in ways if 10 <= value <= 300] or [0])

    def work(trace: Trace) -> str | None:
        for way in trace.rng.sample([way for way, _ in ways], len(ways)):
            a, first, b, second, c = way.split()
            between = trace.count(f"{a} {first} {b} =", calculate(int(a), first, int(b)))
            value = calculate(between, second, int(c))
            if value < 0:  # after a slip
                return None
            said, wrong = f"{between} {second} {c} =", target if value != target else target + 1
            if trace.step(said, value, wrong) == target:
                return way
            trace.lines.append(f"That is not {target}.")
        return None

    asked = f"Reach {target} with {', '.join(map(str, numbers))}, each used once, from left to right, by + - *."
    some = next((way for way, value in ways if value == target), "")
    columns = {"numbers": numbers, "target": target}

    def right(answer: str) -> bool:
        return reaches(answer, numbers, target)

    return Problem(asked, f"{sorted(numbers)} {target}", work, right, f"Answer: {some}", columns)


KINDS = {"multiply": multiply, "add": add, "sort": sort, "countdown": countdown}


def unique(prompt: str, numbers: list[int], work: Callable[[Trace], str | None], answer: str) -> Problem:
    """A problem with one right answer."""
    return Problem(prompt, str(numbers), work, answer.__eq__, f"Answer: {answer}")


def calculate(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def combinations(numbers: list[int]) -> list[tuple[str, int]]:
    """The ways to combine three numbers from left to right, without negative numbers, and what each gives."""
    found = []
    for index, c in enumerate(numbers):
        a, b = sorted(numbers[:index] + numbers[index + 1 :], reverse=True)
        for first in "+-*":
            between = calculate(a, first, b)
            ways = [(f"{a} {first} {b} {second} {c}", calculate(between, second, c)) for second in "+-*"]
            found += [(way, value) for way, value in ways if value >= 0]
    return found


# --- verifying -------------------------------------------------------------------------------------

WAY = re.compile(r"(\d{1,3}) ([-+*]) (\d{1,3}) ([-+*]) (\d{1,3})", re.ASCII)


def reaches(answer: str, numbers: list[int], target: int) -> bool:
    """Whether an answer like "25 - 7 * 3" uses the numbers once each and gives the target."""
    found = WAY.fullmatch(answer)
    if found is None:
        return False
    a, first, b, second, c = found.groups()
    value = calculate(calculate(int(a), first, int(b)), second, int(c))
    return sorted(map(int, (a, b, c))) == sorted(numbers) and value == target


def left_to_right(
    prompts: list[str], completions: list[str], numbers: list[list[int]], target: list[int], **columns: Any
) -> list[float]:
    """The reward of countdown: 1 where the last line is "Answer: ..." with a way that reaches the target."""
    last = [text.rstrip().rpartition("\n")[2] for text in completions]
    rows = zip(last, numbers, target, strict=True)
    return [float(line.startswith("Answer: ") and reaches(line[8:], *own)) for line, *own in rows]


# --- writing ---------------------------------------------------------------------------------------


def split_of(problem: Problem) -> str:
    place = int.from_bytes(blake2b(problem.key.encode(), digest_size=4).digest(), "big") % 100
    for split, share in SPLITS.items():
        place -= share
        if place < 0:
            return split
    raise ValueError("the shares of SPLITS are less than 100 %")


def worked(problem: Problem, style: str, rng: random.Random) -> str | None:
    """An answer in this style; None if it did not come out as the style asks, or has not the length of one."""
    trace = Trace(rng, DETOURS if style == "detours" else 0.0)
    if style == "noisy":
        rehearsal = Trace(rng)
        problem.work(rehearsal)
        trace.slip = rng.randrange(rehearsal.steps)
    answer = problem.work(trace)
    if answer is None or problem.right(answer) == (style == "noisy"):
        return None
    text = "\n".join([*trace.lines, f"Answer: {answer}"])
    return text if SHORTEST <= len(TOKEN.findall(text)) < LONGEST else None  # one for the end of turn


def rows(kind: str, split: str, style: str = "plain", seed: int = 0) -> Iterator[dict[str, Any]]:
    """Different problems of a split without end, with a worked answer where they are for warm-ups."""
    rng = random.Random(f"{seed}/{kind}/{split}/{style}")
    seen = set[str]()
    while True:
        problem = KINDS[kind](rng)
        if split_of(problem) != split or problem.key in seen:
            continue
        text = worked(problem, style, rng)
        if text is not None:
            seen.add(problem.key)
            completion = {"completion": text} if split == "warm" else {}
            yield {"prompt": problem.prompt, "answer": problem.answer, **problem.columns, **completion}


def take(count: int, kind: str, split: str, style: str = "plain", seed: int = 0) -> list[dict[str, Any]]:
    return [row for row, _ in zip(rows(kind, split, style, seed), range(count), strict=False)]


def files() -> Iterator[tuple[str, str, str, str]]:
    """The name, kind, split and style of every file."""
    for kind in KINDS:
        for style in STYLES:
            yield f"{kind}-warm-{style}", kind, "warm", style
        for split in list(SPLITS)[1:]:
            yield f"{kind}-{split}", kind, split, "plain"


def write(folder: Path, seed: int, scale: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind, split, style in files():
        found = take(max(int(ROWS[split] * scale), 8), kind, split, style, seed)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    print(f"{sum(1 for _ in files())} files in {folder}")


def print_lengths(tokenizer: str, seed: int, count: int = 300) -> None:
    """Tokens of worked answers with the end of turn: by the tokenizer, and how far `TOKEN` is off."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    print("| kind | style | mean | 5 % | 95 % | least | most | prompt, most | TOKEN off by |\n" + "|---" * 9 + "|")
    for kind in KINDS:
        for style in STYLES:
            found = take(count, kind, "warm", style, seed)
            texts = [row["completion"] for row in found]
            lengths = [len(ids) for ids in encode(texts, add_special_tokens=False).input_ids]
            off = max(abs(own - len(TOKEN.findall(text))) for own, text in zip(lengths, texts, strict=True))
            asked = max(len(encode(row["prompt"], add_special_tokens=False).input_ids) for row in found)
            low, *_, high = (1 + sorted(lengths)[int(share * (count - 1))] for share in (0.05, 0.95))
            told = [f"{1 + sum(lengths) / count:.0f}", low, high, 1 + min(lengths), 1 + max(lengths), asked, off]
            print(f"| {kind} | {style} | {' | '.join(map(str, told))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the files are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of rows")
    parser.add_argument("--lengths", metavar="TOKENIZER", help="print the lengths of answers in place of writing files")
    asked = parser.parse_args()
    if asked.lengths:
        print_lengths(asked.lengths, asked.seed)
    elif asked.folder:
        write(asked.folder, asked.seed, asked.scale)
    else:
        parser.error("give the folder to write to, or --lengths")


if __name__ == "__main__":
    main()
