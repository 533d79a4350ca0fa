"""Sends metrics to TensorBoard, Weights & Biases or Trackio, besides metrics.jsonl (`report_to`)."""

import json
import math
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from hacrl.config import RunConfig
from hacrl.errors import UserError, require, warn
from hacrl.files import Kind, read_object
from hacrl.training.run_dir import RunDir, write_atomically

Metrics = dict[str, float]
NAMES = Kind("the names of a run in its trackers", {"*": str}, "Delete the file: each tracker then gets a new run.")


class Tracker(Protocol):
    """A tool that shows metrics. It is opened with the config, the run's folder, the run's name in the tool, and the
    step the run goes on from, which is None for a new run."""

    needs_history: bool
    """Whether the steps before this one have to be logged again."""

    def log(self, step: int, metrics: Metrics) -> None: ...
    def close(self, step: int, summary: dict[str, Any] | None) -> None:
        """End the run; `summary` is None if it was interrupted or failed."""


class TensorBoard:
    """Event files in `tensorboard/` of the run."""

    def __init__(self, config: RunConfig, folder: Path, name: str, first: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.needs_history = first is None
        # What an interrupted process has written from this step on is hidden.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)
        self._text("config", config.to_yaml(), first or 0)

    def _text(self, name: str, text: str, step: int) -> None:
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # in Markdown, text to be shown as it is
        self.writer.add_text(name, indented, step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, step: int, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._text("summary", json.dumps(summary, indent=2), step)
        self.writer.close()


class WandB:
    """A run in Weights & Biases, with files in `wandb/` of the run; WANDB_MODE, WANDB_PROJECT and the like count."""

    def __init__(self, config: RunConfig, folder: Path, name: str, first: int | None) -> None:
        import wandb

        self.needs_history = first is None
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hacrl"),
            id=name,
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", quiet=True),  # its console would record the live table
        )

    def log(self, step: int, metrics: Metrics) -> None:
        # Steps that a run which is continued has logged before are left as they are.
        self.run.log(metrics, step=step)

    def close(self, step: int, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self.run.summary.update(flat(summary, "summary"))
        self.run.finish(exit_code=0 if summary is not None else 1)


class Trackio:
    """A run in the local Trackio store (TRACKIO_DIR, TRACKIO_PROJECT); `trackio show` opens it."""

    def __init__(self, config: RunConfig, folder: Path, name: str, first: int | None) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "hacrl")
        # Single steps cannot be deleted, but a local run can: it is written again, without the steps to come.
        local = not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
        self.needs_history = local or first is None
        self.finish = trackio.finish
        if local and first is not None:
            with suppress(ValueError):  # there is no such project
                for run in trackio.Api().runs(project):
                    if run.name == name:
                        run.delete()
        self.run = trackio.init(
            project=project,
            name=name,
            resume="allow",
            config=config.model_dump(mode="json"),
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def close(self, step: int, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self.run.log(flat(summary, "summary"), step=step)
        self.finish()


TRACKERS: dict[str, Callable[[RunConfig, Path, str, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_trackers(names: list[str]) -> None:
    """UserError if a tracker cannot be opened; called before anything is loaded and before the live table."""
    for name in names:
        require(f"report_to: {name}", "track", name)
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login()  # asks for a key if there is none
        except wandb.Error as error:
            advice = "Log in with `wandb login`, or set WANDB_MODE=offline."
            raise UserError(f"report_to: wandb is not ready: {one_line(error)}. {advice}") from None


class Trackers:
    """The trackers of a run. One that fails gets nothing more, with a warning, and the run goes on."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self.trackers: dict[str, Tracker] = {}
        self.step = 0
        self.summary: dict[str, Any] | None = None
        """Summary of the run, once it is finished."""
        if not config.report_to:
            return
        logged = run.metrics()
        first = logged[-1]["step"] + 1 if logged else 0
        names = read_object(run.trackers_file, NAMES) if run.trackers_file.is_file() else {}
        for tracker in config.report_to:
            known = tracker in names
            folder = re.sub(r"[^A-Za-z0-9._-]", "-", run.path.resolve().name)[:40]  # what all of them accept
            name = names.setdefault(tracker, f"{folder}-{secrets.token_hex(4)}")
            try:
                self.trackers[tracker] = TRACKERS[tracker](config, run.path, name, first if known else None)
            except Exception as error:
                self.__exit__()
                advice = "Go on without it: add 'report_to=[]' to the command."
                raise UserError(f"report_to: {tracker} did not start: {one_line(error)}. {advice}") from None
            if self.trackers[tracker].needs_history:
                for line in logged:
                    self._log(tracker, line["step"], line)
        write_atomically(run.trackers_file, json.dumps(names, indent=2) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.trackers):
            self._safely(name, lambda tracker: tracker.close(self.step, self.summary))

    def on_phase(self, phase: str) -> None:
        pass

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self.step = step
        for name in list(self.trackers):
            self._log(name, step, metrics)

    def _log(self, name: str, step: int, metrics: dict[str, Any]) -> None:
        if name in self.trackers:
            self._safely(name, lambda tracker: tracker.log(step, numbers(metrics)))

    def _safely(self, name: str, work: Callable[[Tracker], None]) -> None:
        try:
            work(self.trackers[name])
        except Exception as error:
            del self.trackers[name]
            warn(f"report_to: {name} failed and gets nothing more: {one_line(error)}. metrics.jsonl has it all.")


def numbers(metrics: dict[str, Any]) -> Metrics:
    """The metrics that a tracker can draw."""
    return {k: v for k, v in metrics.items() if k != "step" and isinstance(v, int | float) and math.isfinite(v)}


def flat(tree: dict[str, Any], prefix: str) -> Metrics:
    """The numbers of nested dicts under names with slashes."""
    found: Metrics = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            found[f"{prefix}/{name}"] = value
    return found


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
