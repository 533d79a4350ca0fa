"""Runs one warm-up, from its config to models that a run can start from."""

import math
import shutil
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from hacrl import signs
from hacrl.agents.loading import Bases, resolve_model
from hacrl.agents.model import AgentModel
from hacrl.config.settings import apply_overrides, read_source, with_overrides
from hacrl.config.warmup import WarmupAgentConfig, WarmupConfig
from hacrl.errors import UserError
from hacrl.execution.executor import files_of
from hacrl.execution.local import THREADS
from hacrl.execution.memory import keep_freed_memory
from hacrl.learners.supervised import SupervisedLearner
from hacrl.learners.updating import Updater, read_state, write_state
from hacrl.seeding import global_random_state, restore_global_random_state, seed_all
from hacrl.tasks import Task, build_task
from hacrl.terminal import Terminal, note
from hacrl.training import checkpoint
from hacrl.training.heldout import first_and_last
from hacrl.training.metrics import accuracy_metrics
from hacrl.training.run_dir import RunDir, make_folder, refuse_changes, write_atomically
from hacrl.training.schedule import learning_rate
from hacrl.warmup.rows import Rows
from hacrl.warmup.start import resolve_tokenizer, starting_model

CONFIG_FILE = "warmup.yaml"
RESUMABLE_CHANGES = {"eval_every", "save_every", "save_total_limit"}
"""Settings that may change when a warm-up is continued."""
SHOWN = {"loss": "loss", "eval_loss": "held-out loss", "eval_accuracy": "accuracy"}
"""Metrics of an agent that the terminal shows, and their names there."""
LINE_EVERY = 10
"""Steps between printed lines if there is no terminal. Every evaluation is printed too."""


@dataclass(frozen=True)
class WarmupResult:
    run_dir: Path
    summary: dict[str, Any]
    """Losses, accuracies, rows and tokens of each agent."""
    models: dict[str, Path]
    """The trained models by agent, for `model:` of a run."""
    already_finished: bool = False


def warm_up(config: WarmupConfig, *, resume: bool = False, console: Console | None = None) -> WarmupResult:
    """Train the agents of a config on written completions. `resume` continues the warm-up in its `output_dir`."""
    console = console or Terminal()
    run = RunDir(config.output_dir)
    if resume:
        refuse_changes(config, saved_config(run.path), config.output_dir, "a warm-up", RESUMABLE_CHANGES)
        summary = run.summary()
        if summary is not None:
            return WarmupResult(run.path, summary, models(config, summary), already_finished=True)
    else:
        check_free(run.path)
    seed_all(config.seed)
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    for agent in config.agents:
        if agent.model is not None:
            resolve_model(agent.model, f"agents.{agent.id}.model")
            checkpoint.refuse_damaged_model(f"agents.{agent.id}.model", agent.model)
        if agent.tokenizer is not None:
            resolve_tokenizer(agent)
    task, remarks = build_task(config.task, config.seed) if config.task else (None, [])
    with task.verifier if task else nullcontext(), WarmupProgress(config, console) as display:
        for remark in remarks:
            display.note(remark)
        make_folder(run.path)
        with run.locked():
            if resume:
                stage = Warmup(config, run, display, task)
                stage.resume()
                write_atomically(run.path / CONFIG_FILE, config.to_yaml())
            else:
                write_atomically(run.path / CONFIG_FILE, config.to_yaml())  # from here on it can be continued
                try:
                    stage = Warmup(config, run, display, task)
                except BaseException:
                    clear(run.path)
                    raise
            summary = stage.train()
    return WarmupResult(run.path, summary, models(config, summary))


def models(config: WarmupConfig, summary: dict[str, Any]) -> dict[str, Path]:
    """The folders of the trained models of a finished warm-up."""
    last = checkpoint.checkpoint_dir(Path(config.output_dir), summary["steps"])
    return {agent.id: last / "agents" / agent.id for agent in config.agents}


# --- the stage -------------------------------------------------------------------------------------


