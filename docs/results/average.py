"""Average the weights of two agents, the cheapest way to share, and measure the result.

    python docs/results/average.py runs/study-rivals/runs/state/gspo/seed-*

Each folder is a finished run of two agents with one architecture. Printed for each: the accuracy of the two agents on
the held-out problems of the run, and that of a model with the mean of their weights.
"""

import sys
from pathlib import Path

from safetensors.torch import load_file

from hacrl.agents.model import AgentModel
from hacrl.sources.policy import PolicySource
from hacrl.tasks import Task, build_task
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.run_dir import RunDir


def accuracy(source: PolicySource, task: Task) -> float:
    problems = task.eval_problems
    verdicts = task.score(problems, source.answer(problems))
    return sum(verdict.reward or 0.0 for verdict in verdicts) / len(verdicts)


def averaged(run: Path) -> tuple[float, float, float]:
    """Accuracy of the first agent, of the second, and of their mean."""
    config = RunDir(run).config()
    first, second = (
        complete_checkpoints(run)[-1] / "agents" / agent.id / "model.safetensors" for agent in config.agents
    )
    weights = [load_file(first), load_file(second)]
    mean = {name: (weights[0][name] + weights[1][name]) / 2 for name in weights[0]}
    opened = AgentModel(config.agents[0], 0, config.seed)
    opened.freeze()
    source = opened.source()
    task, _ = build_task(config.task, config.seed)
    found = []
    with task.verifier:
        for state in (*weights, mean):
            missing, unexpected = opened.model.load_state_dict(state, strict=False)
            assert not unexpected
            assert all(name == "lm_head.weight" for name in missing)  # tied to the embedding
            found.append(accuracy(source, task))
    return found[0], found[1], found[2]


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        first, second, mean = averaged(folder)
        print(f"{folder}: {first:.3f}, {second:.3f}; mean of their weights: {mean:.3f}", flush=True)
