"""How a learner turns rollouts into updates of its model."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hacrl.agents.logprobs import completion_logprobs
from hacrl.algorithms import Algorithm, Sequences, Terms, k3_kl
from hacrl.config import AgentConfig
from hacrl.errors import TrainingDiverged, UserError
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Prompt

MAX_NONFINITE_IN_A_ROW = 3
MAX_CLIPPED_BEFORE_UPDATE = 0.05


@dataclass
class Lesson:
    """What one learner gets for one step: N valid rollouts and what they are worth to it."""

    step: int
    prompts: list[Prompt]
    rollouts: list[Rollout]
    advantage_N: Tensor
    omega_N: Tensor
    minibatches: list[list[int]]
    """Prompt positions, a list for each update, one pass after the other."""
    learning_rate: float


@dataclass
class LearnResult:
    """What happened: one record for each rollout and update, and figures of the step."""

    records: dict[str, np.ndarray]
    metrics: dict[str, float]
    dropped: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How many rollouts of which source could not be used, for which reason."""


class Learner:
    """The trained model of one agent with its optimizer, and the starting model it is compared with."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        algorithm: Algorithm,
        model: nn.Module,
        reference: nn.Module | None,
        pad_id: int,
    ) -> None:
        self.config, self.index, self.algorithm, self.pad_id = config, index, algorithm, pad_id
        self.model, self.reference = model, reference
        self.autocast = config.dtype == "bfloat16"
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        )
        self.updates = 0
        self.nonfinite_in_a_row = 0

    def learn(self, lesson: Lesson, prompts: list[list[int]], tokens: dict[int, list[int]]) -> LearnResult:
        """An optimizer update for each mini-batch. `tokens` holds the completions this learner can use."""
        for group in self.optimizer.param_groups:
            group["lr"] = lesson.learning_rate
        work = LearningStep(self, lesson, prompts, tokens)
        for minibatch in lesson.minibatches:
            chosen = set(minibatch)
            rows = [row for row in tokens if lesson.rollouts[row].prompt_index in chosen]
            if rows:
                work.update(rows)
        return LearnResult(work.records(), work.metrics())

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]


class LearningStep:
    """One learner's updates in one step, and the notes taken on the way."""

    def __init__(
        self, learner: Learner, lesson: Lesson, prompts: list[list[int]], tokens: dict[int, list[int]]
    ) -> None:
        self.learner, self.lesson, self.prompts, self.tokens = learner, lesson, prompts, tokens
        self.made = 0
        self.source_N = torch.tensor([rollout.source for rollout in lesson.rollouts])
        self._records: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._gap_max = 0.0
        self._gradients: defaultdict[str, list[float]] = defaultdict(list)
        self._nonfinite = 0

    def update(self, rows: list[int]) -> None:
        """One optimizer update from the given rollouts; left out and counted if it is not finite."""
        learner, config = self.learner, self.learner.config
        learner.model.zero_grad(set_to_none=True)
        own = [row for row in rows if self.lesson.rollouts[row].source == learner.index]
        foreign = [row for row in rows if self.lesson.rollouts[row].source != learner.index]
        mean_weights = learner.algorithm.mean_weights(self.source_N[rows], learner.index)
        weight_of = dict(zip(rows, mean_weights.tolist(), strict=True))

        finite = self._backward(own, weight_of, kl_weight=learner.algorithm.beta / max(len(own), 1))
        if own and self._first:
            self._check_gap()
        own_gradient = self._gradient() if own and foreign else None
        finite = self._backward(foreign, weight_of) and finite
        norm = nn.utils.get_total_norm(p.grad for p in learner.model.parameters() if p.grad is not None)
        if not finite or not bool(torch.isfinite(norm)):
            self._reject_update()
            return
        self._note_gradients(float(norm), own_gradient, bool(own))
        nn.utils.clip_grads_with_norm_(learner.model.parameters(), config.max_grad_norm, norm)
        learner.optimizer.step()
        learner.nonfinite_in_a_row = 0
        learner.updates += 1
        self.made += 1

    @property
    def _first(self) -> bool:
        """Whether the weights are still those that sampled the step's own rollouts."""
        return self.made == 0 and self._nonfinite == 0

    def _reject_update(self) -> None:
        learner = self.learner
        learner.model.zero_grad(set_to_none=True)
        self._nonfinite += 1
        learner.nonfinite_in_a_row += 1
        if learner.nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
            raise TrainingDiverged(
                f"Agent {learner.config.id}: {MAX_NONFINITE_IN_A_ROW} updates in a row had a loss or gradient that "
                f"is not finite, the last one in step {self.lesson.step}."
            )

    def _backward(self, rows: list[int], weight_of: dict[int, float], kl_weight: float = 0.0) -> bool:
        """Add the gradient of these rollouts' part of the objective; False if it is not finite.

        The rollouts are all own or all foreign.
        """
        learner, lesson = self.learner, self.lesson
        temperature, size = learner.config.temperature, learner.config.micro_batch_size
        finite = True
        ordered = sorted(rows, key=lambda row: len(self.tokens[row]))
        for batch in (ordered[start : start + size] for start in range(0, len(ordered), size)):
            rollouts = [lesson.rollouts[row] for row in batch]
            prompts = [self.prompts[rollout.prompt_index] for rollout in rollouts]
            completions = [self.tokens[row] for row in batch]
            own = rollouts[0].source == learner.index
            scoring = (prompts, completions, temperature, learner.pad_id, learner.autocast)
            current = completion_logprobs(learner.model, *scoring)
            sequences = Sequences(
                logp_NT=current.logp_NT.double(),
                mask_NT=current.mask_NT,
                old_logp_N=self._column([rollout.logp_sum for rollout in rollouts]),
                old_length_N=self._column([rollout.num_tokens for rollout in rollouts]),
                bytes_N=self._column([rollout.num_bytes for rollout in rollouts]),
                own_N=torch.full((len(batch),), own, device=learner.device),
                advantage_N=lesson.advantage_N[batch].to(learner.device),
                omega_N=lesson.omega_N[batch].to(learner.device),
                old_logp_NT=self._old_token_logps(rollouts, current.mask_NT),
            )
            terms = learner.algorithm.terms(sequences, self.made)
            weight_N = self._column([weight_of[row] for row in batch])
            objective = (terms.objective_N * weight_N).sum()
            if own and learner.reference is not None and (kl_weight > 0 or self._first):
                with torch.no_grad():
                    start = completion_logprobs(learner.reference, *scoring)
                kl_N = k3_kl(current.logp_NT, start.logp_NT, current.mask_NT)
                objective = objective - kl_weight * kl_N.double().sum()
                self._sums["kl"] += float(kl_N.detach().sum())
                self._sums["kl_rollouts"] += len(batch)
            finite = finite and bool(torch.isfinite(objective))
            (-objective).backward()

            self._sums["objective"] += float(objective.detach())
            self._sums["tokens"] += int(current.mask_NT.sum())
            if own:
                self._sums["entropy"] += float(current.entropy_NT.sum())
                self._sums["own_tokens"] += int(current.mask_NT.sum())
                if self._first:
                    self._note_gap(sequences, terms)
            self._record(batch, sequences, terms, weight_N)
        return finite

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.learner.device)

    def _old_token_logps(self, rollouts: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
        """Recorded log-probabilities of own rollouts; zeros for the others, whose tokens may differ."""
        old_NT = torch.zeros(mask_NT.shape, dtype=torch.float64)
        for row, rollout in enumerate(rollouts):
            if rollout.source == self.learner.index:
                old_NT[row, : len(rollout.logps)] = torch.tensor(rollout.logps, dtype=torch.float64)
        return old_NT.to(mask_NT.device)

    # --- notes -------------------------------------------------------------------------------------

    def _note_gap(self, sequences: Sequences, terms: Terms) -> None:
        """How far the recorded log-probabilities are from the learner's own, before its first update."""
        gap_NT = (sequences.logp_NT.detach() - sequences.old_logp_NT).abs() * sequences.mask_NT
        self._sums["gap"] += float(gap_NT.sum())
        self._sums["gap_tokens"] += int(sequences.mask_NT.sum())
        self._gap_max = max(self._gap_max, float(gap_NT.max()))
        ratio_N = terms.log_ratio_N.exp()
        self._sums["gap_clipped"] += int(((ratio_N < terms.lower_N) | (ratio_N > terms.upper_N)).sum())
        self._sums["gap_rollouts"] += len(ratio_N)

    def _gap(self) -> dict[str, float]:
        return {
            "logprob_gap": self._sums["gap"] / self._sums["gap_tokens"],
            "logprob_gap_max": self._gap_max,
            "logprob_gap_clipped": self._sums["gap_clipped"] / self._sums["gap_rollouts"],
        }

    def _check_gap(self) -> None:
        """UserError, before anything is updated, if the sampler and the learner do not have the same policy."""
        config = self.learner.config
        gap, clipped = self._gap()["logprob_gap"], self._gap()["logprob_gap_clipped"]
        if gap > config.max_logprob_gap or clipped > MAX_CLIPPED_BEFORE_UPDATE:
            raise UserError(
                f"Agent {config.id}, step {self.lesson.step}: the log-probabilities recorded while sampling differ "
                f"from the learner's by {gap:.2g} per token (max_logprob_gap is {config.max_logprob_gap}), and "
                f"{clipped:.0%} of its own rollouts are outside the clip before any update (at most "
                f"{MAX_CLIPPED_BEFORE_UPDATE:.0%} may be): ratios would be noise. Use dtype: float32, or a wider "
                "algorithm.epsilon and epsilon_high."
            )

    def _gradient(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.learner.model.parameters()]

    def _note_gradients(self, total: float, own: list[Tensor | None] | None, any_own: bool) -> None:
        """Norms of the own and the foreign part of the gradient, and the angle between them."""
        self._gradients["grad_norm"].append(total)
        if own is None:
            self._gradients["grad_norm_own" if any_own else "grad_norm_foreign"].append(total)
            return
        own_sq = foreign_sq = dot = 0.0
        for parameter, before in zip(self.learner.model.parameters(), own, strict=True):
            if parameter.grad is None:
                continue
            before = torch.zeros_like(parameter.grad) if before is None else before
            after = parameter.grad - before
            own_sq += float(before.pow(2).sum())
            foreign_sq += float(after.pow(2).sum())
            dot += float((before * after).sum())
        self._gradients["grad_norm_own"].append(own_sq**0.5)
        self._gradients["grad_norm_foreign"].append(foreign_sq**0.5)
        if own_sq > 0 and foreign_sq > 0:
            self._gradients["grad_cosine"].append(dot / (own_sq * foreign_sq) ** 0.5)

    def _record(self, batch: list[int], sequences: Sequences, terms: Terms, weight_N: Tensor) -> None:
        columns = {
            "row": torch.tensor(batch),
            "update": torch.full((len(batch),), self.made),
            "num_tokens": sequences.length_N,
            "logp_sum": sequences.logp_N,
            "log_ratio": terms.log_ratio_N,
            "lower": terms.lower_N,
            "upper": terms.upper_N,
            "kept": terms.kept_N,
            "advantage": sequences.advantage_N,
            "omega": sequences.omega_N,
            "weight": terms.weight_N,
            "objective": terms.objective_N,
            "mean_weight": weight_N,
        }
        for name, column in columns.items():
            self._records[name].append(column.detach().cpu())

    def records(self) -> dict[str, np.ndarray]:
        """One entry for each rollout and update, as columns."""
        return {name: torch.cat(parts).numpy() for name, parts in self._records.items()}

    def metrics(self) -> dict[str, float]:
        sums = self._sums
        metrics = {
            "learning_rate": self.lesson.learning_rate,
            "updates": self.made,
            "nonfinite_updates": self._nonfinite,
            "tokens_trained": sums["tokens"],
            "loss": -sums["objective"] / max(self.made, 1),
        }
        if sums["own_tokens"]:
            metrics["entropy"] = sums["entropy"] / sums["own_tokens"]
        if sums["kl_rollouts"]:
            metrics["kl"] = sums["kl"] / sums["kl_rollouts"]
        metrics |= {name: float(np.mean(values)) for name, values in self._gradients.items()}
        if sums["gap_tokens"]:
            metrics |= self._gap()
        return metrics
