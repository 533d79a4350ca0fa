"""What a learner writes down while it learns."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Notes:
    """What is written down during one update; an update that runs out of memory starts anew.

    Figures stay on the device until they are asked for: each look at one waits for the GPU.
    """

    def __init__(self) -> None:
        self.figures: defaultdict[str, list[float | Tensor]] = defaultdict(list)
        self.records: defaultdict[str, list[Tensor]] = defaultdict(list)

    def note(self, name: str, value: float | Tensor) -> None:
        self.figures[name].append(value.detach().double() if isinstance(value, Tensor) else value)

    def add(self, other: "Notes") -> None:
        for name, values in other.figures.items():
            self.figures[name] += values
        for name, columns in other.records.items():
            self.records[name] += columns

    def __getstate__(self) -> dict[str, Any]:
        """Another process has another device."""
        figures = {name: self._values(name) for name in self.figures}
        records = {name: [column.cpu() for column in columns] for name, columns in self.records.items()}
        return {"figures": defaultdict(list, figures), "records": defaultdict(list, records)}

    def sum(self, name: str) -> float:
        return sum(self._values(name), 0.0)

    def max(self, name: str) -> float:
        return max(self._values(name))

    def _values(self, name: str) -> list[float]:
        values = self.figures[name]
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = torch.stack(tensors).tolist() if tensors else []
        self.figures[name] = [*(value for value in values if not isinstance(value, Tensor)), *numbers]
        return [float(value) for value in self.figures[name]]
