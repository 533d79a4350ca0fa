"""What the warm-ups need: worked answers to training questions of four generators, and a tokenizer of another family.

    python docs/results/smollm2/prepare.py runs/smollm2     # writes leg_counting.jsonl, ..., and tokenizer/

reasoning-gym knows final answers only. Small models learn to compute when they may write down the steps.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from reasoning_gym.arithmetic.leg_counting import ANIMALS

from hacrl.tasks.gym import GymTask

sys.path.insert(0, str(Path(__file__).parents[1]))
from bpe import text_of, train_tokenizer

ROWS = 8000


def leg_counting(question: dict[str, Any]) -> list[str]:
    parts = [(count, ANIMALS[animal]) for animal, count in question["animals"].items()]
    products = [count * legs for count, legs in parts]
    lines = [f"{count} * {legs} = {count * legs}" for count, legs in parts]
    return [*lines, f"{' + '.join(map(str, products))} = {sum(products)}"]


def spell_backward(question: dict[str, Any]) -> list[str]:
    return [" ".join(question["word"]), " ".join(reversed(question["word"]))]


WORKED: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "family_relationships": lambda question: [],  # nothing to compute on the way
    "leg_counting": leg_counting,
    "spell_backward": spell_backward,
    "number_filtering": lambda question: [],
}


def rows(part: dict[str, Any]) -> list[dict[str, str]]:
    """Worked answers that end with the generator's own, to questions that no run is tested on."""
    generator = part["name"].removeprefix("gym:")
    task = GymTask(generator, part["options"], form=part["answer"], instruction=part["instruction"])
    worked = WORKED[generator]
    problems = [problem for start in range(0, ROWS, 20) for problem in task.train(start, 20)]
    lines = [[*worked(problem.columns["entry"]["metadata"]), problem.answer] for problem in problems]
    return [{"prompt": p.prompt, "completion": "\n".join(own)} for p, own in zip(problems, lines, strict=True)]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    task = yaml.safe_load(Path(__file__).with_name("base.yaml").read_text())["task"]
    texts: list[str] = []
    for part in task["mixture"]:
        worked = rows(part)
        name = part["name"].removeprefix("gym:")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
        texts += map(text_of, worked)
    train_tokenizer(texts).save_pretrained(folder / "tokenizer")
    print(f"{len(texts)} worked answers and a tokenizer in {folder}")


if __name__ == "__main__":
    main()
