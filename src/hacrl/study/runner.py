"""Starts the runs of a study, several at once, each in a process of its own."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hacrl.config import RunConfig
from hacrl.config.study import StudyConfig
from hacrl.errors import OUT_OF_MEMORY, UserError
from hacrl.files import parse_lines, read_bytes
from hacrl.live.progress import duration
from hacrl.processes import Child, how_it_ended
from hacrl.signs import Activity, Display, doing
from hacrl.study.grid import Run, Study
from hacrl.study.results import collect, read_gpu_seconds, write_results
from hacrl.terminal import bar, decimals, say
from hacrl.training.records import METRICS
from hacrl.training.run_dir import RunDir, changed_settings, make_folder, write_atomically

RUNS_PER_GPU = 4
RETRIES = 3
"""How many times a run is tried again after it ran out of memory beside others."""
LAST_LINES = 8
"""How many lines of a failed run's log are shown."""
BAR = 30
"""Characters of a bar in a terminal."""
TAIL = 1 << 16
"""How many bytes are read from the end of a log or of metrics."""


@dataclass(frozen=True)
class Places:
    """How many runs go on at once, and on which GPUs."""

    jobs: int
    """Runs at once."""
    threads: int
    """Threads of each run."""
    gpus: list[str]
    """GPUs as CUDA_VISIBLE_DEVICES names them; each run sees one of them. If empty, all runs see all GPUs."""

    def of(self, job: int) -> int:
        """Position of the GPU that a job runs on; 0 where there are none to choose from."""
        return job % max(len(self.gpus), 1)


@dataclass
class RunProcess:
    """The process of a run."""

    run: Run
    pid: int
    job: int
    log: Path
    log_start: int
    """Where in the log this attempt begins."""
    start: float
    first_step: int
    at_once: int = 1
    """The most runs that shared its GPU, or this machine, at a time."""
    share: float = 0.0
    """GPU time of the run in seconds: if n runs share a GPU for a second, each gets 1/n."""

    def last_lines(self) -> str:
        """The end of what this attempt has printed."""
        text = read_bytes(self.log, self.log_start)[-TAIL:].decode("utf-8", "replace")
        return "\n".join([line for line in text.split("\n") if line.strip()][-LAST_LINES:])


# --- before --------------------------------------------------------------------------------------------------------


