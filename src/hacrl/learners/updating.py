"""Updates of a model, for any objective: passes that fit into memory, gradients added up, an optimizer step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hacrl.config import AgentConfig
from hacrl.decoder.parallel import side_by_side
from hacrl.decoder.policy import Policy
from hacrl.errors import TrainingDiverged, UserError, lack_of_memory, warn
from hacrl.learners.parts import EXACT
from hacrl.learners.ranks import ALONE, Batch, Ranks
from hacrl.learners.weights import Weights

MAX_NONFINITE_IN_A_ROW = 3

Item = TypeVar("Item")
Result = TypeVar("Result")


class Updater:
    """The weights of one agent with their optimizer. It learns from items, which are rollouts or written rows."""

    def __init__(self, config: AgentConfig, weights: Weights, policy: Policy, ranks: Ranks = ALONE) -> None:
        self.config, self.weights, self.policy, self.ranks = config, weights, policy, ranks
        self.micro_batch_size = config.micro_batch_size
        self.batch_tokens = 0
        """Tokens in one forward and backward pass if `micro_batch_size` is not set; chosen in the first step."""
        self.largest = (0, 0)
        """The most rows, and the most tokens, in a pass since the last attempt began."""
        self.device = weights.working[0].device
        self.new_optimizer()
        self.updates = self.nonfinite_in_a_row = 0

    def new_optimizer(self) -> None:
        """Start with a new optimizer, without memory of earlier updates."""
        config, weights = self.config, self.weights.weights
        on_cuda, betas = weights[0].device.type == "cuda", (config.adam_beta1, config.adam_beta2)
        options: dict[str, Any] = {"betas": betas, "eps": config.adam_epsilon, "weight_decay": config.weight_decay}
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, fused=on_cuda, **options)
            return
        needs = f"agents.{config.id}.optimizer: adamw_8bit needs"
        try:
            import bitsandbytes
        except ImportError:
            raise UserError(f"{needs} the package bitsandbytes: pip install 'hacrl[8bit]'.") from None
        if not on_cuda:
            raise UserError(f"{needs} a GPU (CUDA). Use adamw on a CPU.")
        self.optimizer = bitsandbytes.optim.AdamW8bit(weights, lr=config.learning_rate, **options)

    def _reserved(self) -> int:
        """Bytes that the first update takes besides activations: gradients, moments, and a copy of a part."""
        config, count = self.config, sum(weight.numel() for weight in self.weights.weights)
        if config.optimizer_offload:
            return 0
        moments = 2 if config.optimizer == "adamw_8bit" else 8
        gradients = 0 if self.weights.gradients else 4
        return count * (moments + gradients + (4 if count <= EXACT else 0))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the agent learns. Outside, gradients take no memory; with `offload_idle`, the optimizer's
        states and float32 weights are in the computer's memory."""
        self._move(self.device)
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Free what only learning needs."""
        self.weights.release_gradients()
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if not self.config.offload_idle:
            return
        self.weights.move(device)
        for state in self.optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def split(self, ordered: Sequence[Item], tokens: Sequence[int]) -> Iterator[list[Item]]:
        """Divide items into batches, one for each pass. `tokens` is what each adds to a pass with those before it."""
        if not self.batch_tokens:  # this also decides whether activations are kept
            self.batch_tokens = min(self.ranks.gather([self.policy.choose_batch_tokens(self._reserved())]))
        batches = self._batches(ordered, tokens)
        place = 0
        for batch in batches:
            taken = sum(tokens[place : place + len(batch)])
            self.largest = max(self.largest[0], len(batch)), max(self.largest[1], taken)
            place += len(batch)
            yield batch

    def _batches(self, ordered: Sequence[Item], tokens: Sequence[int]) -> Iterator[list[Item]]:
        size = self.micro_batch_size
        if size is not None:
            yield from (list(ordered[start : start + size]) for start in range(0, len(ordered), size))
            return
        # As few batches as memory allows, of about the same size, and equally many for each worker.
        total, workers = sum(tokens), self.policy.workers
        count = -(-total // (self.batch_tokens * workers)) * workers
        batch: list[Item] = []
        taken = 0.0
        for item, own in zip(ordered, tokens, strict=True):
            batch.append(item)
            taken += own
            if taken >= total / count:
                yield batch
                batch, taken = [], taken - total / count
        if batch:
            yield batch

    def passes(self, batches: Iterable[Batch], work: Callable[[Batch, bool], Result]) -> list[Result]:
        """Work on one batch after the other. If the agent has several processes, each takes its share of each batch,
        and all of them get all results; `work` is told whether its share counts.
        """
        shares = [self.ranks.share(batch) for batch in batches]
        return self.ranks.gather(side_by_side(work, shares, self.policy.workers))

    def add_gradients(
        self, batches: Iterable[Batch], loss_of: Callable[[Batch], tuple[Tensor, Result]]
    ) -> list[Result]:
        """Add the gradient of each batch's loss; return what `loss_of` returns besides the loss."""
        weights, workers = self.weights, self.policy.workers  # a worker itself would see one thread

        def work(batch: Batch, counts: bool) -> tuple[Result | None, tuple[Tensor, ...] | None]:
            loss, said = loss_of(batch)
            if counts and workers > 1:  # parallel workers must not add to the same tensors, nor in a random order
                return said, torch.autograd.grad(loss, weights.working, allow_unused=True, materialize_grads=True)
            (loss if counts else 0 * loss).backward()
            weights.collect()
            return (said if counts else None), None

        results = []
        for said, gradients in self.passes(batches, work):
            if said is not None:
                results.append(said)
            if gradients is not None:
                weights.add(gradients)
        return results

    def attempts(self, step: int, learns: bool = True) -> Iterator[AbstractContextManager[None]]:
        """Repeat a block until it fits into memory, with smaller batches each time. Gradients are set to 0 before each,
        if the block learns.

        for attempt in self.attempts(step):
            with attempt: ...
        """
        while True:
            if learns:
                self.weights.zero_grad()
            self.largest = 0, 0
            remedies: list[str] = []
            yield self._attempt(step, remedies)
            if not remedies:
                return
            # Only here, after the block, the error is gone, and with it the memory that its frames held.
            self.policy.free_memory()
            warn(f"Agent {self.config.id}: out of memory in step {step}; {remedies[0]}.")

    @contextmanager
    def _attempt(self, step: int, remedies: list[str]) -> Iterator[None]:
        """After running out of memory, make passes smaller if they can be, and add to `remedies` what was done."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.ranks.size > 1:  # the other ranks are in the middle of the pass
                raise
            (rows, tokens), size = self.largest, self.micro_batch_size
            if rows > 1 and size is not None:
                self.micro_batch_size = min(size, rows) // 2
                remedies.append(f"micro_batch_size is now {self.micro_batch_size}")
            elif rows > 1:
                self.batch_tokens = max(min(self.batch_tokens, tokens) // 2, 1)
                remedies.append(f"a pass now takes {self.batch_tokens} tokens")
            elif self.policy.recompute():
                remedies.append("activations are now computed again in the backward pass (gradient_checkpointing)")
            else:
                raise torch.OutOfMemoryError(
                    f"Agent {self.config.id}, step {step}: out of memory in a pass of a single row of {tokens} tokens, "
                    f"with its prompt: {error}"
                ) from error

    def apply(self, norm: Tensor, finite: bool, step: int) -> bool:
        """Make an optimizer step with the current gradients, whose norm is given; skip it if anything is not finite."""
        if not (finite and bool(torch.isfinite(norm))):
            self.weights.zero_grad()
            self.nonfinite_in_a_row += 1
            if self.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
                what = "updates in a row had a loss or gradient that is not finite, the last one in step"
                raise TrainingDiverged(f"Agent {self.config.id}: {MAX_NONFINITE_IN_A_ROW} {what} {step}.")
            return False
        for weights in self.weights.portions():
            nn.utils.clip_grads_with_norm_(weights, self.config.max_grad_norm, norm)
            self.optimizer.step()
        self.weights.publish()
        self.nonfinite_in_a_row = 0
        self.updates += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        counts = {"updates": self.updates, "nonfinite_in_a_row": self.nonfinite_in_a_row}
        return {"optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates, self.nonfinite_in_a_row = state["updates"], state["nonfinite_in_a_row"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:  # an open file, because then a full disk is an OSError
        torch.save(state, file)


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a file with the `state_dict` of an `Updater`; UserError if the file holds anything else."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        if not {"optimizer", "updates", "nonfinite_in_a_row"} <= state.keys():
            raise ValueError("it is not the state of an agent")
    except Exception as error:  # what torch raises depends on where a file is damaged
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and lack_of_memory(error)):
            raise
        reason = " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__
        advice = "Delete its checkpoint: the one before it is used then."
        raise UserError(f"{path} cannot be used: {reason}. {advice}") from error
    return state
