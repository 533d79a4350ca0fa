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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hacrl.tasks.gym import GymTask

ROWS = 8000
VOCABULARY = 1024


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


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that sets digits apart, as Qwen's does, learned from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    task = yaml.safe_load(Path(__file__).with_name("base.yaml").read_text())["task"]
    texts = []
    for part in task["mixture"]:
        worked = rows(part)
        name = part["name"].removeprefix("gym:")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
        texts += [f"{row['prompt']}\n{row['completion']}" for row in worked]
    train_tokenizer(texts).save_pretrained(folder / "tokenizer")
    print(f"{len(texts)} worked answers and a tokenizer in {folder}")


if __name__ == "__main__":
    main()