def choose_places(study: Study, jobs: int | None) -> Places:
    """How many runs fit at once, with a number of threads that does not depend on how many run at once."""
    configs = [run.config for run in study.runs]
    devices = {agent.device for config in configs for agent in config.agents}
    gpus = visible_gpus() if devices != {"cpu"} else []
    on_cluster = any(config.execution == "ray" and config.ray.address is not None for config in configs)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = jobs or study.config.jobs
    if on_cluster or (gpus and any(needs_all_gpus(config) for config in configs)):
        return Places(wanted or 1, study.config.threads or cores, [])
    if not gpus:
        threads = study.config.threads or max(cores // len(study.runs), 1)
        return Places(wanted or max(cores // threads, 1), threads, [])
    most = wanted or RUNS_PER_GPU * len(gpus)
    return Places(most, study.config.threads or max(cores // most, 1), gpus)


def needs_all_gpus(config: RunConfig) -> bool:
    """Whether a run has to see every GPU: its config or Ray places the agents, or an agent takes several."""
    on_one = all(agent.fsdp == 1 and not agent.device.startswith("cuda:") for agent in config.agents)
    return config.execution == "ray" or not on_one


def visible_gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    # CUDA stops reading at the first name of a GPU that does not exist.
    return named[:count] or [str(index) for index in range(count)]


def with_earlier_threads(config: StudyConfig) -> StudyConfig:
    """Keep the number of threads of a study that is continued; UserError if the folder is not this study's."""
    folder = config.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir: {folder} is a file. Choose another --output-dir.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return config
    if not (folder / "study.yaml").is_file():
        raise UserError(f"output_dir: {folder} is not empty and not a study. Choose another --output-dir.")
    earlier = StudyConfig.load(folder)
    if earlier.name != config.name:
        raise UserError(f"{folder} holds the study {earlier.name}, not {config.name}. Choose another --output-dir.")
    if config.threads is None:
        return config.model_copy(update={"threads": earlier.threads})
    if earlier.threads != config.threads and any(folder.glob("runs/*/*/*/config.yaml")):
        raise UserError(
            f"{folder} was started with threads={earlier.threads}. Results belong to one number of threads: "
            "leave it so, or choose another --output-dir."
        )
    return config


def check_unchanged(study: Study) -> None:
    """Raise UserError if a run that was started is not in the grid, or has other settings there."""
    grid = {run.folder.path: run for run in study.runs}
    for file in sorted(study.folder.glob("runs/*/*/*/config.yaml")):
        place = f"{study.folder} was made by another study"
        advice = "A grid can grow, but runs that were started stay as they are. Choose another --output-dir."
        run = grid.get(file.parent)
        if run is None:
            raise UserError(f"{place}: the run {file.parent.relative_to(study.folder / 'runs')} is not in it. {advice}")
        changed = changed_settings(run.config, run.folder.config())
        if changed:
            raise UserError(f"{place}: {run.name} was started with another {', '.join(changed)}. {advice}")


# --- the runs ------------------------------------------------------------------------------------------------------


def run_study(study: Study, places: Places, console: Console) -> dict[str, Any]:
    """Do all runs that are not done yet, and return the results; KeyboardInterrupt after the children have ended."""
    make_folder(study.folder, "--output-dir")
    with RunDir(study.folder).locked():
        check_unchanged(study)
        config = study.config.model_copy(update={"threads": places.threads})
        write_atomically(study.folder / "study.yaml", config.to_yaml())
        runner = Runner(study, places, console)
        try:
            with runner.view.shown():
                runner.go()
        finally:
            runner.stop()
            results = runner.write()
    return results


class Runner:
    """Starts runs while there is room, watches them, and writes the results."""

    def __init__(self, study: Study, places: Places, console: Console) -> None:
        self.study, self.places = study, places
        self.room = Counter(places.of(job) for job in range(places.jobs))
        """How many runs each GPU may have at once; fewer after they ran out of memory."""
        self.retries: Counter[str] = Counter()
        self.waiting = [run for run in study.runs if run.summary is None]
        self.children: list[RunProcess] = []
        self.starter: Child | None = None
        """The process that forks the runs; see child.py."""
        self.errors: dict[str, str] = {}
        """The last lines of each run that failed."""
        self.gpu_seconds = read_gpu_seconds(study)
        self.looked = time.monotonic()
        self.view = StudyProgress(study, console, len(study.runs) - len(self.waiting))
        self.busy = 0.0
        """Seconds of the runs that ended since the study was called."""
        self.work = 0.0
        """Work done by the runs in `busy`, in the unit of `Run.cost`."""

    def go(self) -> None:
        """Start runs and watch them until all have ended."""
        self.write()
        while self.waiting or self.children:
            while self.waiting and (job := self.free_job()) is not None:
                self.children.append(self.start(self.waiting.pop(0), job))
            self.share_time()
            codes = self.starter.ask(None) if self.starter else {}
            for child in [child for child in self.children if child.pid in codes]:
                self.end(child, codes[child.pid])
            steps = self.last_steps()
            self.view.show([child.run for child in self.children], steps, self.time_left(steps))
            if not codes:
                time.sleep(0.25)

    def last_steps(self) -> dict[str, int]:
        """The last step of each run in progress. A run that was interrupted begins at its last checkpoint."""
        steps = {child.run.name: last_step(child.run) for child in self.children}
        for child in self.children:
            child.first_step = min(child.first_step, steps[child.run.name])
        return steps

    def share_time(self) -> None:
        """Divide the time since the last look among the runs that share a GPU."""
        before, self.looked = self.looked, time.monotonic()
        crowd = self.crowd()
        for child in self.children:
            at_once = crowd[self.places.of(child.job)]
            child.at_once = max(child.at_once, at_once)
            child.share += (self.looked - max(before, child.start)) / at_once

    def crowd(self) -> Counter[int]:
        """How many runs are in progress on each GPU."""
        return Counter(self.places.of(child.job) for child in self.children)

    def free_job(self) -> int | None:
        """The number of a free job for the next run; None while there is no room."""
        crowd, taken = self.crowd(), {child.job for child in self.children}
        free = (job for job in range(self.places.jobs) if job not in taken)
        return next((job for job in free if crowd[self.places.of(job)] < self.room[self.places.of(job)]), None)

    def start(self, run: Run, job: int) -> RunProcess:
        log = self.study.folder / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if run.started:
            arguments = [str(run.folder.path), "--resume"]
        else:
            write_atomically(log.with_suffix(".yaml"), run.config.to_yaml())
            arguments = [str(log.with_suffix(".yaml"))]
        gpu = {"CUDA_VISIBLE_DEVICES": self.places.gpus[self.places.of(job)]} if self.places.gpus else {}
        position = log.stat().st_size if log.exists() else 0
        if self.starter is None:
            self.starter = Child("hacrl.study.child", str(self.study.folder), threads=self.places.threads)
        pid = self.starter.ask((arguments, gpu, log))
        return RunProcess(run, pid, job, log, position, time.monotonic(), last_step(run))

    def end(self, child: RunProcess, code: int) -> None:
        self.close(child)
        starved = code == OUT_OF_MEMORY and child.at_once > 1
        if starved and self.retries[child.run.name] < RETRIES:
            self.retry(child)
            return
        run, seconds = child.run, time.monotonic() - child.start
        if code == 0 and run.summary is not None:
            self.busy += seconds
            self.work += run.cost * (1 - child.first_step / run.config.max_steps)
        else:
            self.errors[run.name] = child.last_lines() or f"The process {how_it_ended(code)} and printed nothing."
        self.view.ended(run, seconds, self.errors.get(run.name), self.write())

    def retry(self, child: RunProcess) -> None:
        """Try a run again later, beside fewer others."""
        place, name = self.places.of(child.job), child.run.name
        self.room[place] = min(self.room[place], child.at_once - 1)
        self.retries[name] += 1
        self.waiting.append(child.run)
        self.write()
        where = f"on GPU {self.places.gpus[place]}" if self.places.gpus else "here"
        reason = " ".join(child.last_lines().splitlines()[-1:])
        say(
            self.view.console,
            f"{name} ran out of memory as one of {child.at_once} at once. It is tried again later; from now on "
            f"{where} there are at most {self.room[place]} at once. {reason}",
        )

    def write(self) -> dict[str, Any]:
        running = {child.run.name for child in self.children}
        results = collect(self.study, running, self.errors, self.gpu_seconds)
        write_results(self.study, results)
        return results

    def close(self, child: RunProcess) -> None:
        self.children.remove(child)
        if self.places.gpus:
            name = child.run.name
            self.gpu_seconds[name] = self.gpu_seconds.get(name, 0.0) + child.share

    def stop(self) -> None:
        """End all children, first with SIGINT, then by force. A second Ctrl-C does not leave them behind."""
        if self.starter is not None:
            try:
                self.starter.connection.close()
                self.starter.wait()  # it ends its runs within a grace period
            finally:
                self.starter.end()
        for child in list(self.children):
            self.close(child)

    def time_left(self, steps: dict[str, int]) -> float | None:
        """Estimate the seconds until all runs are done from what was done since the study was called; None at first."""
        busy, work = self.busy, self.work
        left = float(sum(run.cost for run in self.waiting))
        for child in self.children:
            share = (steps[child.run.name] - child.first_step) / child.run.config.max_steps
            busy += time.monotonic() - child.start
            work += max(share, 0.0) * child.run.cost
            left += (1 - steps[child.run.name] / child.run.config.max_steps) * child.run.cost
        side_by_side = min(self.room.total(), len(self.waiting) + len(self.children))
        return left * busy / work / side_by_side if work > 0 and side_by_side else None


def last_step(run: Run) -> int:
    """The newest step in the run's metrics; 0 where there is none."""
    file = run.folder.metrics_file
    try:
        newest = read_bytes(file, -TAIL).split(b"\n")[-2:-1]  # after it comes what is being written
        ((_, last),) = parse_lines(b"\n".join([*newest, b""]), file, METRICS)
    except (FileNotFoundError, UserError, ValueError):  # not there, longer than what was read, or damaged
        return 0
    return int(last["step"])


# --- what a person sees --------------------------------------------------------------------------------------------


class StudyProgress:
    """Shows progress: a line for each run that goes on in a terminal, one line for all of them elsewhere."""

    def __init__(self, study: Study, console: Console, done: int) -> None:
        self.console, self.total, self.done, self.left = console, len(study.runs), done, "–"
        self.steps: dict[str, tuple[int, int]] = {}
        """Steps done and in all of each run that goes on."""
        self.width = max(len(run.name) for run in study.runs)
        self.activity = Activity("study")
        if done:
            say(console, f"{done} of {self.total} runs are done already.")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show progress while this lasts."""
        with doing("study", self.total) as self.activity, Display(self.console, self.lines):
            yield

    def show(self, running: list[Run], steps: dict[str, int], left: float | None) -> None:
        self.left = "–" if left is None else duration(left)
        self.steps = {run.name: (steps[run.name], run.config.max_steps) for run in running}
        at = ", ".join(f"{name} {done}/{total} steps" for name, (done, total) in self.steps.items())
        self.activity.done, self.activity.note = self.done, at

    def lines(self, width: int) -> list[Text]:
        counts = {"runs": (self.done, self.total), **self.steps}
        own = [f"{name:<{self.width}}  {done:>4}/{total:<4}" for name, (done, total) in counts.items()]
        room = max(min(width - len(own[0]) - 2, BAR), 0)
        bars = [bar(room, *count) for count in counts.values()]
        lines = [Text.assemble(text, "  ", shown) for text, shown in zip(own, bars, strict=True)]
        lines[0].append(f"  time left {self.left}")
        return lines

    def ended(self, run: Run, seconds: float, error: str | None, results: dict[str, Any]) -> None:
        self.done = sum(row["status"] == "done" for row in results["runs"])
        summary = run.summary
        if error is not None or summary is None:
            lines = [f"    {line}" for line in (error or "").splitlines()]
            say(self.console, f"{run.name} failed after {duration(seconds)}:", *lines)
            return
        finals = [(name, agent.get(results["metric"])) for name, agent in summary["agents"].items()]
        accuracies = ", ".join(f"{name} {decimals(value)}" for name, value in finals)
        say(self.console, f"{self.done}/{self.total} {run.name}: {accuracies} ({duration(seconds)}), left {self.left}")
