"""Imitation: one agent's collection of right answers, and its supervised updates on them."""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Imitation
from hacrl.learners.supervised import Row, SupervisedLearner
from hacrl.learners.updating import Updater
from hacrl.seeding import IMITATE

ALWAYS_SOLVED = 1e-3
"""Added to 1 - m, so that answers to prompts that the learner always solves are drawn, though hardly ever."""


class Imitator:
    """Keeps right answers in the tokens of one agent and, with `restart`, the weights that the run began with."""

    def __init__(self, learner: Updater, options: Imitation, index: int, seed: int) -> None:
        self.learner, self.options, self.index, self.seed = learner, options, index, seed
        self.rows: list[Row] = []
        self.steps: list[int] = []
        """The step in which each answer was sampled."""
        self.logps: list[float] = []
        """The log-probability of each answer when it was sampled, divided by its number of tokens for this agent."""
        self.solved: list[float] = []
        """For each answer, the share of right ones among the learner's own answers to the prompt."""
        self._start: list[Tensor] = []
        if options.restart and options.when in ("middle", "end"):
            self._start = [weight.detach().to("cpu", copy=True) for weight in learner.weights.weights]

    def keep(self, row: Row, step: int, logp_sum: float, solved: float) -> None:
        """Keep a right answer. `logp_sum` is its log-probability under its source."""
        self.rows.append(row)
        self.steps.append(step)
        self.logps.append(logp_sum / len(row.completion))
        self.solved.append(solved)

    def _forget(self, before: int) -> None:
        """Drop the answers of steps earlier than `before`."""
        stay = [place for place, step in enumerate(self.steps) if step >= before]
        self.rows, self.steps = [self.rows[place] for place in stay], [self.steps[place] for place in stay]
        self.logps, self.solved = [self.logps[place] for place in stay], [self.solved[place] for place in stay]

    def imitate(self, step: int, learning_rate: float) -> dict[str, float]:
        """Make supervised updates on the kept answers, and return metrics. `learning_rate` is the agent's."""
        once = self.options.when != "step"
        metrics: dict[str, float] = {"imitation/answers": len(self.rows), "imitation/updates": 0}
        if self.rows and (once or step in self.steps):
            metrics |= self._learn(step, learning_rate, once)
        if not once:
            self._forget(before=step + 2 - self.options.memory)
        elif self.options.when == "middle":  # with `end`, a run that is lengthened imitates all at its new end
            self._forget(before=step + 1)
        return metrics

    def _learn(self, step: int, learning_rate: float, once: bool) -> dict[str, float]:
        if once:
            self._restore_start()
            self.learner.new_optimizer()
        supervised = SupervisedLearner(self.learner)
        batches = self._batches(step)
        done: list[dict[str, float]] = []
        for number, rows in enumerate(batches):
            falling = 1 - number / len(batches) if once else 1.0
            done.append(supervised.update(rows, self.options.rate * learning_rate * falling, step))
        if once:
            self.learner.new_optimizer()
        return {
            "imitation/updates": len(done) - sum(one["nonfinite_updates"] for one in done),
            "imitation/nonfinite_updates": sum(one["nonfinite_updates"] for one in done),
            "imitation/tokens": sum(one["tokens_trained"] for one in done),
            "imitation/loss": float(np.mean([one["loss"] for one in done])),
        }

    def _batches(self, step: int) -> list[list[Row]]:
        """Return the answers of each update, about equally many for each.

        Each pass takes all answers in another order. With `confidence` or `focus`, answers are drawn one by one.
        """
        count, options = len(self.rows), self.options
        added = self.steps.count(step) if options.when == "step" else count
        wanted = max(round(options.epochs * added), 1)
        random = np.random.default_rng((self.seed, IMITATE, step, self.index))
        if options.confidence or options.focus:
            surety = np.exp(options.confidence * (np.array(self.logps) - max(self.logps)))
            weights = surety * (1 - np.array(self.solved) + ALWAYS_SOLVED) ** options.focus
            order = random.choice(count, wanted, p=weights / weights.sum())
        else:
            order = np.concatenate([random.permutation(count) for _ in range(-(-wanted // count))])[:wanted]
        parts = np.array_split(order, max(round(wanted / options.batch_size), 1))
        return [[self.rows[place] for place in part] for part in parts]

    def _restore_start(self) -> None:
        if self._start:
            weights = self.learner.weights
            with torch.no_grad():
                for weight, start in zip(weights.weights, self._start, strict=True):
                    weight.copy_(start)
            weights.publish()

    def state_dict(self) -> dict[str, Any]:
        """The answers as tensors: lengths of prompt and completion in turn, all their tokens, and figures of each."""
        texts = [ids for row in self.rows for ids in (row.prompt, row.completion)]
        return {
            "lengths": _numbers(map(len, texts)),
            "tokens": _numbers(token for ids in texts for token in ids),
            "steps": _numbers(self.steps),
            "logps": torch.tensor(self.logps, dtype=torch.float64),
            "solved": torch.tensor(self.solved, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        tokens, place, texts = state["tokens"].tolist(), 0, []
        for length in state["lengths"].tolist():
            texts.append(tokens[place : place + length])
            place += length
        self.steps, self.logps, self.solved = (state[name].tolist() for name in ("steps", "logps", "solved"))
        self.rows = [Row(prompt, completion) for prompt, completion in zip(texts[::2], texts[1::2], strict=True)]


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.tensor(array("i", values), dtype=torch.int32)
