"""How many right answers of zoo models are right by luck: the result is right, and a step on the way is not.

    python docs/results/luck.py runs/study-rivals/runs/state/gspo/seed-0 ...

An answer to 12+23+55= is 12+23=35;35+55=90;#90. It is sound if each step is true, begins with what the step before it
gave, and takes the problem's numbers in order. For each run and agent: the share of sound answers among its right ones;
among the half of them that it was surer of (mean log-probability of a token) and the other half; and in expectation if
answers are drawn in proportion to p^c, p being that mean probability.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from tables import table

STEP = re.compile(r"(-?\d+)([+-])(\d+)=(-?\d+)")
POWERS = (2, 4, 8, 16)


def sound(prompt: str, text: str) -> bool:
    """Whether each step of an answer is true and the next one that the problem asks for."""
    first, *rest = re.findall(r"[+-]?\d+", prompt)
    steps = STEP.findall(text)
    if len(steps) != len(rest):
        return False
    value = int(first)
    for (left, sign, right, result), number in zip(steps, rest, strict=True):
        if int(left) != value or sign + right != number or int(result) != value + int(number):
            return False
        value = int(result)
    return True


def main() -> None:
    rows = []
    for run in map(Path, sys.argv[1:]):
        found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        for file in sorted((run / "rollouts").glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                rollout = json.loads(line)
                if rollout["reward"] == 1:
                    surety = rollout["logp_sum"] / rollout["num_tokens"]
                    found[rollout["source"]].append((surety, sound(rollout["prompt"], rollout["text"])))
        for agent, answers in found.items():
            logp_N, sound_N = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
            surer_N = logp_N >= np.median(logp_N)
            shares = [sound_N.mean(), sound_N[surer_N].mean(), sound_N[~surer_N].mean()]
            for power in POWERS:
                weight_N = np.exp(power * (logp_N - logp_N.max()))
                shares.append((weight_N * sound_N).sum() / weight_N.sum())
            rows.append([str(run), agent, str(len(answers)), *(f"{100 * share:.1f}" for share in shares)])
    head = ["run", "agent", "right answers", "sound, %", "surer half", "other half", *(f"c = {c}" for c in POWERS)]
    print(table(head, rows))


if __name__ == "__main__":
    main()