class Pupil:
    """One agent of a warm-up, with its rows and its progress."""

    def __init__(self, config: WarmupAgentConfig, opened: AgentModel, rows: Rows) -> None:
        self.config, self.opened, self.rows, self.source = config, opened, rows, opened.source()
        self.updater = Updater(opened.config, opened.weights(), opened.policy)
        self.learner = SupervisedLearner(self.updater)
        self.position = 0
        """Position in the agent's stream of rows."""
        self.totals = Counter[str]()
        """Rows, tokens and non-finite updates since the start."""
        self.losses = dict[int, float]()
        """Held-out loss by step."""
        self.accuracy = dict[int, float]()
        """Greedy accuracy on held-out problems by step."""

    def finished(self, step: int) -> bool:
        """Whether the agent has made its last update: after `max_steps`, or once it has reached `target_accuracy`."""
        target = self.config.target_accuracy
        reached = target is not None and any(after and value >= target for after, value in self.accuracy.items())
        return reached or step >= self.config.max_steps

    def learn(self, step: int) -> dict[str, Any]:
        """Make one update, and return its metrics."""
        start = time.perf_counter()
        rows, self.position = self.rows.take(self.position, self.config.batch_size)
        rate = learning_rate(self.opened.config, step, self.config.max_steps)
        metrics = self.learner.update(rows, rate, step)
        counted = {name: int(metrics[name]) for name in ("tokens_trained", "nonfinite_updates")}
        self.totals.update(rows=len(rows), **counted)
        counts = {"num_rows": self.totals["rows"], "num_tokens": self.totals["tokens_trained"]}
        dropped = self.rows.dropped.total()
        return self._named({**metrics, **counts, "dropped": dropped, "time/learn": time.perf_counter() - start})

    @signs.doing("evaluating")
    def evaluate(self, step: int, task: Task | None) -> dict[str, Any]:
        """Measure the loss on held-out rows, and greedy accuracy if there is a task."""
        start = time.perf_counter()
        metrics: dict[str, Any] = {}
        if self.rows.heldout:
            metrics["eval_loss"] = self.losses[step] = self.learner.loss(self.rows.heldout, step)
        if task is not None and (problems := task.eval_problems):
            verdicts = task.score(problems, self.source.answer(problems))
            metrics |= accuracy_metrics("eval_accuracy", problems, verdicts)
            metrics["eval_unverified"] = sum(verdict.reward is None for verdict in verdicts)
            if "eval_accuracy" in metrics:
                self.accuracy[step] = metrics["eval_accuracy"]
        return self._named({**metrics, "time/eval": time.perf_counter() - start})

    def _named(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {f"{self.config.id}/{name}": value for name, value in metrics.items()}

    def save(self, model_dir: Path, state_file: Path) -> None:
        self.opened.save(model_dir, self.updater.weights)
        write_state(state_file, self.updater.state_dict())

    def load(self, model_dir: Path, state_file: Path) -> None:
        self.opened.load(model_dir, self.updater.weights)
        self.updater.load_state_dict(read_state(state_file, torch.device("cpu")))

    def state_dict(self) -> dict[str, Any]:
        """The agent's state that a checkpoint must hold besides weights and optimizer."""
        rows = {"position": self.position, "digests": self.rows.digests, "dropped": self.rows.dropped}
        measured = {"losses": list(self.losses.items()), "accuracy": list(self.accuracy.items())}
        return {**rows, "totals": self.totals, **measured}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the state; UserError if the rows are not those that the checkpoint was trained on."""
        digests = state.get("digests", self.rows.digests)
        for data, digest, then in zip(self.config.data, self.rows.digests, digests, strict=True):
            if digest != then:
                raise UserError(
                    f"{folder} cannot be continued: {data.file or 'its task'} no longer gives agent "
                    f"{self.config.id} the rows it was started with. Put the old data back, or start anew with "
                    "another output_dir."
                )
        self.position = state["position"]
        self.rows.dropped, self.totals = Counter(state["dropped"]), Counter(state["totals"])
        self.losses, self.accuracy = dict(state["losses"]), dict(state["accuracy"])

    def summary(self) -> dict[str, Any]:
        return {
            "model": self.config.model,
            **first_and_last(self.losses, "loss"),
            **first_and_last(self.accuracy, "accuracy"),
            "updates": self.updater.updates,
            **self.totals,
            "dropped": dict(self.rows.dropped),
        }


class Warmup:
    """Trains agents in turn, each on its own rows, with one update a step until its `max_steps`."""

    def __init__(self, config: WarmupConfig, run: RunDir, display: "WarmupProgress", task: Task | None = None) -> None:
        self.config, self.run, self.display, self.task = config, run, display, task
        self.step = 0
        self.seconds = 0.0
        bases: Bases = {}
        self.pupils = []
        for index, own in enumerate(config.agents):
            model = starting_model(own, index, config.seed, run.path / "start" / own.id)
            opened = AgentModel(own.for_agent(model), index, config.seed, bases)
            rows = Rows(opened.reader, own.data, config)
            self._tell(rows)
            rows.check()
            if task is not None:
                opened.reader.check_prompts(task.eval_problems)
            self.pupils.append(Pupil(own, opened, rows))

    def _tell(self, rows: Rows) -> None:
        """Tell the user how many rows an agent has to learn from."""
        reader = rows.reader
        sizes = " + ".join(f"{stream.size:,}" if stream.size is not None else "endless" for stream in rows.streams)
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rows.dropped.items())
        dropped = f", dropped {rows.dropped.total():,} ({reasons})" if reasons else ""
        self.display.note(f"{reader.config.id}: rows to train on {sizes}, held out {len(rows.heldout):,}{dropped}")
        if not reader.tokenizer.chat_template:
            self.display.note(f"{reader.config.id} has no chat template: string prompts are given to it as they are.")

    def train(self) -> dict[str, Any]:
        """Make all updates that are left, and return the summary of the warm-up."""
        if self.step == 0:
            self._log({"step": 0} | {k: v for pupil in self.pupils for k, v in pupil.evaluate(0, self.task).items()})
        while learning := [pupil for pupil in self.pupils if not pupil.finished(self.step)]:
            self.step += 1
            start = time.perf_counter()
            metrics: dict[str, Any] = {"step": self.step}
            for pupil in learning:
                metrics |= pupil.learn(self.step)
                if self._due(self.config.eval_every) or pupil.finished(self.step):
                    metrics |= pupil.evaluate(self.step, self.task)
            metrics["step_time"] = time.perf_counter() - start
            self.seconds += metrics["step_time"]
            metrics["time/elapsed"] = self.seconds
            self._log(metrics)
            if self._due(self.config.save_every) or all(pupil.finished(self.step) for pupil in self.pupils):
                self._save()
        agents = {pupil.config.id: pupil.summary() for pupil in self.pupils}
        summary = {"steps": self.step, "seconds": self.seconds, "agents": agents}
        self.run.write_summary(summary)
        return summary

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _log(self, metrics: dict[str, Any]) -> None:
        self.run.append_metrics(metrics)
        self.display.show(self.step, metrics)

    # --- checkpoints -------------------------------------------------------------------------------

    @signs.doing("saving")
    def _save(self) -> None:
        agents = [pupil.state_dict() for pupil in self.pupils]
        state = {"step": self.step, "seconds": self.seconds, "agents": agents, "random": global_random_state()}
        checkpoint.save_checkpoint(self.run.path, self.step, state, self._save_agents)
        checkpoint.prune(self.run.path, self.config.save_total_limit, None)

    def _save_agents(self, folder: Path) -> None:
        for pupil in self.pupils:
            pupil.save(*files_of(folder, pupil.config.id))

    def resume(self) -> None:
        """Go back to the newest whole checkpoint, or to the start if there is none."""
        found = checkpoint.to_continue_from(self.run.path)
        if found:
            state = checkpoint.load_state(found, ("step", "seconds", "agents", "random"))
            for pupil, own in zip(self.pupils, state["agents"], strict=True):
                pupil.load_state_dict(own, self.run.path)
            self.step, self.seconds = state["step"], state["seconds"]
            restore_global_random_state(state["random"])
            for pupil in self.pupils:
                pupil.load(*files_of(found, pupil.config.id))
        else:
            self.display.note(f"{self.run.path} has no checkpoint yet: it starts from the beginning.")
        self.run.rewind(self.step if found else -1)


# --- the folder ------------------------------------------------------------------------------------


def check_free(path: Path) -> None:
    """Raise UserError unless a new warm-up may be written there. Existing files are never touched."""
    if (path / CONFIG_FILE).is_file():
        hint = f"Continue it with `hacrl warmup {path} --resume`, or choose another output_dir."
        raise UserError(f"output_dir: {path} already holds a warm-up. {hint}")
    RunDir.check_free(path)


def clear(path: Path) -> None:
    """Empty the folder of a warm-up that has not learned anything yet."""
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def saved_config(path: Path) -> WarmupConfig:
    """The resolved config, with the folder it was found in as its output_dir."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{path} is not a warm-up: it has no {CONFIG_FILE}.")
    data, _ = read_source(file)
    return WarmupConfig.from_dict({**data, "output_dir": str(path)}, str(file))


