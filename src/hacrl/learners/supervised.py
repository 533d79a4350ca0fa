"""Supervised updates of a model: the mean negative log-probability of the tokens of written completions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.learners.updating import Updater


@dataclass(frozen=True)
class Row:
    """A prompt and the completion to learn, with its end-of-turn token."""

    prompt: list[int]
    completion: list[int]


class SupervisedLearner:
    """Trains the model of an agent's learner, with its optimizer, on written completions."""

    def __init__(self, learner: Updater) -> None:
        self.learner, self.policy = learner, learner.policy

    def update(self, rows: Sequence[Row], learning_rate: float, step: int) -> dict[str, float]:
        """Make one optimizer update; skip and count it if it is not finite."""
        learner = self.learner
        learner.set_learning_rate(learning_rate)
        tokens = sum(len(row.completion) for row in rows)

        def loss_of(batch: list[Row]) -> tuple[Tensor, Tensor]:
            loss = self._nll(batch) / tokens
            return loss, loss.detach()

        with self.policy.driven():
            for attempt in learner.attempts(step):
                with attempt:
                    loss = float(torch.stack(learner.add_gradients(self._batches(rows), loss_of)).sum())
        norm = learner.ranks.norm(learner.weights.gradients)
        metrics = {"loss": loss, "grad_norm": float(norm), "learning_rate": learning_rate, "tokens_trained": tokens}
        made = learner.apply(norm, math.isfinite(loss), step)
        return {**metrics, "nonfinite_updates": 0 if made else 1}

    def loss(self, rows: Sequence[Row]) -> float:
        """Mean negative log-probability of the tokens of rows, without learning from them."""

        def work(batch: list[Row], counts: bool) -> float:
            with torch.no_grad():
                return float(self._nll(batch)) if counts else 0.0

        with self.policy.driven():
            total = sum(self.learner.passes(self._batches(rows), work))
        return total / sum(len(row.completion) for row in rows)

    def _nll(self, batch: Sequence[Row]) -> Tensor:
        """Negative log-probability, summed over the tokens of the completions."""
        scored = self.policy.score([row.prompt for row in batch], [row.completion for row in batch], 1.0)
        return -(scored.logp_NT.double() * scored.mask_NT).sum()

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Divide rows into batches, one for each pass, with rows of similar length together."""
        ordered = sorted(rows, key=lambda row: (len(row.completion), row.prompt))
        return self.learner.split(ordered, [len(row.prompt) + len(row.completion) for row in ordered])
