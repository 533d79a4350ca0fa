"""What a person sees while a run goes on: a table in a terminal, a line for each step elsewhere.

`View` is what is known of a run and how it looks; `hacrl train` and `hacrl watch` both show it.
"""

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, Self

from rich.console import Console, ConsoleOptions
from rich.text import Text

from hacrl.algorithms import Explanation
from hacrl.config import RunConfig
from hacrl.live.browse import shortened
from hacrl.live.notebook import NotebookTable
from hacrl.signs import Display, clock, doing, going_on
from hacrl.terminal import bar
from hacrl.training.records import ProgressState
from hacrl.training.run_dir import write_atomically

COLUMNS = {"reward": 6, "accuracy": 13, "length": 6, "s": 5, "kept": 4, "tok/s": 6, "phase": 10}
"""Widths of the columns, fixed so that nothing moves when numbers change."""
DISPENSABLE = ("phase", "tok/s", "length", "kept", "s", "reward")
"""Columns that a narrow terminal leaves out, in this order."""
UNANSWERED = ("failed", "late", "skipped", "over_budget")
"""Metrics of a teacher behind an address that count requests without a usable answer."""
GAP = "  "
RECENT = 20
"""How many of the last steps the time left is estimated from."""
PUBLISH_SECONDS = 1.0
SHORT_PHASE = 5
"""Seconds after which a phase shows how long it has taken."""


