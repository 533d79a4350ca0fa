"""Held-out accuracy of a model, or of every agent of a run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hacrl.errors import UserError
from hacrl.evaluation.answers import Answerer
from hacrl.evaluation.subjects import evaluated_agents
from hacrl.signs import doing
from hacrl.statistics import reward_interval
from hacrl.tasks import build_task, refuse_gone
from hacrl.training.run_dir import to_json, write_atomically

WRITTEN = ("prompt_id", "part", "prompt", "answer", "text", "reward", "problem")
"""What a file of answers says of each, besides its agent."""


@dataclass(frozen=True)
class Accuracy:
    """How many held-out problems an agent solves."""

    agent: str
    model: str
    part: str | None
    """Part of a mixture; None: all problems."""
    accuracy: float
    low: float
    high: float
    """The 95 % interval over the problems."""
    problems: int
    unverified: int


def evaluate_target(
    target: str, config_source: str, step: int | None, num_problems: int | None, output: Path | None
) -> Iterator[Accuracy]:
    """Accuracy of greedy answers to held-out problems of the run's or the config's task; of a mixture also by part."""
    if output is not None and output.exists():
        raise UserError(f"{output} already exists. Choose another --output.")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"There is no folder {output.parent} for --output.")
    config, agents = evaluated_agents(target, config_source, step)
    files = f"`hacrl eval {agents[0].model} --config YAML` measures a model on the task of a YAML file"
    refuse_gone(config.task, f"{files}, and --benchmarks needs no task.")
    task_config = config.task.model_copy(update={"eval_size": num_problems} if num_problems else {})
    task, _ = build_task(task_config, config.seed)
    lines = []
    with task.verifier:
        problems = task.eval_problems
        if not problems:
            raise UserError("There are no held-out problems: the config's task has no `eval`.")
        for agent in agents:
            with doing(f"{agent.id}: held-out problems"):
                answerer = Answerer(agent)
                prompts = [answerer.prompt_ids(problem) for problem in problems]
                answers = answerer.answers(problems, prompts, task.score, temperature=0.0, seed=0)
            lines += [{"agent": agent.id, **{name: answer[name] for name in WRITTEN}} for answer in answers]
            for part in (None, *sorted({problem.part for problem in problems if problem.part is not None})):
                rewards = [answer["reward"] for answer in answers if part in (None, answer["part"])]
                judged = [reward for reward in rewards if reward is not None]
                mean = sum(judged) / len(judged) if judged else math.nan
                counts = len(rewards), len(rewards) - len(judged)
                yield Accuracy(agent.id, agent.model, part, mean, *reward_interval(judged), *counts)
    if output is not None:
        write_atomically(output, "".join(to_json(line) + "\n" for line in lines))
