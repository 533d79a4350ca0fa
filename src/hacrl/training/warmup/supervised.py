"""Updates of one agent from written completions: the mean negative log-probability of their tokens."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.agents.agent import Agent
from hacrl.agents.learning import MAX_NONFINITE_IN_A_ROW
from hacrl.decoder.parallel import side_by_side
from hacrl.errors import TrainingDiverged, warn
from hacrl.training.warmup.rows import Row


class SupervisedLearner:
    """Drives the model and the optimizer of an agent's learner with another objective."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.learner = agent, agent.learner
        self.weights, self.policy = agent.weights, agent.learner.policy

    def update(self, rows: Sequence[Row], learning_rate: float, step: int) -> dict[str, float]:
        """One optimizer update; left out and counted if it is not finite."""
        learner, weights = self.learner, self.weights
        for group in learner.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = sum(len(row.completion) for row in rows)
        while True:
            weights.zero_grad()
            try:
                with self.policy.driven():
                    loss = self._add_gradients(rows, tokens)
                break
            except torch.OutOfMemoryError as error:
                done = learner.make_batches_smaller()
                if done is None:
                    raise
                del error  # and with it what its frames hold
                self.policy.free_memory()
                warn(f"Agent {learner.config.id}: out of memory in step {step}; {done}.")
        norm = nn.utils.get_total_norm(weights.gradients)
        metrics = {"loss": loss, "grad_norm": float(norm), "learning_rate": learning_rate, "tokens_trained": tokens}
        if not (math.isfinite(loss) and math.isfinite(metrics["grad_norm"])):
            self._reject_update(step)
            return {**metrics, "nonfinite_updates": 1}
        nn.utils.clip_grads_with_norm_(weights.weights, learner.config.max_grad_norm, norm)
        learner.optimizer.step()
        weights.publish()
        learner.nonfinite_in_a_row = 0
        learner.updates += 1
        return {**metrics, "nonfinite_updates": 0}

    def loss(self, rows: Sequence[Row]) -> float:
        """Of rows that are not learned from."""

        def work(batch: list[Row]) -> float:
            with torch.no_grad():
                return float(self._nll(batch))

        with self.policy.driven():
            total = sum(side_by_side(work, list(self._batches(rows)), self.policy.workers))
        return total / sum(len(row.completion) for row in rows)

    def _add_gradients(self, rows: Sequence[Row], tokens: int) -> float:
        """Leave the gradient of the mean in the weights; the mean itself."""
        weights, workers = self.weights, self.policy.workers

        def work(batch: list[Row]) -> tuple[Tensor, tuple[Tensor, ...] | None]:
            """One pass. Workers side by side must not add to the same tensors, nor in an order of chance."""
            loss = self._nll(batch) / tokens
            if workers == 1:
                loss.backward()
                weights.collect()
                return loss.detach(), None
            return loss.detach(), torch.autograd.grad(loss, weights.working, allow_unused=True, materialize_grads=True)

        losses = []
        for loss, gradients in side_by_side(work, list(self._batches(rows)), workers):
            losses.append(loss)
            if gradients is not None:
                working: Any = [parameter.grad for parameter in weights.working]
                torch._foreach_add_(working, gradients)
                weights.collect()
        return float(torch.stack(losses).sum())

    def _nll(self, batch: Sequence[Row]) -> Tensor:
        """Sum over the tokens of the completions."""
        scored = self.policy.score([row.prompt for row in batch], [row.completion for row in batch], 1.0)
        return -(scored.logp_NT.double() * scored.mask_NT).sum()

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The rows of one pass each, those of like length together."""
        learner = self.learner
        ordered = sorted(rows, key=lambda row: (len(row.completion), row.prompt))
        if learner.micro_batch_size is not None:
            size = learner.micro_batch_size
            yield from (ordered[start : start + size] for start in range(0, len(ordered), size))
            return
        if not learner.batch_tokens:
            learner.batch_tokens = self.policy.choose_batch_tokens()
        # As few batches as memory allows, of about the same size, and as many for each worker.
        total = sum(len(row.prompt) + len(row.completion) for row in rows)
        passes, workers = -(-total // learner.batch_tokens), self.policy.workers
        count = -(-passes // workers) * workers
        batch: list[Row] = []
        tokens = 0.0
        for row in ordered:
            batch.append(row)
            tokens += len(row.prompt) + len(row.completion)
            if tokens >= total / count:
                yield batch
                batch, tokens = [], tokens - total / count
        if batch:
            yield batch

    def _reject_update(self, step: int) -> None:
        learner = self.learner
        self.weights.zero_grad()
        learner.nonfinite_in_a_row += 1
        if learner.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise TrainingDiverged(
                f"Agent {learner.config.id}: {MAX_NONFINITE_IN_A_ROW} updates in a row had a loss or gradient that "
                f"is not finite, the last one in step {step}."
            )
