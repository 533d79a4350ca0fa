"""Trains a small tokenizer of another family on the rows of warm-ups: byte-level BPE that sets digits apart, as Qwen's.

python docs/results/bpe.py runs/long/tokenizer runs/long/data/*-warm-plain.jsonl
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
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


def text_of(row: dict[str, str]) -> str:
    return f"{row['prompt']}\n{row['completion']}"


def main() -> None:
    folder, *files = map(Path, sys.argv[1:])
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    train_tokenizer([text_of(row) for row in rows]).save_pretrained(folder)
    print(f"a tokenizer of {len(rows):,} rows in {folder}")


if __name__ == "__main__":
    main()
