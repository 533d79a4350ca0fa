"""`hacrl watch`: the live table of a run that another process trains, from the run's files."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live

from hacrl.errors import UserError
from hacrl.files import parse_lines, read_bytes, read_object
from hacrl.live.progress import View, duration, wall_seconds
from hacrl.terminal import say
from hacrl.training.records import METRICS, PROGRESS
from hacrl.training.run_dir import RunDir

POLL_SECONDS = 1.0

State = Literal["running", "finished", "interrupted", "not started"]


def watch(console: Console, run_path: Path, once: bool) -> None:
    """Show a run until it ends, or only once: if asked to, or if the output is no terminal."""
    follower = Follower(RunDir.open(run_path))
    state = follower.read()
    if state == "running" and not once and console.is_interactive:
        live = Live(follower, console=console, auto_refresh=False, transient=True)
        with suppress(KeyboardInterrupt), live:
            while state == "running":
                live.refresh()
                time.sleep(POLL_SECONDS)
                state = follower.read()
    if state != "not started":
        console.print(follower.view)
    say(console, follower.sentence(state))


class Follower:
    """Reads what a run has written since the last look, for the live table."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._start()

    def _start(self) -> None:
        self.view = View(self.run.config())
        self.view.phase = ""
        self._config_changed = self.run.config_file.stat().st_mtime_ns
        self._file, self._offset, self._lines = 0, 0, 0

    def __rich__(self) -> View:
        return self.view

    def read(self) -> State:
        """Take in what is new, and return the state of the run."""
        # The lock is looked at first: if nobody holds it, what is read afterwards is final.
        held = self.run.is_locked()
        if self.run.config_file.stat().st_mtime_ns != self._config_changed:
            self._start()  # continued with other settings
        self._read_metrics()
        self._read_progress()
        if held:
            return "running"
        self.view.phase, self.view.busy = "", set()
        if self.run.summary() is not None:
            return "finished"
        return "interrupted" if self._offset else "not started"

    def _read_metrics(self) -> None:
        path = self.run.metrics_file
        if not path.exists():
            return
        file_number = path.stat().st_ino
        if self._offset and file_number != self._file:
            self._start()  # a run that is continued has a new file, without the steps that are done again
        self._file = file_number
        whole, end, _ = read_bytes(path, self._offset).rpartition(b"\n")  # the last line may be half written
        for _, line in parse_lines(whole + end, path, METRICS, self._lines + 1):
            self.view.add(line)
        self._lines += (whole + end).count(b"\n")
        self._offset += len(whole + end)

    def _read_progress(self) -> None:
        view = self.view
        with suppress(FileNotFoundError):
            try:
                state = read_object(self.run.progress_file, PROGRESS)
            except UserError:  # a run that goes on writes the file again
                view.warning = f"{self.run.progress_file.name} is damaged: what the run does just now is not known."
                return
            view.phase, view.since, view.busy = state["phase"], state["since"], set(state["agents"])
            view.save_seconds, view.warning = state["save_seconds"], state["warning"]

    def sentence(self, state: State) -> str:
        """How far the run is, and what can be done with it."""
        path, step, last = self.run.path, self.view.step, self.view.config.max_steps
        resume = f"`hacrl train {path} --resume`"
        match state:
            case "running":
                return f"{path} is running: {step} of {last} steps done."
            case "interrupted":
                return f"{path} was interrupted after step {step} of {last}. Continue it with {resume}."
            case "not started":
                return f"{path} has not started: nothing is logged and no process trains it. Start it with {resume}."
        summary = self.run.summary() or {}
        return f"{path} is finished: {summary['steps']} steps in {duration(wall_seconds(summary))}."
