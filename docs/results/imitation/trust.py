"""How much a foreign gradient would count if trust was measured: lambda = <own, foreign> / |foreign|^2, from 0 to 1.

    python docs/results/imitation/trust.py runs/study-leads/runs/state/right/seed-*

Both products are running means over steps (0.9 old, 0.1 new) of the norms and the cosine that a run writes down. With
lambda the step along the foreign gradient is as long as its projection on the learner's own gradient. Printed for each
run and agent: lambda after the first step, its mean over the steps, and lambda after the last.
"""

import json
import sys
from pathlib import Path

from hacrl.training.run_dir import RunDir

OLD = 0.9


def lambdas(lines: list[dict], agent: str) -> list[float]:
    product = square = 0.0
    found = []
    for line in lines:
        own, foreign, cosine = (line.get(f"{agent}/grad_{name}") for name in ("norm_own", "norm_foreign", "cosine"))
        if cosine is not None:
            product = OLD * product + (1 - OLD) * cosine * own * foreign
            square = OLD * square + (1 - OLD) * foreign**2
            found.append(min(max(product / square, 0.0), 1.0))
    return found


if __name__ == "__main__":
    for run in map(Path, sys.argv[1:]):
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for agent in RunDir(run).config().agents:
            found = lambdas(metrics, agent.id)
            print(f"{run} {agent.id}: {found[0]:.2f}, {sum(found) / len(found):.2f}, {found[-1]:.2f}")