class View:
    """What is known of a run, which Rich can show as the live table."""

    def __init__(self, config: RunConfig, title: str | None = None) -> None:
        self.config = config
        explanation = config.algorithm.explain(len(config.names))
        self.leaves_out = explanation.leaves_out is not None or explanation == Explanation()
        """Whether `kept` is shown: it is always 1 where the algorithm says that it leaves out no foreign rollouts."""
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
        """Seconds that the last checkpoint took."""
        self.warning: str | None = None
        self.unverified = ""
        self.unanswered = ""
        self._counts = {"unverified": Counter[str](), "unanswered": Counter[str]()}
        """Rollouts without a verdict, and requests without a usable answer, of each agent and source so far."""
        self._plain: deque[float] = deque(maxlen=RECENT)
        """Seconds of the recent steps, without evaluation unless every step has one."""
        self._evaluation = 0.0
        """Seconds that the last evaluation took."""

    def add(self, metrics: dict[str, Any]) -> None:
        """Take in the next line of metrics.jsonl."""
        self.step, self.metrics = metrics["step"], metrics
        for agent in self.config.agents:
            latest = metrics.get(f"{agent.id}/eval_accuracy")
            if latest is not None:
                first, _ = self.accuracy.get(agent.id, (latest, latest))
                self.accuracy[agent.id] = (first, latest)
        for name in self.config.names:
            self._counts["unverified"][name] += metrics.get(f"{name}/unverified") or 0
            lost = known_values(metrics, [f"{name}/{way}" for way in UNANSWERED])
            self._counts["unanswered"][name] += int(sum(lost))
        self.unverified = self._so_far("unverified", "rollouts without a verdict")
        self.unanswered = self._so_far("unanswered", "requests without a usable answer")
        self._time(metrics)

    def _so_far(self, count: str, what: str) -> str:
        counts = [f"{name} {count:,}" for name, count in self._counts[count].items() if count]
        return f"{what} so far: {', '.join(counts)}" if counts else ""

    def _time(self, metrics: dict[str, Any]) -> None:
        known = known_values(metrics, [f"{agent.id}/time/eval" for agent in self.config.agents])
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
        """Seconds for the steps, evaluations and checkpoints still to come; None while nothing is known."""
        if self.step >= self.config.max_steps:
            return 0.0
        if not self._plain:
            return None
        seconds = (self.config.max_steps - self.step) * fmean(self._plain)
        if self.config.eval_every != 1:
            seconds += self._due(self.config.eval_every) * self._evaluation
        return seconds + self._due(self.config.save_every, at_the_end=self.config.save_final) * self.save_seconds

    def _due(self, every: int, *, at_the_end: bool = True) -> int:
        """How often something is still to come that is done every so many steps, and perhaps at the last."""
        before_last = (self.config.max_steps - 1) // every - self.step // every if every else 0
        return before_last + at_the_end

    # --- how it looks ------------------------------------------------------------------------------

    def line(self) -> str:
        """The latest step as a line for logs."""
        parts = [f"step {self.step}/{self.config.max_steps}"]
        for source in self.config.names:
            cells = {name: text for name, text in self.cells(source).items() if text not in ("–", "")}
            if cells:
                parts.append(f"{source}: " + " ".join(f"{name} {text}" for name, text in cells.items()))
        return " | ".join([*parts, f"left {self.left}"])

    def cells(self, agent: str) -> dict[str, str]:
        """The latest figures of an agent, or of another source, by column."""

        def cell(name: str, decimals: int, *keys: str) -> str:
            known = known_values(self.metrics, [f"{agent}/{key}" for key in keys])
            return fit(sum(known) / len(known) if known else None, COLUMNS[name], decimals)

        first, latest = self.accuracy.get(agent, (None, None))
        cells = {
            "reward": cell("reward", 3, "reward"),
            "accuracy": "–" if first is None else f"{fit(first, 5, 3)} → {fit(latest, 5, 3)}",
            "length": cell("length", 1, "completions/mean_length"),
        }
        others = [source for source in self.config.names if source != agent]
        if self.config.algorithm.shares_rollouts and others:
            cells["s"] = cell("s", 2, *(f"from_{other}/ratio_mean" for other in others))
            if self.leaves_out:
                cells["kept"] = cell("kept", 2, *(f"from_{other}/kept" for other in others))
        cells["tok/s"] = cell("tok/s", 0, "time/tokens_per_second")
        cells["phase"] = self.phase if agent in self.busy else ""
        return cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(options.max_width):
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def lines(self, width: int) -> list[Text]:
        """The table at this width: columns that do not fit are left out, nothing wraps."""
        rows = {source: self.cells(source) for source in self.config.names}
        names, head = list(next(iter(rows.values()))), "source" if self.config.sources else "agent"
        id_width = min(max(map(len, [*rows, head])), max(width // 4, 10))
        total = id_width + sum(len(GAP) + COLUMNS[name] for name in names)
        for name in DISPENSABLE:
            if total > width and name in names:
                names.remove(name)
                total -= len(GAP) + COLUMNS[name]

        def row(first: str, cells: dict[str, str]) -> str:
            shown = first if len(first) <= id_width else first[: id_width - 1] + "…"
            # Words stand to the left, numbers to the right.
            aligned = [cells[n].ljust(COLUMNS[n]) if n == "phase" else cells[n].rjust(COLUMNS[n]) for n in names]
            return GAP.join([shown.ljust(id_width), *aligned])

        rule = Text("─" * total, style="dim")
        lines = [Text(self.title, style="bold"), Text(row(head, {name: name for name in names}), style="dim"), rule]
        lines += [*(Text(row(agent, cells)) for agent, cells in rows.items()), rule, self._foot(total)]
        lines += [Text(lost, style="yellow") for lost in (self.unverified, self.unanswered) if lost]
        if self.warning:
            lines.append(Text.assemble(("last warning: ", "yellow"), self.warning))
        return lines

    def _foot(self, width: int) -> Text:
        """The line below the table: step, bar, phase and time left."""
        last = self.config.max_steps
        parts = [f"step {self.step:>{len(str(last))}}/{last}", f"{self._phase():<17}", f"time left {self.left:<12}"]
        if len(GAP.join(parts)) > width:
            del parts[1]
        room = width - len(GAP.join(parts)) - len(GAP)
        if room < 6:
            return Text(GAP.join(parts).rstrip())
        return Text(GAP).join([Text(parts[0]), bar(room, self.step, last), *map(Text, parts[1:])])

    def _phase(self) -> str:
        seconds = int(time.time() - self.since)
        if seconds < SHORT_PHASE or not self.phase:
            return self.phase
        return f"{self.phase} {clock(seconds)}"


class Progress:
    """Shows a run while this process trains it, and publishes its phase for `hacrl watch`."""

    def __init__(self, config: RunConfig, console: Console, title: str | None = None) -> None:
        self.view = View(config, title)
        notebook = NotebookTable(lambda: self.view.lines(console.width))
        self.display = Display(
            console,
            self.view.lines,
            self._line,
            self._publish,
            (lambda: notebook) if console.is_jupyter and not console.quiet else None,
        )
        self._notes = _Notes(self)
        self._file: Path | None = None
        self._lock = Lock()
        self._published: tuple[ProgressState | None, float] = None, 0.0
        """What was published last, and when."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        logger = logging.getLogger("hacrl")
        self._notes.alone = not logger.hasHandlers()
        logger.addHandler(self._notes)
        self._stack.callback(logger.removeHandler, self._notes)
        self._activity = self._stack.enter_context(doing(self.view.phase))
        self._stack.enter_context(self.display)
        return self

    def __exit__(self, error: type[BaseException] | None, *details: Any) -> None:
        if error is None:
            self.view.phase = ""
        self._stack.__exit__(error, *details)

    @contextmanager
    def published(self, file: Path) -> Iterator[None]:
        """While this lasts, the phase can be read from the file."""
        self._file = file
        try:
            yield
        finally:
            with self._lock:
                self._file = None
                file.unlink(missing_ok=True)

    def recall(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take in what a run that is continued had logged before."""
        for metrics in lines:
            self.view.add(metrics)

    def on_phase(self, phase: str) -> None:
        view = self.view
        if view.phase == "saving":
            view.save_seconds = time.time() - view.since
        view.busy.clear()
        view.phase, view.since = phase, time.time()
        self._activity.begin(phase)

    def on_agent(self, agent: str, busy: bool) -> None:
        """An agent starts or ends its part of the phase; called from the thread it works in."""
        (self.view.busy.add if busy else self.view.busy.discard)(agent)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self.view.add(metrics)
        if not self.display.draws:
            self.display.say(self.view.line())

    def _line(self) -> str:
        """What goes on, for a log."""
        busy = ", ".join(sorted(self.view.busy))
        parts = [f"{self.view.step}/{self.view.config.max_steps} steps done", going_on()]
        return " | ".join([*parts, f"at work: {busy}"] if busy else parts)

    def _publish(self) -> None:
        """Write down what has changed, at most once a second."""
        view, (published, written) = self.view, self._published
        state: ProgressState = {
            "step": view.step,
            "phase": view.phase,
            "since": view.since,
            "agents": sorted(view.busy),
            "save_seconds": view.save_seconds,
            "warning": view.warning,
        }
        with self._lock:
            if self._file is None or state == published or time.monotonic() - written < PUBLISH_SECONDS:
                return
            # Nobody needs it after a crash, and a full disk is reported by what does matter.
            with suppress(OSError):
                write_atomically(self._file, json.dumps(state) + "\n", flush=False)
        self._published = state, time.monotonic()


class _Notes(logging.Handler):
    """Remembers the last warning, and prints warnings if no other handler does: above the table if there is one."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self.progress = progress
        self.alone = False

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.view.warning = shortened(" ".join(record.getMessage().split())).plain
        if self.alone and logging.lastResort:
            logging.lastResort.handle(record)


def known_values(metrics: dict[str, Any], names: Iterable[str]) -> list[float]:
    """The values of those metrics that have one."""
    return [value for name in names if (value := metrics.get(name)) is not None]


def fit(value: float | None, width: int, decimals: int) -> str:
    """A number in at most so many characters, with fewer decimals if it is large."""
    if value is None or not math.isfinite(value):
        return "–"
    texts = [f"{value:.{places}f}" for places in range(decimals, -1, -1)]
    power = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return next((text for text in [*texts, power] if len(text) <= width), "…")


def duration(seconds: float) -> str:
    """Seconds in words: 2 h 01 min, 1 min 05 s, 7 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def wall_seconds(summary: dict[str, Any]) -> float:
    """Seconds that a run has taken in all; in summaries of earlier versions, those of its steps."""
    return float(summary.get("wall_seconds") or summary["seconds"] or 0)
