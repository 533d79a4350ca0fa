"""What a person sees while a run goes on: a calm table in a terminal, plain lines elsewhere.

`View` is what is known of a run and how it looks; `hacrl train` and `hacrl watch` both show it.
"""

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from hacrl.algorithms import Explanation
from hacrl.config import RunConfig
from hacrl.live.browse import shortened

COLUMNS = {"reward": 6, "accuracy": 13, "length": 6, "s": 5, "kept": 4, "tok/s": 6, "phase": 10}
"""Widths: fixed, so that nothing moves when numbers change."""
DISPENSABLE = ("phase", "tok/s", "length", "kept", "s", "reward")
"""What a narrow terminal does without, in this order."""
GAP = "  "
RECENT = 20
"""Steps that the time left is judged by."""
REFRESH_SECONDS = 0.25
PUBLISH_SECONDS = 1.0
SHORT_PHASE = 10
"""Seconds after which a phase shows how long it has taken."""


class View:
    """What is known of a run. Rich renders it as the live table."""

    def __init__(self, config: RunConfig, title: str | None = None) -> None:
        self.config = config
        explanation = config.algorithm.explain(len(config.agents))
        self.leaves_out = explanation.leaves_out is not None or explanation == Explanation()
        """Whether some foreign rollouts may be left out, or nobody says so: else `kept` is always 1, and not shown."""
        self.title = title or f"{config.algorithm.name} · {config.output_dir}"
        self.step = 0
        self.metrics: dict[str, Any] = {}
        """The latest line of metrics.jsonl."""
        self.accuracy: dict[str, tuple[float, float]] = {}
        """Held-out accuracy of each agent: the first and the latest."""
        self.left = "–"
        self.phase = "loading"
        self.since = time.time()
        self.busy: set[str] = set()
        """Agents at work in this phase."""
        self.save_seconds = 0.0
        """What the last checkpoint took."""
        self.warning: str | None = None
        self.unverified = ""
        self._unverified: Counter[str] = Counter()
        self._plain: deque[float] = deque(maxlen=RECENT)
        """Seconds of the recent steps, evaluation left out where it can be told apart."""
        self._evaluation = 0.0
        """What the last evaluation took."""

    def add(self, metrics: dict[str, Any]) -> None:
        """The next line of metrics.jsonl."""
        self.step, self.metrics = metrics["step"], metrics
        for agent in self.config.agents:
            latest = metrics.get(f"{agent.id}/eval_accuracy")
            if latest is not None:
                first, _ = self.accuracy.get(agent.id, (latest, latest))
                self.accuracy[agent.id] = (first, latest)
            self._unverified[agent.id] += metrics.get(f"{agent.id}/unverified") or 0
        if self._unverified.total():
            counts = [f"{agent} {count:,}" for agent, count in self._unverified.items() if count]
            self.unverified = f"rollouts without a verdict so far: {', '.join(counts)}"
        self._time(metrics)

    def _time(self, metrics: dict[str, Any]) -> None:
        evaluations = [metrics.get(f"{agent.id}/time/eval") for agent in self.config.agents]
        known = [seconds for seconds in evaluations if seconds is not None]
        seconds = metrics.get("step_time")
        if seconds is None:  # step 0, which is evaluation alone
            self._evaluation = max(known, default=0.0)
        elif not known or self.config.eval_every == 1:
            self._plain.append(seconds)
        elif self._plain:
            self._evaluation = max(seconds - fmean(self._plain), 0.0)
        left = self.seconds_left()
        self.left = "–" if left is None else duration(left)

    def seconds_left(self) -> float | None:
        """By the recent steps, with the evaluations and checkpoints still to come; None while nothing is known."""
        if self.step >= self.config.max_steps:
            return 0.0
        if not self._plain:
            return None
        seconds = (self.config.max_steps - self.step) * fmean(self._plain)
        if self.config.eval_every != 1:
            seconds += self._due(self.config.eval_every) * self._evaluation
        return seconds + self._due(self.config.save_every, at_the_end=self.config.save_final) * self.save_seconds

    def _due(self, every: int, *, at_the_end: bool = True) -> int:
        """How often something will be done that is done every so many steps, and perhaps at the last."""
        before_last = (self.config.max_steps - 1) // every - self.step // every if every else 0
        return before_last + at_the_end

    # --- how it looks ------------------------------------------------------------------------------

    def line(self) -> str:
        """The latest step as a plain line."""
        parts = [f"step {self.step}/{self.config.max_steps}"]
        for agent in self.config.agents:
            cells = {name: text for name, text in self.cells(agent.id).items() if text not in ("–", "")}
            parts.append(f"{agent.id}: " + " ".join(f"{name} {text}" for name, text in cells.items()))
        return " | ".join([*parts, f"left {self.left}"])

    def cells(self, agent: str) -> dict[str, str]:
        values = {name.removeprefix(f"{agent}/"): v for name, v in self.metrics.items() if name.startswith(f"{agent}/")}
        first, latest = self.accuracy.get(agent, (None, None))
        cells = {
            "reward": fit(values.get("reward"), 6, 3),
            "accuracy": "–" if first is None else f"{fit(first, 5, 3)} → {fit(latest, 5, 3)}",
            "length": fit(values.get("completions/mean_length"), 6, 1),
        }
        if self.config.algorithm.shares_rollouts and len(self.config.agents) > 1:
            sources = [other.id for other in self.config.agents if other.id != agent]
            for name, key in (("s", "ratio_mean"), *([("kept", "kept")] if self.leaves_out else [])):
                found = [values.get(f"from_{source}/{key}") for source in sources]
                known = [value for value in found if value is not None]
                cells[name] = fit(sum(known) / len(known) if known else None, COLUMNS[name], 2)
        cells["tok/s"] = fit(values.get("time/tokens_per_second"), 6, 0)
        cells["phase"] = self.phase if agent in self.busy else ""
        return cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def lines(self, width: int) -> list[Text]:
        """The table in so many columns: what does not fit is left out, nothing wraps."""
        rows = {agent.id: self.cells(agent.id) for agent in self.config.agents}
        names = list(next(iter(rows.values())))
        id_width = min(max(map(len, [*rows, "agent"])), max(width // 4, 10))
        for name in DISPENSABLE:
            if id_width + sum(len(GAP) + COLUMNS[name] for name in names) > width and name in names:
                names.remove(name)
        total = id_width + sum(len(GAP) + COLUMNS[name] for name in names)

        def row(first: str, cells: dict[str, str]) -> str:
            shown = first if len(first) <= id_width else first[: id_width - 1] + "…"
            # Words stand to the left, numbers to the right.
            aligned = [cells[n].ljust(COLUMNS[n]) if n == "phase" else cells[n].rjust(COLUMNS[n]) for n in names]
            return GAP.join([shown.ljust(id_width), *aligned])

        lines = [Text(self.title, style="bold"), Text(row("agent", {name: name for name in names}), style="dim")]
        lines.append(Text("─" * total, style="dim"))
        lines += [Text(row(agent, cells)) for agent, cells in rows.items()]
        lines += [Text("─" * total, style="dim"), self._foot(total)]
        if self.unverified:
            lines.append(Text(self.unverified, style="yellow"))
        if self.warning:
            lines.append(Text.assemble(("last warning: ", "yellow"), self.warning))
        return lines

    def _foot(self, width: int) -> Text:
        last = self.config.max_steps
        parts = [f"step {self.step:>{len(str(last))}}/{last}", f"{self._phase():<17}", f"time left {self.left:<12}"]
        if len(GAP.join(parts)) > width:
            del parts[1]
        room = width - len(GAP.join(parts)) - len(GAP)
        if room < 6:
            return Text(GAP.join(parts).rstrip())
        done = min(room, room * self.step // last)
        bar = Text.assemble(("━" * done, "green"), ("╌" * (room - done), "dim"))
        return Text(GAP).join([Text(parts[0]), bar, *map(Text, parts[1:])])

    def _phase(self) -> str:
        seconds = int(time.time() - self.since)
        if seconds < SHORT_PHASE or not self.phase:
            return self.phase
        return f"{self.phase} {seconds // 60}:{seconds % 60:02d}"


class Progress:
    """Shows a run while this process trains it, and publishes its phase for `hacrl watch`."""

    def __init__(self, config: RunConfig, console: Console, title: str | None = None) -> None:
        self.view, self.console = View(config, title), console
        self.live = (
            Live(self.view, console=console, auto_refresh=False, transient=True) if console.is_interactive else None
        )
        self._notes = _Notes(self)
        self._file: Path | None = None
        self._lock = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        logger = logging.getLogger("hacrl")
        self._notes.alone = not logger.hasHandlers()
        logger.addHandler(self._notes)
        if self.live:
            self.live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self.live:
            self.live.transient = kind is None  # what a run came to before it failed stays
            self.live.stop()
        logging.getLogger("hacrl").removeHandler(self._notes)

    @contextmanager
    def published(self, file: Path) -> Iterator[None]:
        """Meanwhile the phase can be read from this file."""
        self._file = file
        try:
            yield
        finally:
            with self._lock:
                self._file = None
                for path in (file, aside_of(file)):
                    path.unlink(missing_ok=True)

    def recall(self, lines: Iterable[dict[str, Any]]) -> None:
        """What a run that is continued had logged before."""
        for metrics in lines:
            self.view.add(metrics)

    def on_phase(self, phase: str) -> None:
        view = self.view
        if view.phase == "saving":
            view.save_seconds = time.time() - view.since
        view.busy.clear()
        view.phase, view.since = phase, time.time()

    def on_agent(self, agent: str, busy: bool) -> None:
        """An agent starts or ends its part of the phase; called from the thread it works in."""
        (self.view.busy.add if busy else self.view.busy.discard)(agent)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self.view.add(metrics)
        if not self.live:
            self.console.print(Text(self.view.line()), soft_wrap=True)

    def _follow(self) -> None:
        """Redraw what has changed, a few times a second whatever the steps take."""
        shown: list[Text] = []
        published: dict[str, Any] = {}
        written = 0.0
        while not self._ended.wait(REFRESH_SECONDS):
            if self.live:
                lines = self.view.lines(self.console.width)
                if lines != shown:
                    shown = lines
                    self.live.refresh()
            state = self._state()
            if state != published and time.monotonic() - written >= PUBLISH_SECONDS and self._publish(state):
                published, written = state, time.monotonic()

    def _state(self) -> dict[str, Any]:
        view = self.view
        return {
            "step": view.step,
            "phase": view.phase,
            "since": view.since,
            "agents": sorted(view.busy),
            "save_seconds": view.save_seconds,
            "warning": view.warning,
        }

    def _publish(self, state: dict[str, Any]) -> bool:
        with self._lock:
            if self._file is None:
                return False
            # Not flushed to disk, unlike the run's other files: nobody needs it after a crash. And a disk that is
            # full is told by what does matter.
            with suppress(OSError):
                aside = aside_of(self._file)
                aside.write_text(json.dumps(state) + "\n", encoding="utf-8")
                aside.replace(self._file)
        return True


def aside_of(file: Path) -> Path:
    """Where a file is written before it gets its name."""
    return file.with_name(f".{file.name}.partial")


class _Notes(logging.Handler):
    """Remembers the last warning; and prints warnings if nobody else does, above the table if there is one."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self.progress = progress
        self.alone = False

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.view.warning = shortened(" ".join(record.getMessage().split())).plain
        if self.alone and logging.lastResort:
            logging.lastResort.handle(record)


def fit(value: float | None, width: int, decimals: int) -> str:
    """A number in at most so many characters, with fewer decimals if it is large."""
    if value is None or not math.isfinite(value):
        return "–"
    texts = [f"{value:.{places}f}" for places in range(decimals, -1, -1)]
    power = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return next((text for text in [*texts, power] if len(text) <= width), "…")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
