"""Supervised updates of a model on written completions, and imitation: such updates on right answers of a run."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Imitation
from hacrl.errors import warn
from hacrl.learners.updating import Updater
from hacrl.seeding import IMITATE
from hacrl.signs import doing

ALWAYS_SOLVED = 1e-3
"""Added to 1 - m, so that answers to prompts that the learner always solves are drawn, though hardly ever."""
FULL_RATE_FROM = 100
"""An imitation at the middle or end of a run has its full rate if it makes at least this many updates; with fewer, the
rate is lower in proportion. The first updates of a new optimizer are rough, and a few of them at the full rate do harm.
"""


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
        learner, tokens = self.learner, sum(len(row.completion) for row in rows)
        learner.set_learning_rate(learning_rate)

        def loss_of(batch: list[Row]) -> tuple[Tensor, Tensor]:
            loss = self._nll(batch) / tokens
            return loss, loss.detach()

        with self.policy.driven():
            for attempt in learner.attempts(step):
                with attempt:
                    loss = float(torch.stack(learner.add_gradients(self._batches(rows), loss_of)).sum())
        norm = learner.ranks.norm(learner.weights.gradients)
        metrics = {"loss": loss, "grad_norm": float(norm), "learning_rate": learning_rate, "tokens_trained": tokens}
        return {**metrics, "nonfinite_updates": 0 if learner.apply(norm, math.isfinite(loss), step) else 1}

    def loss(self, rows: Sequence[Row], step: int) -> float:
        """Mean negative log-probability of the tokens of rows, without learning from them."""

        def work(batch: list[Row], counts: bool) -> float:
            with torch.no_grad():
                return float(self._nll(batch)) if counts else 0.0

        with self.policy.driven():
            for attempt in self.learner.attempts(step, learns=False):
                with attempt:
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


class Answer(NamedTuple):
    """A right answer that is kept."""

    row: Row
    step: int
    """The step in which it was sampled."""
    logp: float
    """Its log-probability when it was sampled, divided by its number of tokens for this agent; NaN: not known."""
    solved: float
    """The share of right ones among the learner's own answers to the prompt."""


class Imitator:
    """Keeps right answers in the tokens of one agent and, with `restart`, the weights that the run began with."""

    def __init__(self, learner: Updater, options: Imitation, index: int, seed: int) -> None:
        self.learner, self.options, self.index, self.seed = learner, options, index, seed
        self.answers: list[Answer] = []
        restarts = options.restart and options.when in ("middle", "end")
        self._start = [weight.detach().to("cpu", copy=True) for weight in learner.weights.weights if restarts]

    def keep(self, row: Row, step: int, logp_sum: float | None, solved: float) -> None:
        """Keep a right answer. `logp_sum` is its log-probability under its source, if that recorded it."""
        logp = math.nan if logp_sum is None else logp_sum / len(row.completion)
        self.answers.append(Answer(row, step, logp, solved))

    def imitate(self, step: int, learning_rate: float) -> dict[str, float]:
        """Make supervised updates on the kept answers, and return metrics. `learning_rate` is the agent's."""
        when = self.options.when
        metrics: dict[str, float] = {"imitation/answers": len(self.answers), "imitation/updates": 0}
        if self.answers and (when != "step" or any(answer.step == step for answer in self.answers)):
            metrics |= self._learn(step, learning_rate, once=when != "step")
        elif when != "step":
            warn(
                f"Agent {self.learner.config.id}: nothing to imitate, because no answer that was not cut off has had a "
                f"reward of at least {self.options.min_reward:g} (algorithm.imitation.min_reward)."
            )
        if when != "end":  # a run that is lengthened imitates all at its new end
            oldest = step + 2 - self.options.memory if when == "step" else step + 1
            self.answers = [answer for answer in self.answers if answer.step >= oldest]
        return metrics

    def _learn(self, step: int, learning_rate: float, once: bool) -> dict[str, float]:
        if once:
            if self._start:
                with torch.no_grad():
                    torch._foreach_copy_(list[Tensor](self.learner.weights.weights), self._start)
                self.learner.weights.publish()
            self.learner.new_optimizer()
        supervised, batches, done = SupervisedLearner(self.learner), self._batches(step), []
        with doing(f"{self.learner.config.id} imitates right answers", len(batches)) as activity:
            for number, rows in enumerate(batches):
                falling = min(len(batches) / FULL_RATE_FROM, 1) * (1 - number / len(batches)) if once else 1.0
                done.append(supervised.update(rows, self.options.rate * learning_rate * falling, step))
                activity.done += 1
        if once:
            self.learner.new_optimizer()
        skipped = sum(one["nonfinite_updates"] for one in done)
        return {
            "imitation/updates": len(done) - skipped,
            "imitation/nonfinite_updates": skipped,
            "imitation/tokens": sum(one["tokens_trained"] for one in done),
            "imitation/loss": float(np.mean([one["loss"] for one in done])),
        }

    def _batches(self, step: int) -> list[list[Row]]:
        """Return the answers of each update, about equally many for each.

        Each pass takes all answers in another order. With `confidence` or `focus`, answers are drawn one by one; an
        answer without log-probabilities is as likely to be drawn as the average of the others.
        """
        answers, count, options = self.answers, len(self.answers), self.options
        added = sum(answer.step == step for answer in answers) if options.when == "step" else count
        wanted = max(round(options.epochs * added), 1)
        random = np.random.default_rng((self.seed, IMITATE, step, self.index))
        if options.confidence or options.focus:
            logps = np.array([answer.logp for answer in answers])
            known = ~np.isnan(logps)
            surety = np.ones(count)
            if known.any():
                surety[known] = np.exp(options.confidence * (logps[known] - logps[known].max()))
                surety[~known] = surety[known].mean()
            weights = surety * (1 - np.array([answer.solved for answer in answers]) + ALWAYS_SOLVED) ** options.focus
            order = random.choice(count, wanted, p=weights / weights.sum())
        else:
            order = np.concatenate([random.permutation(count) for _ in range(-(-wanted // count))])[:wanted]
        parts = np.array_split(order, max(round(wanted / options.batch_size), 1))
        return [[answers[place].row for place in part] for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """The answers as tensors: lengths of prompt and completion in turn, all their tokens, and figures of each."""
        texts = [ids for answer in self.answers for ids in (answer.row.prompt, answer.row.completion)]
        return {
            "lengths": _numbers(map(len, texts)),
            "tokens": _numbers(token for ids in texts for token in ids),
            "steps": _numbers(answer.step for answer in self.answers),
            "logps": torch.tensor([answer.logp for answer in self.answers], dtype=torch.float64),
            "solved": torch.tensor([answer.solved for answer in self.answers], dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        texts = [ids.tolist() for ids in state["tokens"].split(state["lengths"].tolist())]
        rows = [Row(prompt, completion) for prompt, completion in zip(texts[::2], texts[1::2], strict=True)]
        figures = (state[name].tolist() for name in ("steps", "logps", "solved"))
        self.answers = list(map(Answer, rows, *figures))


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.tensor(array("i", values), dtype=torch.int32)
