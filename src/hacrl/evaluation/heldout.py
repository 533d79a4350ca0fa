"""Held-out accuracy of a model, or of every agent of a run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hacrl.agents.agent import Agent
from hacrl.agents.loading import resolve_model
from hacrl.algorithms import GSPO
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError
from hacrl.statistics import reward_interval
from hacrl.tasks import build_task
from hacrl.training.checkpoint import (
    MARKER,
    NAME,
    complete_checkpoints,
    find_checkpoint,
    refuse_damaged_model,
    step_of,
)
from hacrl.training.run_dir import RunDir, to_json, write_atomically


@dataclass(frozen=True)
class Accuracy:
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
    """Measure greedy answers to the held-out problems of the run's task, or of the given config's; for a mixture also
    by part."""
    if output is not None and output.exists():
        raise UserError(f"{output} already exists. Choose another --output.")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"There is no folder {output.parent} for --output.")
    config, agents = agents_of(target, config_source, step)
    task_config = config.task.model_copy(update={"eval_size": num_problems} if num_problems else {})
    task, _ = build_task(task_config, config.seed)
    lines = []
    with task.verifier:
        if not task.eval_problems:
            raise UserError("There are no held-out problems: the config's task has no `eval`.")
        for index, agent_config in enumerate(agents):
            agent = Agent(agent_config, index, GSPO(), config.seed)
            texts = agent.answer(task.eval_problems)
            verdicts = task.score(task.eval_problems, texts)
            for problem, text, verdict in zip(task.eval_problems, texts, verdicts, strict=True):
                lines.append(
                    {
                        "agent": agent_config.id,
                        "prompt_id": problem.id,
                        "part": problem.part,
                        "prompt": problem.prompt,
                        "answer": problem.answer,
                        "text": text,
                        "reward": verdict.reward,
                        "problem": verdict.problem,
                    }
                )
            for part in (None, *sorted({problem.part for problem in task.eval_problems if problem.part is not None})):
                pairs = zip(task.eval_problems, verdicts, strict=True)
                own = [verdict.reward for problem, verdict in pairs if part in (None, problem.part)]
                yield _accuracy(agent_config, part, own)
    if output is not None:
        write_atomically(output, "".join(to_json(line) + "\n" for line in lines))


def _accuracy(agent: AgentConfig, part: str | None, rewards: list[float | None]) -> Accuracy:
    judged = [reward for reward in rewards if reward is not None]
    mean = sum(judged) / len(judged) if judged else math.nan
    return Accuracy(
        agent.id, agent.model, part, mean, *reward_interval(judged), len(rewards), len(rewards) - len(judged)
    )


def config_of(target: str, config_source: str) -> RunConfig:
    """The config of a run; of a model, the given one."""
    if (Path(target) / "config.yaml").is_file():
        return RunDir.open(target).config()
    return RunConfig.load(config_source)


def agents_of(target: str, config_source: str, step: int | None) -> tuple[RunConfig, list[AgentConfig]]:
    """The agents of a run as they were at a checkpoint, or a model with the settings of the config's first agent."""
    if (Path(target) / "config.yaml").is_file():
        config = config_of(target, config_source)
        chosen = find_checkpoint(Path(target), step)
        agents = [
            agent.model_copy(update={"model": str(chosen / "agents" / agent.id), "log_kl": False})
            for agent in config.agents
        ]
        return config, agents
    check_model(target, step)
    config = config_of(target, config_source)
    first = config.agents[0]
    return config, [first.model_copy(update={"id": "model", "model": target, "log_kl": False})]


def check_model(target: str, step: int | None) -> None:
    """UserError if what is not a run is no model either: what it is, and what to give instead."""
    path = Path(target).expanduser()
    if (path / "warmup.yaml").is_file():
        newest = [path / "checkpoint-STEP", *complete_checkpoints(path)][-1]
        raise UserError(f"{target} is a warm-up. Give one of its models: {newest}/agents/ID.")
    if (path / "study.yaml").is_file():
        started = [path / "runs/PAIR/ALGORITHM/seed-N", *(file.parent for file in path.glob("runs/*/*/*/config.yaml"))]
        raise UserError(f"{target} is a study. Give one of its runs, for example {started[-1]}.")
    if (path / MARKER).is_file():
        if (path.parent / "config.yaml").is_file() and NAME.fullmatch(path.name):
            how = f"`hacrl eval {path.parent} --checkpoint {step_of(path)}`"
            raise UserError(f"{target} is a checkpoint of a run. Evaluate it with {how}.")
        raise UserError(f"{target} is a checkpoint. Give one of its models: {target}/agents/ID.")
    if path.is_file():
        raise UserError(f"{target} is a file. Give the folder of a run, or a model: zoo:NAME, a folder or a hub id.")
    if step is not None:
        raise UserError(f"--checkpoint is for a run, and {target} is none: it has no config.yaml.")
    if not path.exists() and (target.startswith((".", "/", "~", "runs/")) or target.count("/") > 1):
        raise UserError(f"There is no folder {target}. Give the folder of a run or of a model.")
    resolve_model(target)
    refuse_damaged_model("model", target)