def given_config(source: str, overrides: list[str], resume: bool) -> WarmupConfig:
    """Return the config that a command names: a YAML file or, with `resume`, also the folder of a warm-up."""
    if not Path(source).is_dir():
        return WarmupConfig.load(source, overrides)
    config = saved_config(Path(source))
    if not resume:
        raise UserError(f"{source} is the folder of a warm-up. Continue it with `hacrl warmup {source} --resume`.")
    data = apply_overrides(config.model_dump(mode="json"), overrides)
    return WarmupConfig.from_dict(data, with_overrides(source, overrides))


# --- what a person sees ----------------------------------------------------------------------------


class WarmupProgress(ExitStack):
    """Shows how far a warm-up is: one moving line in a terminal, lines elsewhere."""

    def __init__(self, config: WarmupConfig, console: Console) -> None:
        super().__init__()
        self.config, self.console = config, console
        self.signs, self.activity = signs.Display(console), signs.Activity("warm-up")

    def __enter__(self) -> Self:
        self.enter_context(self.signs)
        self.activity = self.enter_context(signs.doing("warm-up"))
        return self

    def note(self, text: str) -> None:
        note(self.console, text)

    def show(self, step: int, metrics: dict[str, Any]) -> None:
        """Show the metrics of a step; as a line that stays after an evaluation or if there is no terminal."""
        parts = []
        for agent in self.config.agents:
            values = ((shown, metrics.get(f"{agent.id}/{name}", math.nan)) for name, shown in SHOWN.items())
            known = [f"{shown} {value:.3f}" for shown, value in values if math.isfinite(value)]
            if known:
                parts.append(f"{agent.id}: {' '.join(known)}")
        if self.activity.total is None:  # until now it was loading
            self.activity.begin("warm-up", step)
        self.activity.total, self.activity.done, self.activity.note = self.config.last_step, step, " | ".join(parts)
        evaluated = any("/eval_" in name for name in metrics)
        if evaluated or (not self.console.is_interactive and step % LINE_EVERY == 0):
            self.signs.say(" | ".join([f"step {step}/{self.config.last_step}", *parts]))
