"""Puts the rollouts of the frozen partner, of all seeds, into one file of stored rollouts.

hacrl study docs/results/sources/two.yaml
python docs/results/sources/stored.py runs/study-sources-two
"""

import argparse
import json
from pathlib import Path

from hacrl.rollouts.lines import read_rollouts

COLUMNS = ("prompt", "reward", "finish_reason", "num_tokens", "logp_sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    study = parser.parse_args().study
    count = 0
    with (study / "stored.jsonl").open("w", encoding="utf-8") as file:
        for path in sorted(study.glob("runs/frozen/*/*/rollouts/step-*.jsonl")):
            for line in read_rollouts(path):
                if line["source"] == "llama-large":
                    row = {"completion": line["text"], **{name: line.get(name) for name in COLUMNS}}
                    file.write(json.dumps(row) + "\n")
                    count += 1
    print(f"{study / 'stored.jsonl'}: {count:,} rollouts")


if __name__ == "__main__":
    main()
