"""The folder of a run: config.yaml, metrics.jsonl, rollouts/, trace/, checkpoints, summary.json, progress.json."""

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel

from hacrl.config import RunConfig
from hacrl.config.agent import with_current_names
from hacrl.config.settings import read_source
from hacrl.errors import UserError, warn
from hacrl.files import LINE_ADVICE, Kind, Line, each_line, read_lines, read_object
from hacrl.training.records import METRICS, SUMMARY

STEP_FILE = re.compile(r"step-(\d{6}|[1-9]\d{6,})\.jsonl")
UNBEGUN = {".lock", ".config.yaml.partial", ".warmup.yaml.partial"}
"""Files in the folder of a run that was killed before it wrote its config."""


class RunDir:
    """The folder of a run, with its files. records.py describes what they hold."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.progress_file = self.path / "progress.json"
        self.trackers_file = self.path / "trackers.json"
        self.made_folder = False
        """Whether `create` made the folder."""

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Raise UserError unless a new run can be written there. Existing files are never touched."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"output_dir: {path} is a file. Choose another output_dir.")
        if path.is_dir() and {child.name for child in path.iterdir()} - UNBEGUN:
            if (path / "config.yaml").is_file():
                how = f"Continue it with `hacrl train {path} --resume` (in Python: resume=True)"
                raise UserError(f"output_dir: {path} already holds a run. {how}, or choose another output_dir.")
            raise UserError(f"output_dir: {path} is not empty and not a run. Choose another output_dir.")

    @classmethod
    def create(cls, config: RunConfig) -> "RunDir":
        """Make a folder for a new run, with its config."""
        cls.check_free(config.output_dir)
        run = cls(config.output_dir)
        run.made_folder = not run.path.exists()
        make_folder(run.path)
        try:
            (run.path / ".lock").touch()  # before the config: a disk that is full here must not leave half a run
            run.write_config(config)
        except OSError:
            run.remove_start()
            raise
        return run

    def remove_start(self) -> None:
        """Delete the files that a run makes before its first step, and no others."""
        for name in ("config.yaml", "metrics.jsonl", "trackers.json", "progress.json", ".lock"):
            for path in (self.path / name, self.path / f".{name}.partial"):
                path.unlink(missing_ok=True)
        for name in ("tensorboard", "wandb"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        if self.made_folder:
            with suppress(OSError):  # somebody else's files are in it
                self.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """Open the folder of an existing run; UserError if it is not one."""
        run = cls(path)
        if not run.config_file.is_file():
            raise UserError(f"{path} is not a run: it has no config.yaml.")
        return run

    @contextmanager
    def locked(self, otherwise: str = "") -> Iterator[None]:
        """Hold the folder's lock, at most until this process ends; UserError if another process has it."""
        otherwise = otherwise or f"{self.path} is being trained by another process"
        with (self.path / ".lock").open("w") as file:
            for _ in range(4):
                if _lock(file, fcntl.LOCK_EX):
                    break
                time.sleep(0.05)  # `is_locked` of another process holds it for an instant
            else:
                raise UserError(f"{otherwise}. Wait for it, or stop it.")
            yield

    def is_locked(self) -> bool:
        """Whether a process trains this run now."""
        try:
            with (self.path / ".lock").open() as file:
                return not _lock(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def step_file(self, kind: str, step: int) -> Path:
        return self.path / kind / f"step-{step:06d}.jsonl"

    def steps(self, kind: str) -> list[int]:
        """Steps that have a file of this kind, in order; files with other names do not count."""
        names = (STEP_FILE.fullmatch(path.name) for path in (self.path / kind).glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def config(self) -> RunConfig:
        """The resolved config, with this folder as its output_dir, wherever it was written."""
        data = with_current_names(read_source(self.config_file)[0])
        return RunConfig.from_dict({**data, "output_dir": str(self.path)}, str(self.config_file))

    def write_config(self, config: RunConfig) -> None:
        write_atomically(self.config_file, config.to_yaml())

    def summary(self) -> Line | None:
        """What summary.json says (`Summary` in records.py); None if the run is not finished."""
        return read_object(self.summary_file, SUMMARY) if self.summary_file.exists() else None

    def metrics(self) -> list[Line]:
        """The lines of metrics.jsonl; none before the first step."""
        return read_lines(self.metrics_file, METRICS) if self.metrics_file.exists() else []

    def append_metrics(self, line: Line) -> None:
        with naming(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def amend_metrics(self, step: int, more: Line) -> None:
        """Add metrics to the line of the last step."""
        lines = self.metrics()
        last = lines.pop() if lines and lines[-1]["step"] == step else {"step": step}
        write_lines(self.metrics_file, [*lines, last | more])

    def write_step(self, kind: str, step: int, lines: Iterable[Line]) -> None:
        path = self.step_file(kind, step)
        path.parent.mkdir(exist_ok=True)
        write_lines(path, lines)

    def write_summary(self, summary: Line) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Delete what was logged after `step`: those steps are about to be done again."""
        self._rewind_metrics(step)
        for kind in ("rollouts", "trace"):
            for logged in self.steps(kind):
                if logged > step:
                    self.step_file(kind, logged).unlink()
        self.summary_file.unlink(missing_ok=True)

    def _rewind_metrics(self, step: int) -> None:
        kept, last, written = list[str](), -1, self.metrics_file.exists()
        for text, line in each_line(self.metrics_file, METRICS) if written and step >= 0 else ():
            if line["step"] <= step:
                kept.append(text + "\n")
                last = line["step"]
            if line["step"] >= step:  # what follows is not read: a crash may have damaged the end of the file
                break
        if last < step:
            warn(f"{self.metrics_file} has no line of step {step}: the curves of this run have a gap there.")
        if written:
            write_atomically(self.metrics_file, "".join(kept))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to the error of a failed write: Python names only files that cannot be opened."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def make_folder(path: Path, setting: str = "output_dir") -> None:
    """Make a folder and those above it; the error names the setting to change."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}. Choose another {setting}.") from error


def _lock(file: TextIO, kind: int) -> bool:
    """Lock an open file if its lock is free; return whether that worked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def changed_settings(new: BaseModel, old: BaseModel, allowed: Iterable[str] = ()) -> list[str]:
    """Names of settings that differ between two configs, except those in `allowed` and those that change no result."""
    aside = {"output_dir", "sampling_batch_size", *allowed}

    def settings(config: BaseModel) -> dict[str, Any]:
        data = config.model_dump(mode="json")
        task = data.get("task") or {}
        sources = data.get("sources", [])
        endpoints = [source["endpoint"] or {} for source in sources]
        for section in (data, task, *data.get("agents", []), *task.get("mixture", []), *sources, *endpoints):
            for name in aside & section.keys():
                del section[name]
        return data

    then = settings(old)
    return [name for name, now in settings(new).items() if now != then[name]]


def refuse_changes(new: BaseModel, old: BaseModel, folder: str, what: str, allowed: set[str]) -> None:
    """Raise UserError if settings differ that must not change when a run or a warm-up is continued."""
    changed = changed_settings(new, old, allowed)
    if changed:
        places = [place for name in changed for place in _places(new, old, name, allowed)]
        raise UserError(
            f"{folder} was started with another {', '.join(places)}. When {what} is continued, only "
            f"{', '.join(sorted(allowed))} can change. Start anew with another output_dir."
        )


def _places(new: BaseModel, old: BaseModel, name: str, allowed: set[str]) -> list[str]:
    """The settings that differ in a section, as section.setting; or the name of what is no section."""
    now, then = getattr(new, name), getattr(old, name)
    if not isinstance(now, BaseModel) or not isinstance(then, BaseModel):
        return [name]
    return [f"{name}.{place}" for place in changed_settings(now, then, allowed)] or [name]


def to_json(line: dict[str, Any]) -> str:
    """One line of JSON; null stands for a number that is not finite, which JSON cannot express."""
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(line), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path: Path) -> list[Line]:
    """Read the JSON objects of any file that has one per line."""
    return read_lines(path, Kind("a JSON object", {}, LINE_ADVICE))


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    write_atomically(path, "".join(to_json(line) + "\n" for line in lines))


def write_atomically(path: Path, text: str, flush: bool = True) -> None:
    """Replace a file as a whole. Without `flush`, a crash of the machine may lose it."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), aside.open("w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            file.write(text)
            if flush:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    aside.replace(path)
