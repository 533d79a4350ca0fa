"""What a person sees while a run goes on: a calm table in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hacrl.config import RunConfig


class Progress:
    def __init__(self, config: RunConfig, console: Console, title: str | None = None) -> None:
        self.config, self.console = config, console
        self.title = title or f"{config.algorithm.name} · {config.output_dir}"
        self.phase = "loading"
        self.step = 0
        self.metrics: dict[str, Any] = {}
        self.accuracy: dict[str, tuple[float, float]] = {}
        """Held-out accuracy of each agent: the first and the latest."""
        self.started: tuple[int, float] | None = None
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def on_phase(self, phase: str) -> None:
        self.phase = phase
        self._refresh()

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        if self.started is None:
            self.started = (step, time.monotonic())
        self.step, self.metrics = step, {**self.metrics, **metrics}
        for agent in self.config.agents:
            latest = metrics.get(f"{agent.id}/eval_accuracy")
            if latest is not None:
                first, _ = self.accuracy.get(agent.id, (latest, latest))
                self.accuracy[agent.id] = (first, latest)
        if self.live:
            self._refresh()
        else:
            self.console.print(self._line(), highlight=False, soft_wrap=True)

    def time_left(self) -> str:
        if self.started is None or self.step <= self.started[0]:
            return "–"
        first, since = self.started
        per_step = (time.monotonic() - since) / (self.step - first)
        return duration(per_step * (self.config.max_steps - self.step))

    def _refresh(self) -> None:
        if self.live:
            self.live.update(self._table(), refresh=True)

    def _line(self) -> str:
        parts = [f"step {self.step}/{self.config.max_steps}"]
        for agent in self.config.agents:
            cells = {name: text for name, text in self._cells(agent.id).items() if text != "–"}
            parts.append(f"{agent.id}: " + " ".join(f"{name} {text}" for name, text in cells.items()))
        return " | ".join([*parts, f"left {self.time_left()}"])

    def _table(self) -> Table:
        caption = f"step {self.step}/{self.config.max_steps} · {self.phase} · time left {self.time_left()}"
        table = Table(title=Text(self.title), caption=caption, title_justify="left", caption_justify="left")
        table.add_column("agent")
        rows = [self._cells(agent.id) for agent in self.config.agents]
        for name in rows[0]:
            table.add_column(name, justify="right")
        for agent, row in zip(self.config.agents, rows, strict=True):
            table.add_row(Text(agent.id), *row.values())
        return table

    def _cells(self, agent: str) -> dict[str, str]:
        values = {name.removeprefix(f"{agent}/"): v for name, v in self.metrics.items() if name.startswith(f"{agent}/")}
        first, latest = self.accuracy.get(agent, (None, None))
        cells = {
            "reward": number(values.get("reward")),
            "accuracy": "–" if first is None else f"{first:.3f}→{latest:.3f}",
            "length": number(values.get("completions/mean_length"), ".1f"),
        }
        if self.config.algorithm.shares_rollouts and len(self.config.agents) > 1:
            sources = [other.id for other in self.config.agents if other.id != agent]
            for name, key in (("s", "ratio_mean"), ("kept", "kept")):
                found = [values.get(f"from_{source}/{key}") for source in sources]
                known = [value for value in found if value is not None]
                cells[name] = number(sum(known) / len(known) if known else None, ".2f")
        if any(self.metrics.get(f"{other.id}/unverified") for other in self.config.agents):
            cells["unverified"] = number(values.get("unverified"), ".0f")
        return cells


def number(value: float | None, spec: str = ".3f") -> str:
    return "–" if value is None else f"{value:{spec}}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
