"""Make a confidently wrong agent: zoo:llama-plus whose tokenizer has + and - exchanged.

    python docs/results/adversary.py runs/plus-for-minus

It reads 12+7 as 12-7, works that out as well as it can, and writes it down as 12+7=5.
"""

import json
import shutil
import sys
from pathlib import Path

from hacrl.agents.loading import ZOO


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.copytree(ZOO / "llama-plus", folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["+"], vocabulary["-"] = vocabulary["-"], vocabulary["+"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    main()
