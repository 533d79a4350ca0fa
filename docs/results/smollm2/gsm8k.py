"""GSM8K for SmolLM2: the files of a warm-up and of runs, and the reward.

    python docs/results/smollm2/gsm8k.py FOLDER runs/smollm2/gsm8k   # FOLDER: GSM8K's train.jsonl, test.jsonl

The last 473 training problems are for validation. Worked answers lose their calculator marks (<<48/2=24>>).
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

VALIDATION = 473
MARK = re.compile(r"<<[^<>]*>>")
FINAL = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def final_number(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the number after the last #### is the reference's."""
    wanted = [number(f"#### {own}") for own in answer]
    return [float(own is not None and number(text) == own) for text, own in zip(completions, wanted, strict=True)]


def number(text: str) -> float | None:
    found = FINAL.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def problem(line: str) -> dict[str, str]:
    row = json.loads(line)
    worked, final = MARK.sub("", row["answer"]).split("####")
    return {"prompt": row["question"], "answer": final.strip(), "completion": f"{worked.strip()}\n#### {final.strip()}"}


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    train = [problem(line) for line in (source / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    test = [problem(line) for line in (source / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = {"train": train[:-VALIDATION], "validation": train[-VALIDATION:], "test": test}
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} problems in {folder / name}.jsonl")


if __name__ == "__main__":
    main()
