"""Figures and records that a learner collects while it learns."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Sequences, Terms

RATIO_MEAN, RATIO_CLIPPED = (f"sampling/importance_sampling_ratio/{what}" for what in ("mean", "clipped"))
"""Names of metrics: the factors that correct for the sampler, and the share of ratios beyond their bounds."""


class Notes:
    """Figures and records of one update. An update that runs out of memory starts with new ones.

    Figures stay on the device until they are read, because reading one waits for the GPU.
    """

    def __init__(self) -> None:
        self.figures: defaultdict[str, list[float | Tensor]] = defaultdict(list)
        self.records: defaultdict[str, list[Tensor]] = defaultdict(list)

    def note(self, **figures: float | Tensor) -> None:
        for name, value in figures.items():
            self.figures[name].append(value.detach().double() if isinstance(value, Tensor) else value)

    def add(self, *others: "Notes") -> None:
        for other in others:
            for name, values in other.figures.items():
                self.figures[name] += values
            for name, columns in other.records.items():
                self.records[name] += columns

    def __getstate__(self) -> dict[str, Any]:
        """Move everything to the CPU, because another process has another device."""
        figures = {name: self._values(name) for name in self.figures}
        records = {name: [column.cpu() for column in columns] for name, columns in self.records.items()}
        return {"figures": defaultdict(list, figures), "records": defaultdict(list, records)}

    def sum(self, name: str) -> float:
        return sum(self._values(name), 0.0)

    def _values(self, name: str) -> list[float]:
        values = self.figures[name]
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = torch.stack(tensors).tolist() if tensors else []
        self.figures[name] = [*(value for value in values if not isinstance(value, Tensor)), *numbers]
        return [float(value) for value in self.figures[name]]

    def record(self, row_N: Tensor, update: int, sequences: Sequences, terms: Terms, weight_N: Tensor) -> None:
        """Record one entry for each rollout of a pass: the columns of a trace."""
        columns = {
            "row": row_N,
            "update": torch.full((len(row_N),), update),
            "num_tokens": sequences.length_N,
            "logp_sum": sequences.logp_N,
            "log_ratio": terms.log_ratio_N,
            "lower": terms.lower_N,
            "upper": terms.upper_N,
            "kept": terms.kept_N,
            "advantage": sequences.mean_advantage_N,
            "omega": sequences.omega_N,
            "weight": terms.weight_N,
            "objective": terms.objective_N,
            "mean_weight": weight_N,
        }
        for name, column in columns.items():
            self.records[name].append(column.detach())

    def kept_rows(self) -> list[int]:
        """The rows of recorded rollouts that have a gradient."""
        columns = zip(self.records["row"], self.records["kept"], strict=True)
        return [row for row_N, kept_N in columns for row in row_N[kept_N.cpu()].tolist()]

    def logprob_gap(self) -> dict[str, float]:
        """How far the sampler's log-probabilities are from the learner's; empty if nothing was compared."""
        if not self.sum("gap_tokens"):
            return {}
        return {
            "logprob_gap": self.sum("gap") / self.sum("gap_tokens"),
            "logprob_gap_max": max(self._values("gap_max")),
            "logprob_gap_clipped": self.sum("gap_clipped") / self.sum("gap_rollouts"),
        }


class StepNotes:
    """Notes of one step: those of all its updates, and figures of each update."""

    def __init__(self, stale: bool) -> None:
        self.stale = stale
        """Whether the learner has made updates since it sampled its own rollouts."""
        self.made = self.nonfinite = 0
        self.objectives: list[float] = []
        """Objective of each update made so far."""
        self.notes = Notes()
        self._gradients: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def first(self) -> bool:
        """Whether the weights are still those at the start of the step."""
        return self.made == 0 and self.nonfinite == 0

    def note_update(self, objective: float, total: float, parts: dict[str, float]) -> None:
        """Note an update: norms of the gradient, of its own and its foreign part, and the angle between them."""
        self.objectives.append(objective)
        self.made += 1
        self._gradients["grad_norm"].append(total)
        for name, norm in parts.items():
            self._gradients[f"grad_norm_{name}"].append(norm)
        if len(parts) == 2 and min(parts.values()) > 0:
            own, foreign = parts["own"], parts["foreign"]
            cosine = (total**2 - own**2 - foreign**2) / (2 * own * foreign)  # |a + b|^2 = |a|^2 + |b|^2 + 2 a b
            self._gradients["grad_cosine"].append(min(max(cosine, -1.0), 1.0))

    def metrics(self) -> dict[str, float]:
        notes = self.notes
        metrics = {
            "updates": self.made,
            "nonfinite_updates": self.nonfinite,
            "tokens_trained": notes.sum("tokens"),
            "tokens_forward": notes.sum("forward"),
            "loss": -float(np.mean(self.objectives)) if self.objectives else math.nan if self.nonfinite else 0.0,
        }
        counts = {"entropy": "entropy_tokens", "kl": "kl_rollouts"}
        counts |= dict.fromkeys((RATIO_MEAN, RATIO_CLIPPED), "ratios")
        metrics |= {name: notes.sum(name) / notes.sum(count) for name, count in counts.items() if notes.sum(count)}
        metrics |= {name: float(np.mean(values)) for name, values in self._gradients.items()}
        return metrics | notes.logprob_gap()
