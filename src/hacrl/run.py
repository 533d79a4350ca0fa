"""Trains one run, from its config to its results."""

import importlib
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hacrl.agents.loading import resolve_model
from hacrl.agents.model import check_vllm
from hacrl.config import RunConfig
from hacrl.config.given import GIVEN
from hacrl.config.settings import apply_overrides, find_item, preset_names, read_source, with_overrides
from hacrl.errors import UserError, warn
from hacrl.execution.executor import AgentLost, Executor
from hacrl.execution.local import LocalExecutor
from hacrl.live.progress import Progress
from hacrl.live.trackers import Trackers, check_trackers
from hacrl.seeding import seed_all
from hacrl.tasks import build_task, refuse_gone
from hacrl.terminal import Terminal, note
from hacrl.training.asking import prepared
from hacrl.training.checkpoint import (
    all_checkpoints,
    complete_checkpoints,
    find_checkpoint,
    refuse_damaged_model,
    step_of,
)
from hacrl.training.exchange import check_exchange
from hacrl.training.run_dir import RunDir, refuse_changes
from hacrl.training.trainer import Trainer
from hacrl.training.watcher import Watcher

RESUMABLE_CHANGES = {
    *("max_steps", "eval_every", "eval_samples", "save_every", "save_final", "save_total_limit", "keep_best"),
    *("trace", "report_to", "execution", "ray", "resources", "max_prompt_length", "reward_memory_gib"),
    *("url", "api_key_env", "timeout", "max_retries", "max_requests", "step_timeout", "budget", "offload_idle"),
}
"""Settings that may change when a run is continued. Any other change would make it another run."""


@dataclass(frozen=True)
class AgentResult:
    """An agent after its training."""

    id: str
    run_dir: Path
    summary: dict[str, Any]
    """The agent's part of the run's summary: accuracies and costs."""

    @property
    def model_dir(self) -> Path:
        """The folder of the trained model with its tokenizer, of the newest checkpoint; `from_pretrained` opens it."""
        if not all_checkpoints(self.run_dir):
            how = "Train with save_final=True, or set save_every."
            raise UserError(f"{self.run_dir} saved no checkpoint, so there is no trained model of {self.id}. {how}")
        return find_checkpoint(self.run_dir, None) / "agents" / self.id


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    """Start and final accuracy, rollouts, updates and tokens of each agent."""
    already_finished: bool = False

    @property
    def agents(self) -> dict[str, AgentResult]:
        """Each agent by its id."""
        return {id: AgentResult(id, self.run_dir, summary) for id, summary in self.summary["agents"].items()}

    def metrics(self) -> Any:
        """The lines of metrics.jsonl: a pandas DataFrame with a row for each step if pandas is installed, else a list
        of dicts."""
        lines = RunDir(self.run_dir).metrics()
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            return lines
        return pandas.DataFrame(lines)


@dataclass(frozen=True)
class Audience:
    """Passes what a run reports on to several watchers."""

    watchers: list[Watcher]

    def on_phase(self, phase: str) -> None:
        for watcher in self.watchers:
            watcher.on_phase(phase)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.on_metrics(step, metrics)


def train(
    config: RunConfig, *, resume: bool = False, console: Console | None = None, title: str | None = None
) -> RunResult:
    """Train the agents of a config. `resume` continues the run in its `output_dir`.

    When an agent is lost, this call continues the run as `resume` would, unless `ray.on_failure` is stop.
    """
    restarts = 0
    while True:
        try:
            return _train(config, resume, console or Terminal(), title)
        except AgentLost as lost:
            run = RunDir(config.output_dir)
            if not run.config_file.is_file():  # the run had not begun
                raise
            how = f"Continue with {continuing(config)}."
            if config.ray.on_failure == "stop":
                raise UserError(f"{lost} {how}") from lost
            if restarts == config.ray.max_restarts:
                raise UserError(
                    f"{lost} The run was restarted {restarts} times already (ray.max_restarts). {how}"
                ) from lost
            restarts += 1
            resume = True
            warn(f"{lost} Restart {restarts} of at most {config.ray.max_restarts}: {_goes_back(run)}.")


def _goes_back(run: RunDir) -> str:
    logged, checkpoints = run.metrics(), complete_checkpoints(run.path)
    reached = step_of(checkpoints[-1]) if checkpoints else 0
    again = max((logged[-1]["step"] if logged else 0) - reached, 0)
    where = checkpoints[-1].name if checkpoints else "the start"
    return f"all agents go back to {where}; {again} finished steps are done again, besides the one that was going on"


def continuing(config: RunConfig) -> str:
    """The command or, if the run was given objects from Python, the call that continues a run."""
    given = config.task.given()
    if not given:
        return f"`hacrl train {config.output_dir} --resume`"
    objects = dict.fromkeys("task" if "." in setting else setting for setting in given)
    return f"hacrl.train({config.output_dir!r}, resume=True{''.join(f', {name}=...' for name in objects)})"


def _goes_on(run: RunDir, config: RunConfig, step: int) -> str:
    checkpoints = complete_checkpoints(run.path)
    where = checkpoints[-1].name if checkpoints else "the beginning, for there is no checkpoint yet"
    return f"The run ended at step {step}; {continuing(config)} continues it from {where}."


def make_executor(config: RunConfig, on_agent: Callable[[str, bool], None]) -> Executor:
    if config.execution == "local":
        return LocalExecutor(config, on_agent)
    from hacrl.execution.ray import RayExecutor

    return RayExecutor(config, on_agent)


