"""Whoever looks at a run while it goes on."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Told what the run does, and the metrics of each step."""

    def on_phase(self, phase: str) -> None: ...
    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...
