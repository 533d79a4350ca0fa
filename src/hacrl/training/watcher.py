"""The interface of everything that follows a run while it goes on."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Is told what the run is doing, and the metrics of each step."""

    def on_phase(self, phase: str) -> None: ...
    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...
