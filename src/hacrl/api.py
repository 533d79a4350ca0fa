"""`hacrl.train`: training from Python, with objects where a YAML file has names."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hacrl import run
from hacrl.config import AgentConfig, RunConfig
from hacrl.config.agent import with_ids
from hacrl.config.run import check_command
from hacrl.config.settings import read_source
from hacrl.config.task import TaskConfig
from hacrl.errors import UserError
from hacrl.live.summary import print_summary
from hacrl.terminal import Terminal
from hacrl.training.run_dir import RunDir

Source = str | os.PathLike[str] | dict[str, Any] | RunConfig
"""A preset, a YAML file, settings as a dict, or a config; with `resume`, also the folder of a run."""
RewardFunction = Callable[..., Sequence[float | None]]
Reward = str | RewardFunction | dict[str, Any] | tuple[str | RewardFunction, float]
"""A name, a function, a section of a config, or a pair of one of the first two and its weight."""


def train(
    config: Source | None = None,
    *,
    agents: Sequence[str | os.PathLike[str] | dict[str, Any] | AgentConfig] | None = None,
    train: Any = None,
    eval: Any = None,
    reward: Reward | list[Reward] | None = None,
    resume: bool = False,
    console: Console | None = None,
    title: str | None = None,
    **settings: Any,
) -> run.RunResult:
    """Train agents together, and return the result.

    agents: models (hub ids, local folders, zoo:NAME), or dicts with a model and its settings.
    train, eval: a file, a hub id, a `datasets.Dataset`, or a list of dicts with prompt and answer.
    reward: exact, math, a function `fn(prompts, completions, **columns)`, a pair (reward, weight), or a list of these.
        Functions run in a process of their own.
    settings: every other key of a config, for example max_steps=20, task={"eval_size": 100}, algorithm="gspo".
    config: a preset, a YAML file, a dict or a `RunConfig`, whose settings the other arguments replace.
    resume: continue the run in `output_dir`, or in the folder `config`, with the same objects.
    console, title: where progress is shown, and its first line.
    """
    task = {"train": train, "eval": eval, "reward": reward}
    given = {name: value for name, value in task.items() if value is not None}
    if agents is not None:
        settings["agents"] = agents
    if not isinstance(resume, bool):
        raise UserError(
            f"resume: expected True or False, not {resume!r}; name the folder first, hacrl.train(FOLDER, ...)."
        )
    if not isinstance(console, Console | None):
        raise UserError(f"console: expected a rich.console.Console, not {type(console).__name__}.")
    console, whole = console or Terminal(), config_of(config, given, settings, resume)
    result = run.train(whole, resume=resume, console=console, title=title)
    print_summary(console, result.run_dir, result.summary, already_finished=result.already_finished)
    return result


def config_of(source: Source | None, given: dict[str, Any], settings: dict[str, Any], resume: bool) -> RunConfig:
    """The config that the arguments of `train` describe; `given` belongs to its task."""
    if isinstance(source, RunConfig) and not given and not settings:
        return source
    if not isinstance(settings.get("agents", []), list | tuple):
        expected = "expected a list of models, or of dicts with a model and its settings"
        raise UserError(f"agents: {expected}, not {settings['agents']!r}.")
    data, where = _settings_of(source, resume)
    if isinstance(settings.get("algorithm"), str):
        settings = {**settings, "algorithm": {"name": settings["algorithm"]}}
    data |= {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    own = _section(settings.get("task", {}))
    for name in given:
        if name in own:
            raise UserError(f"{name} is given twice, as {name}=... and in task={{...}}: leave one out.")
    if given:
        data["task"] = {**_section(data.get("task", {})), **given}
    if "task" not in data:
        raise UserError("There is nothing to train on: give train= and reward=, or task={'name': ...}.")
    return RunConfig.from_dict(with_ids(data), where)


def _settings_of(source: Source | None, resume: bool) -> tuple[dict[str, Any], str]:
    """The settings of a source, and its name for error messages."""
    if source is None:
        return {}, "hacrl.train"
    if isinstance(source, dict):
        check_command(RunConfig.command, source, "this dict")
        return dict(source), "hacrl.train"
    if isinstance(source, str | os.PathLike) and resume and Path(source).is_dir():
        source = RunDir.open(Path(source)).config()
    if isinstance(source, RunConfig):
        return {**source.to_dict(), "task": source.task}, "hacrl.train"
    if not isinstance(source, str | os.PathLike):
        expected = "a preset, a YAML file, a dict or a RunConfig"
        raise UserError(
            f"hacrl.train takes {expected} first, not {type(source).__name__}; agents are given as agents=."
        )
    data, where = read_source(Path(source) if isinstance(source, os.PathLike) else source)
    check_command(RunConfig.command, data, where)
    return dict(data), where


def _section(task: Any) -> dict[str, Any]:
    """A task as a dict of the settings that were given."""
    if isinstance(task, dict):
        return task
    if isinstance(task, TaskConfig):
        return {name: getattr(task, name) for name in task.model_fields_set}
    raise UserError(f"task: expected a section, not {task!r}; write task={{'name': {task!r}}} or train={task!r}.")