def _train(config: RunConfig, resume: bool, console: Console, title: str | None) -> RunResult:
    began = time.monotonic()
    finished = _check_folder(config, resume)
    if finished is not None:
        return finished
    refuse_gone(config.task, f"Continue the run from Python, with the same objects: {continuing(config)}.")
    check_trackers(config.report_to)
    seed_all(config.seed)
    for agent in config.agents:
        resolve_model(agent.model, f"agents.{agent.id}.model")
        refuse_damaged_model(f"agents.{agent.id}.model", agent.model)
        if agent.engine == "vllm" and config.execution == "local":
            check_vllm(agent)
    task, remarks = build_task(config.task, config.seed)
    remarks += config.remarks()
    first = task.train(0, config.prompts_per_step)
    with (
        prepared(config, [*first, *task.listed]) as (sources, notes),
        task.verifier,
        Progress(config, console, title) as progress,
        closing(make_executor(config, progress.on_agent)) as executor,
    ):
        executor.check_prompts([*first, *task.listed, *task.eval_problems])
        traits = executor.traits(first[0])
        for agent, own in zip(config.agents, traits, strict=True):
            if not own.has_chat_template:
                remarks.append(f"Agent {agent.id} has no chat template: string prompts are given to it as they are.")
        for remark in (*remarks, *notes):
            note(console, remark)
        check_exchange(config, traits, resume)
        run = RunDir.open(config.output_dir) if resume else RunDir.create(config)
        audience = Audience([progress])
        trainer = Trainer(config, task, executor, run, audience, sources)
        trainer.accounts.began = began
        with run.locked(), progress.published(run.progress_file):
            if resume:
                trainer.resume()
                if not trainer.step:
                    note(console, f"{run.path} has no checkpoint yet: it starts from the beginning.")
                run.write_config(config)
                progress.recall(run.metrics())
            return RunResult(run.path, _all_steps(trainer, audience, resume))


def _check_folder(config: RunConfig, resume: bool) -> RunResult | None:
    """Raise UserError if the run cannot start or continue in its folder; return the result if it is finished."""
    if not resume:
        RunDir.check_free(config.output_dir)
        return None
    run = RunDir.open(config.output_dir)
    saved = run.config()
    _check_same_data(config, saved)
    check_same_run(config, saved)
    summary, checkpoints = run.summary(), complete_checkpoints(run.path)
    if summary is not None and summary["steps"] >= config.max_steps:
        return RunResult(run.path, summary, already_finished=True)
    if summary is not None and not checkpoints:
        raise UserError(f"{run.path} is finished and has no checkpoint to go on from (save_final). Start a new run.")
    done = step_of(checkpoints[-1]) if checkpoints else 0
    if done > config.max_steps:
        raise UserError(
            f"{run.path} has done {done} steps; max_steps={config.max_steps} is fewer. Give {done} or more."
        )
    return None


def _all_steps(trainer: Trainer, audience: Audience, resume: bool) -> dict[str, Any]:
    """Train and report to the trackers. A UserError also says how to continue the run."""
    run = trainer.run
    try:
        with Trackers(trainer.config, run) as trackers:
            audience.watchers.append(trackers)
            trackers.summary = trainer.train()
            return trackers.summary
    except AgentLost:  # `train` handles it
        raise
    except Exception as error:
        if not resume and trainer.step == 0:  # nothing worth keeping
            run.remove_start()
        elif isinstance(error, UserError):
            raise UserError(f"{error} {_goes_on(run, trainer.config, trainer.step)}") from error.__cause__
        raise


def _check_same_data(config: RunConfig, saved: RunConfig) -> None:
    """Raise UserError if a run that is continued is given other rows."""
    for setting in ("train", "eval"):
        now, then = str(getattr(config.task, setting)), str(getattr(saved.task, setting))
        if now != then and now.startswith(GIVEN) and then.startswith(GIVEN):
            now, then = now.removeprefix(GIVEN), then.removeprefix(GIVEN)
            raise UserError(
                f"{config.output_dir} was started with other data: {setting} had {then}, and now has {now}. Give the "
                "same rows to continue the run, or another output_dir to start a new one."
            )


def check_same_run(config: RunConfig, saved: RunConfig) -> None:
    """Raise UserError if continuing the saved run with this config would make it another run."""
    refuse_changes(config, saved, config.output_dir, "a run", RESUMABLE_CHANGES)


def resumed_config(run_dir: str | Path, overrides: list[str]) -> RunConfig:
    """Return the config of an interrupted run with overrides; UserError if one would make it another run."""
    if Path(run_dir).is_file() or (run_dir in preset_names() and not Path(run_dir).is_dir()):
        settings = apply_overrides(read_source(run_dir)[0], overrides)
        folder = settings.get("output_dir", RunConfig.model_fields["output_dir"].default)
        raise UserError(f"{run_dir} is not a run. A run is continued by its folder: `hacrl train {folder} --resume`.")
    saved = RunDir.open(run_dir).config()
    whole, data = saved.model_dump(mode="json"), saved.to_dict()
    for override in overrides:
        key = override.partition("=")[0]
        setting, *parts = key.split(".")
        agent = None
        if setting == "agents" and parts:
            agent, (setting, *parts) = find_item(whole["agents"], [*parts, ""], key)  # "": nothing follows the id
        if setting == "task" and parts:
            setting = parts[-1]
        if setting == "sources" and parts:
            _, names = find_item(whole["sources"], parts, key)
            setting = next((name for name in names if name in RESUMABLE_CHANGES), setting)
        if setting not in RESUMABLE_CHANGES:
            raise UserError(
                f"{key} cannot be changed when a run is continued; only {', '.join(sorted(RESUMABLE_CHANGES))} can. "
                "Start a new run with another output_dir."
            )
        if agent is not None:  # an agent that shares the run's section keeps the rest of that section
            data["agents"][agent].setdefault(setting, whole["agents"][agent][setting])
    return RunConfig.from_dict(apply_overrides(data, overrides), with_overrides(str(run_dir), overrides))
