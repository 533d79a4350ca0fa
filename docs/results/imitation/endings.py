"""Train once, then try several ends of the same run: imitation of all its right answers, with different options.

    python docs/results/imitation/endings.py state --algorithm gspo --seed 31 >> endings.jsonl
    python docs/results/imitation/endings.py --table endings.jsonl

The run keeps everybody's right answers. From its last checkpoint each ending starts with the same weights and the same
answers, so that endings differ by nothing else. Accuracy is on validation problems.
"""

import argparse
import io
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from hacrl.agents.agent import Agent
from hacrl.algorithms import Imitation
from hacrl.config import RunConfig
from hacrl.execution.executor import files_of
from hacrl.learners.supervised import Imitator
from hacrl.run import train
from hacrl.tasks import build_task

ENDINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "plain": {},
    "sure": {"confidence": 16.0},
    "weak": {"focus": 1.0},
    "sure-weak": {"confidence": 16.0, "focus": 1.0},
    "sure-weak-1": {"confidence": 16.0, "focus": 1.0, "rate": 1.0},
    "sure-weak-6": {"confidence": 16.0, "focus": 1.0, "rate": 6.0},
    "restart": {"restart": True},
    "sure-weak-restart": {"confidence": 16.0, "focus": 1.0, "restart": True},
}
"""Options of `imitation`. sure: answers that their sources found likely are drawn more often; weak: answers to prompts
that the learner often failed; a number is the rate, 3 where there is none."""


def run_of(asked: argparse.Namespace, folder: Path) -> RunConfig:
    """A run whose checkpoint after `--steps` holds the right answers of all steps, not yet imitated."""
    settings = [
        f"algorithm.name={asked.algorithm}",
        "algorithm.imitation.when=end",
        f"seed={asked.seed}",
        f"max_steps={asked.steps + 1}",  # so that the end of the run comes after the checkpoint
        f"save_every={asked.steps}",
        "save_final=false",
        "eval_every=0",
        "log_kl=false",
        "task.eval_split=validation",
        f"output_dir={folder}",
    ]
    config = RunConfig.load(asked.team, settings)
    train(config, console=Console(file=io.StringIO()))
    return config


def print_endings(config: RunConfig, asked: argparse.Namespace) -> None:
    """A line of JSON for each agent and ending."""
    task, _ = build_task(config.task, config.seed)
    problems = task.eval_problems
    of_run = {"team": asked.team, "algorithm": asked.algorithm, "seed": asked.seed, "steps": asked.steps}
    with task.verifier:
        for index, own in enumerate(config.agents):
            agent = Agent(own, index, config.algorithm, config.seed)
            imitators = {}
            for name in asked.endings.split(","):  # before the weights are loaded, because they remember the first ones
                options = Imitation(when="end", **(ENDINGS[name] or {}))
                imitators[name] = Imitator(agent.learner, options, index, config.seed)
            agent.load(*files_of(Path(config.output_dir) / f"checkpoint-{asked.steps}", own.id))
            weights = agent.learner.weights
            before = [weight.detach().clone() for weight in weights.weights]
            for name, imitator in imitators.items():
                with torch.no_grad():
                    for weight, kept in zip(weights.weights, before, strict=True):
                        weight.copy_(kept)
                weights.publish()
                cost: dict[str, float] = {}
                if ENDINGS[name] is not None:
                    imitator.load_state_dict(agent.imitator.state_dict())
                    cost = imitator.imitate(asked.steps, own.learning_rate)
                verdicts = task.score(problems, agent.answer(problems))
                accuracy = sum(verdict.reward or 0.0 for verdict in verdicts) / len(verdicts)
                found = {"agent": own.id, "ending": name, "accuracy": accuracy, **cost}
                print(json.dumps({**of_run, **found}), flush=True)


def print_table(path: str) -> None:
    """Accuracy by ending, a column for each team, means over seeds; the last column is the mean over all agents."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    agents: dict[str, list[str]] = {}
    for line in lines:
        if line["agent"] not in agents.setdefault(line["team"], []):
            agents[line["team"]].append(line["agent"])
    heads = [f"{team}: {', '.join(own)}" for team, own in agents.items()]
    for algorithm in dict.fromkeys(line["algorithm"] for line in lines):
        print(f"\n| after {algorithm}: ending | {' | '.join(heads)} | mean |")
        print("|---" * (len(heads) + 2) + "|")
        for name in dict.fromkeys(line["ending"] for line in lines):
            found: dict[tuple[str, str], list[float]] = {}
            for line in lines:
                if (line["algorithm"], line["ending"]) == (algorithm, name):
                    found.setdefault((line["team"], line["agent"]), []).append(100 * line["accuracy"])
            means = {place: sum(values) / len(values) for place, values in found.items()}
            cells = [
                ", ".join(f"{means[team, agent]:.1f}" for agent in own if (team, agent) in means)
                for team, own in agents.items()
            ]
            whole = f"{sum(means.values()) / len(means):.1f}" if len(means) == sum(map(len, agents.values())) else ""
            print(f"| {' | '.join([name, *cells, whole])} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("team", nargs="?")
    parser.add_argument("--algorithm", default="hacpo_robust")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--endings", default=",".join(ENDINGS), help="names, separated by commas")
    parser.add_argument("--table", metavar="FILE")
    asked = parser.parse_args()
    if asked.table:
        print_table(asked.table)
        sys.exit()
    with TemporaryDirectory() as folder:
        run = run_of(asked, Path(folder) / "run")
        print_endings(run, asked)
