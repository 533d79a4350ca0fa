"""How a learner turns rollouts into updates of its model."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Algorithm, Sequences, Terms, k3_kl
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, Score
from hacrl.decoder.scoring import TokenLogprobs
from hacrl.errors import UserError
from hacrl.learners.notes import Notes
from hacrl.learners.ranks import Team
from hacrl.learners.updating import ALONE, Updater
from hacrl.learners.weights import MasterWeights
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Prompt

MAX_CLIPPED_BEFORE_UPDATE = 0.05

Prompts = Sequence[list[int]] | Mapping[int, list[int]]
"""Token ids of prompts by position."""
Texts = tuple[list[list[int]], list[list[int]]]
"""Token ids of prompts and of the completion behind each."""


@dataclass
class Lesson:
    """What one learner gets for one step: N valid rollouts and what they are worth to it."""

    step: int
    prompts: list[Prompt]
    rollouts: list[Rollout]
    advantage_N: Tensor
    omega_N: Tensor
    minibatches: list[list[int]]
    """Prompt positions, a list for each update, one pass after the other; none: nothing is reinforced."""
    learning_rate: float
    examples: list[Rollout] = field(default_factory=list)
    """Right answers to keep for imitation."""
    imitates: bool = False
    """Whether the step ends with imitation of what was kept."""
    imitation_rate: float = 0.0
    """The agent's learning rate then, of which imitation takes a multiple."""
    token_advantages: list[np.ndarray] | None = None
    """What is added to `advantage_N` for each token, by row; None: nothing."""

    @property
    def mean_advantages(self) -> list[float]:
        """Each rollout's advantage, the mean over its tokens."""
        advantages: list[float] = self.advantage_N.tolist()
        if self.token_advantages is None:
            return advantages
        return [a + float(added.mean()) for a, added in zip(advantages, self.token_advantages, strict=True)]


@dataclass(frozen=True)
class Penalties:
    """What the objective of one update has besides the terms: of all own rollouts."""

    kl_weight: float = 0.0
    length_factor_of: dict[int, float] = field(default_factory=dict)
    """How much the KL of each rollout counts for its length."""
    entropy_weight: float = 0.0
    """Weight of the entropy of one token."""


@dataclass
class LearnResult:
    """What happened: one record for each rollout and update, and figures of the step."""

    records: dict[str, np.ndarray]
    metrics: dict[str, float]
    dropped: dict[int, str] = field(default_factory=dict)
    """Rollouts that could not be used, by row, and why."""


class Learner(Updater):
    """Learns from rollouts: the trained model of one agent, and the starting model it is compared with."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        algorithm: Algorithm,
        weights: MasterWeights,
        policy: Policy,
        reference: Score | None,
        saves_work: bool,
        team: Team = ALONE,
    ) -> None:
        super().__init__(config, weights, policy, team)
        self.index, self.algorithm, self.reference = index, algorithm, reference
        self.saves_work = saves_work
        """Leave out what has no gradient. The result is the same; only what a trace would say of it is not known."""

    def learn(self, lesson: Lesson, prompts: list[list[int]], tokens: dict[int, list[int]]) -> LearnResult:
        """An optimizer update for each mini-batch. `tokens` holds the completions this learner can use."""
        self.set_learning_rate(lesson.learning_rate)
        with self.policy.driven():
            work = LearningStep(self, lesson, prompts, tokens)
            for minibatch in lesson.minibatches:
                work.update(minibatch)
        return LearnResult(work.records(), work.metrics())

    def score_ahead(self, rollouts: list[Rollout], prompts: list[list[int]]) -> None:
        """Note what the learner says of its rollouts now: when it learns from them, it will have changed.

        All of them where that is preferred to what the sampler recorded; else one of each prompt, to compare both.
        """
        chosen = [rollout for rollout in rollouts if self.config.recomputes_logprobs or rollout.index == 0]
        ones_N = torch.ones(len(chosen), dtype=torch.float64)
        lesson = Lesson(chosen[0].step, [], chosen, ones_N, ones_N, [list(range(len(prompts)))], learning_rate=0.0)
        with self.policy.driven():
            work = LearningStep(self, lesson, prompts, {row: r.token_ids for row, r in enumerate(chosen)})
            work.score_old(own=True)
        for row, logps in work.old_logps.items():
            chosen[row].learner_logps = logps.tolist()

    def score_texts(
        self, prompts: Prompts, prompt_of: Mapping[int, int], tokens: Mapping[int, list[int]], step: int
    ) -> dict[int, np.ndarray]:
        """Log-probabilities of these completions by row, each behind its prompt, under the model as it is."""

        def texts(batch: list[int]) -> Texts:
            return [prompts[prompt_of[row]] for row in batch], [tokens[row] for row in batch]

        def attempt() -> dict[int, np.ndarray]:
            return self.score(self.batches(list(tokens), prompts, prompt_of, tokens), texts)

        with self.policy.driven():
            return self.within_memory(attempt, step)

    def score(self, batches: Iterable[list[int]], texts: Callable[[list[int]], Texts]) -> dict[int, np.ndarray]:
        """Log-probabilities by row, without a gradient; `texts` gives prompts and completions of a batch of rows."""

        def work(batch: list[int], counts: bool) -> dict[int, np.ndarray]:
            prompts, completions = texts(batch)
            with torch.no_grad():
                logp_NT = self.policy.score(prompts, completions, self.config.temperature).logp_NT.double().cpu()
            scored = zip(batch, completions, logp_NT.numpy(), strict=True)
            return {row: logp_T[: len(ids)] for row, ids, logp_T in scored} if counts else {}

        return {row: logp_T for part in self.passes(batches, work) for row, logp_T in part.items()}

    def batches(
        self,
        rows: list[int],
        prompts: Prompts,
        prompt_of: Mapping[int, int],
        tokens: Mapping[int, list[int]],
    ) -> Iterator[list[int]]:
        """The rollouts of one pass each: those of one prompt together, prompts with answers of like length together."""
        longest: defaultdict[int, int] = defaultdict(int)
        for row in rows:
            longest[prompt_of[row]] = max(longest[prompt_of[row]], len(tokens[row]))
        ordered = sorted(rows, key=lambda row: (longest[prompt_of[row]], prompt_of[row], len(tokens[row])))
        costs, last = [], None
        for row in ordered:
            costs.append(len(tokens[row]) + (0 if prompt_of[row] == last else len(prompts[prompt_of[row]])))
            last = prompt_of[row]
        return self.split(ordered, costs)


class LearningStep:
    """One learner's updates in one step, and the notes taken on the way."""

    def __init__(
        self, learner: Learner, lesson: Lesson, prompts: list[list[int]], tokens: dict[int, list[int]]
    ) -> None:
        self.learner, self.lesson, self.prompts, self.tokens = learner, lesson, prompts, tokens
        self.made = 0
        self.source_N = torch.tensor([rollout.source for rollout in lesson.rollouts])
        self.advantages, self.omegas = lesson.advantage_N.tolist(), lesson.omega_N.tolist()
        added = lesson.token_advantages or [np.zeros(1)] * len(lesson.rollouts)
        self.teaches = [a != 0 or bool(tokens.any()) for a, tokens in zip(self.advantages, added, strict=True)]
        """Whether a rollout has an advantage other than 0, or one of its tokens has."""
        self.old_logps: dict[int, np.ndarray] = {}
        """The learner's own log-probabilities before the first update, of the rollouts whose ratio is taken to them."""
        self.ahead = {
            row: rollout.learner_logps
            for row, rollout in enumerate(lesson.rollouts)
            if rollout.source == learner.index and rollout.learner_logps is not None and row in tokens
        }
        """Those noted when the rollouts were sampled, if updates were still to come; of some rollouts or of all."""
        own = (rollout for rollout in lesson.rollouts if rollout.source == learner.index)
        self.stale = any(rollout.policy_version != learner.updates for rollout in own)
        """There have been updates since: the learner of now says nothing about the sampler."""
        self._notes = Notes()
        self._gradients: defaultdict[str, list[float]] = defaultdict(list)
        self._objectives: list[float] = []
        """Objective of each update made so far."""
        self._nonfinite = 0

    def update(self, minibatch: list[int]) -> None:
        """One optimizer update from the rollouts of these prompts; left out and counted if it is not finite."""
        learner = self.learner
        rows = self._rows_of(minibatch)
        if not rows:
            return

        def attempt() -> tuple[Notes, dict[str, float]]:
            notes = Notes()
            if self._first:
                notes.note("forward", self._start_old_logps())
            return notes, self._gradient(rows, notes)

        notes, parts = learner.within_memory(attempt, self.lesson.step)
        self._notes.add(notes)
        norm = learner.team.norm(learner.weights.gradients)
        total, objective = float(norm), notes.sum("objective")
        if not learner.apply(norm, math.isfinite(objective), self.lesson.step):
            self._nonfinite += 1
            return
        self._objectives.append(objective)
        self._note_gradients(total, parts)
        self.made += 1

    def _gradient(self, rows: list[int], notes: Notes) -> dict[str, float]:
        """Leave the gradient of these rollouts in the weights; the norms of its parts, own and foreign."""
        learner = self.learner
        length_N = torch.tensor([len(self.tokens[row]) for row in rows])
        mean_weights = learner.algorithm.rollout_weights(
            self.source_N[rows], learner.index, length_N, learner.config.max_completion_length
        )
        weight_of = dict(zip(rows, mean_weights.tolist(), strict=True))
        own, foreign = self._needed(rows)
        num_own = int((self.source_N[rows] == learner.index).sum())
        if learner.config.sampler_ratio_max is not None:
            for row in own:
                ratio = min(self._sampler_ratio(row), learner.config.sampler_ratio_max)
                weight_of[row] *= ratio
                notes.note("sampler_ratio", ratio)
                notes.note("sampler_ratios", 1)

        self._add_gradients(own, weight_of, notes, self._penalties(rows))
        if self._first and self.stale and self.ahead:
            rows_ahead = list(self.ahead)
            sequences = self._sequences_ahead(rows_ahead)
            self._note_gap(rows_ahead, sequences, learner.algorithm.terms(sequences, 0), notes)
        if self._first and notes.sum("gap_tokens"):
            self._check_gap(notes)
        own_gradients = torch._foreach_mul(learner.weights.gradients, 1.0) if 0 < num_own < len(rows) else None
        if learner.saves_work and not learner.algorithm.keeps_all:
            # A look at all of them, then a backward pass for those that have a gradient.
            self._add_gradients(self._kept(foreign, weight_of, notes), weight_of, notes, seen=True)
        else:
            self._add_gradients(foreign, weight_of, notes)
        if own_gradients is None:
            return {"own" if num_own else "foreign": math.nan}  # all of it
        foreign_gradients = torch._foreach_sub(learner.weights.gradients, own_gradients)
        parts = {"own": own_gradients, "foreign": foreign_gradients}
        return {name: float(learner.team.norm(gradients)) for name, gradients in parts.items()}

    def _penalties(self, rows: list[int]) -> Penalties:
        """The KL is averaged as the terms are; the entropy is a mean over tokens, whatever the loss_type, as in TRL."""
        algorithm = self.learner.algorithm
        own = [row for row in rows if self.lesson.rollouts[row].source == self.learner.index]
        length_N = torch.tensor([len(self.tokens[row]) for row in own])
        factor_N = algorithm.length_factors(length_N, self.learner.config.max_completion_length)
        return Penalties(
            algorithm.beta / max(len(own), 1),
            dict(zip(own, factor_N.tolist(), strict=True)),
            algorithm.entropy_coef / max(int(length_N.sum()), 1),
        )

    def _needed(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """The own and the foreign ones of these rollouts, without those that have neither value nor gradient: A = 0."""
        learner = self.learner
        own = [row for row in rows if self.lesson.rollouts[row].source == learner.index]
        foreign = [row for row in rows if self.lesson.rollouts[row].source != learner.index]
        if learner.saves_work:
            foreign = [row for row in foreign if self.teaches[row]]
            if not (learner.algorithm.beta or learner.algorithm.entropy_coef):  # these are of all own rollouts
                own = [row for row in own if self.teaches[row]]
        return own, foreign

    def _rows_of(self, minibatch: list[int]) -> list[int]:
        """The rollouts of these prompts that the learner can use."""
        chosen = set(minibatch)
        return [row for row in self.tokens if self.lesson.rollouts[row].prompt_index in chosen]

    @property
    def _first(self) -> bool:
        """Whether the weights are still those at the start of the step."""
        return self.made == 0 and self._nonfinite == 0

    def _batches(self, rows: list[int]) -> Iterator[list[int]]:
        prompt_of = {row: self.lesson.rollouts[row].prompt_index for row in rows}
        return self.learner.batches(rows, self.prompts, prompt_of, self.tokens)

    def _add_gradients(
        self,
        rows: list[int],
        weight_of: dict[int, float],
        notes: Notes,
        penalties: Penalties | None = None,
        seen: bool = False,
    ) -> None:
        """Add the gradient of these rollouts' part of the objective; they are all own or all foreign."""

        def loss_of(batch: list[int]) -> tuple[Tensor, Notes]:
            new = Notes()
            return -self._objective(batch, weight_of, new, penalties or Penalties(), seen), new

        for new in self.learner.add_gradients(self._batches(rows), loss_of):
            notes.add(new)

    def _kept(self, rows: list[int], weight_of: dict[int, float], notes: Notes) -> list[int]:
        """Those of the rollouts that have a gradient."""

        def look(batch: list[int], counts: bool) -> tuple[Notes, list[int]]:
            new = Notes()
            with torch.no_grad():
                _, terms, _ = self._terms(batch, weight_of, new)
            if not counts:
                return Notes(), []
            return new, [row for row, is_kept in zip(batch, terms.kept_N.tolist(), strict=True) if is_kept]

        kept: list[int] = []
        for new, rows_kept in self.learner.passes(self._batches(rows), look):
            notes.add(new)
            kept += rows_kept
        return kept

    def _objective(
        self, batch: list[int], weight_of: dict[int, float], notes: Notes, penalties: Penalties, seen: bool
    ) -> Tensor:
        """These rollouts' part of what is maximised."""
        learner = self.learner
        sequences, terms, current = self._terms(batch, weight_of, notes, seen)
        weight_N = torch.tensor([weight_of[row] for row in batch], dtype=torch.float64).to(learner.device)
        objective = (terms.objective_N * weight_N).sum()
        own = self.lesson.rollouts[batch[0]].source == learner.index
        if own and learner.reference is not None and (penalties.kl_weight > 0 or self._first):
            with torch.no_grad():
                start = learner.reference(*self._texts(batch), learner.config.temperature)
            notes.note("forward", self._num_tokens(batch))
            kl_N = k3_kl(current.logp_NT, start.logp_NT, current.mask_NT)
            factors = [penalties.length_factor_of[row] for row in batch]
            factor_N = torch.tensor(factors, dtype=torch.float64).to(learner.device)
            penalty = penalties.kl_weight * (kl_N.double() * factor_N).sum()
            objective = objective - penalty
            notes.note("objective", -penalty)
            notes.note("kl", kl_N.sum())
            notes.note("kl_rollouts", len(batch))
        notes.note("tokens", self._num_tokens(batch))
        if penalties.entropy_weight > 0:
            bonus = penalties.entropy_weight * current.entropy_NT.double().sum()
            objective = objective + bonus
            notes.note("objective", bonus)
        if own:
            teaching = [n for n, row in enumerate(batch) if self.teaches[row]]
            notes.note("entropy", current.entropy_NT[teaching].sum())
            notes.note("entropy_tokens", sum(len(self.tokens[batch[n]]) for n in teaching))
            if self._first and not self.stale:
                self._note_gap(batch, sequences, terms, notes)
        return objective

    def _terms(
        self, batch: list[int], weight_of: dict[int, float], notes: Notes, seen: bool = False
    ) -> tuple[Sequences, Terms, TokenLogprobs]:
        """The rollouts under the learner as it is, and their terms of the objective."""
        learner = self.learner
        current = learner.policy.score(*self._texts(batch), learner.config.temperature)
        notes.note("forward", self._num_tokens(batch))
        sequences, weight_N = self._sequences(batch, current.logp_NT.double(), current.mask_NT, weight_of)
        terms = learner.algorithm.terms(sequences, self.made)
        if not seen:
            notes.note("objective", (terms.objective_N.detach() * weight_N).sum())
            self._record(batch, sequences, terms, weight_N, notes)
        return sequences, terms, current

    def _sequences(
        self, batch: list[int], logp_NT: Tensor, mask_NT: Tensor, weight_of: dict[int, float]
    ) -> tuple[Sequences, Tensor]:
        """The rollouts with these log-probabilities, and their weights in the mean."""
        learner = self.learner
        rollouts = [self.lesson.rollouts[row] for row in batch]
        old_NT = self._old_token_logps(batch, mask_NT)
        old_N = [rollout.logp_sum for rollout in rollouts]
        old_length_N = [rollout.num_tokens for rollout in rollouts]
        for n, row in enumerate(batch):
            if row in self.old_logps:
                old_N[n], old_length_N[n] = float(self.old_logps[row].sum()), len(self.tokens[row])
        columns = [
            old_N,
            old_length_N,
            [rollout.num_bytes for rollout in rollouts],
            [self.advantages[row] for row in batch],
            [self.omegas[row] for row in batch],
            [rollout.source == learner.index for rollout in rollouts],
            [weight_of[row] for row in batch],
        ]
        table = torch.tensor(columns, dtype=torch.float64).to(learner.device)  # one transfer
        old_logp_N, old_length_N, bytes_N, advantage_N, omega_N, own_N, weight_N = table
        sequences = Sequences(
            logp_NT=logp_NT,
            mask_NT=mask_NT,
            old_logp_N=old_logp_N,
            old_length_N=old_length_N,
            bytes_N=bytes_N,
            own_N=own_N.bool(),
            advantage_N=advantage_N,
            omega_N=omega_N,
            old_logp_NT=old_NT,
            token_advantage_NT=self._token_advantages(batch, mask_NT),
        )
        return sequences, weight_N

    def _token_advantages(self, batch: list[int], mask_NT: Tensor) -> Tensor | None:
        if self.lesson.token_advantages is None:
            return None
        added_NT = np.zeros(mask_NT.shape)
        for n, row in enumerate(batch):
            added_T = self.lesson.token_advantages[row]
            added_NT[n, : len(added_T)] = added_T
        return torch.from_numpy(added_NT).to(mask_NT.device)

    def _sequences_ahead(self, batch: list[int]) -> Sequences:
        """The rollouts under the learner as it was when it sampled them."""
        lengths = [len(self.ahead[row]) for row in batch]
        logp_NT = np.zeros((len(batch), max(lengths)))
        for n, row in enumerate(batch):
            logp_NT[n, : lengths[n]] = self.ahead[row]
        mask_NT = np.arange(max(lengths)) < np.array(lengths)[:, None]
        device = self.learner.device
        tensors = torch.from_numpy(logp_NT).to(device), torch.from_numpy(mask_NT).to(device)
        return self._sequences(batch, *tensors, dict.fromkeys(batch, 0.0))[0]

    def _num_tokens(self, batch: list[int]) -> int:
        return sum(len(self.tokens[row]) for row in batch)

    def _texts(self, batch: list[int]) -> Texts:
        prompts = [self.prompts[self.lesson.rollouts[row].prompt_index] for row in batch]
        return prompts, [self.tokens[row] for row in batch]

    def _old_token_logps(self, batch: list[int], mask_NT: Tensor) -> Tensor:
        """Log-probabilities when sampled; a sum spread evenly where the source's tokens are not the learner's."""
        old_NT = np.zeros(mask_NT.shape)  # not torch: an assignment for each row, while a GPU waits
        for n, row in enumerate(batch):
            rollout, ids = self.lesson.rollouts[row], self.tokens[row]
            if row in self.old_logps:
                old_NT[n, : len(ids)] = self.old_logps[row]
            elif ids[:-1] == rollout.token_ids[:-1]:  # the same tokens, up to the end of turn
                old_NT[n, : len(ids)] = rollout.logps
            else:
                old_NT[n, : len(ids)] = rollout.logp_sum / len(ids)
        return torch.from_numpy(old_NT).to(mask_NT.device)

    def _sampler_ratio(self, row: int) -> float:
        """How likely an own rollout was for the learner over how likely for what sampled it, per token."""
        return math.exp(float(np.mean(self.old_logps[row] - np.array(self.lesson.rollouts[row].logps))))

    def _start_old_logps(self) -> int:
        """Score the rollouts whose ratio is taken to the learner itself; anew in each attempt, whose batches differ.

        How many tokens that were.

        In bfloat16 the sampler's rounding differs from the learner's by more than GSPO's clip is wide, so own ratios
        are among them. What was noted ahead is of the learner that sampled.
        """
        own = self.learner.config.recomputes_logprobs
        self.old_logps = {row: np.array(logps) for row, logps in self.ahead.items()} if own and self.stale else {}
        return self.score_old(own=own and not self.stale, foreign=self.learner.algorithm.rescores_foreign)

    def score_old(self, *, own: bool, foreign: bool = False) -> int:
        """Note what the learner itself says of its own rollouts, of foreign ones, or of both, before the first update.

        How many tokens that were. Rounding depends on what else is in a batch, so the batches are those of the updates
        to come.
        """
        scored = 0
        for minibatch in self.lesson.minibatches:
            parts = zip((own, foreign), self._needed(self._rows_of(minibatch)), strict=True)
            for rows in [part for wanted, part in parts if wanted]:
                unknown = [row for row in rows if row not in self.old_logps]
                self.old_logps |= self.learner.score(self._batches(unknown), self._texts)
                scored += self._num_tokens(unknown)
        return scored

    # --- notes -------------------------------------------------------------------------------------

    def _note_gap(self, batch: list[int], sequences: Sequences, terms: Terms, notes: Notes) -> None:
        """How far the recorded log-probabilities are from the learner's own, before its first update."""
        recorded_NT = np.zeros(sequences.mask_NT.shape)
        for n, row in enumerate(batch):
            logps = self.lesson.rollouts[row].logps
            recorded_NT[n, : len(logps)] = logps
        recorded = torch.from_numpy(recorded_NT).to(self.learner.device)
        gap_NT = (sequences.logp_NT.detach() - recorded).abs() * sequences.mask_NT
        ratio_N = terms.log_ratio_N.exp()
        notes.note("gap", gap_NT.sum())
        notes.note("gap_max", gap_NT.max())
        notes.note("gap_tokens", sum(len(self.tokens[row]) for row in batch))
        notes.note("gap_clipped", ((ratio_N < terms.lower_N) | (ratio_N > terms.upper_N)).sum())
        notes.note("gap_rollouts", len(batch))

    @staticmethod
    def _gap(notes: Notes) -> dict[str, float]:
        return {
            "logprob_gap": notes.sum("gap") / notes.sum("gap_tokens"),
            "logprob_gap_max": notes.max("gap_max"),
            "logprob_gap_clipped": notes.sum("gap_clipped") / notes.sum("gap_rollouts"),
        }

    def _check_gap(self, notes: Notes) -> None:
        """UserError, before anything is updated, if the sampler and the learner do not have the same policy."""
        config = self.learner.config
        gap, clipped = self._gap(notes)["logprob_gap"], self._gap(notes)["logprob_gap_clipped"]
        if gap > config.max_logprob_gap or clipped > MAX_CLIPPED_BEFORE_UPDATE:
            advice = "a wider algorithm.epsilon and epsilon_high"
            if not config.recomputes_logprobs:
                advice = f"recompute_logprobs: true, or {advice}"
            raise UserError(
                f"Agent {config.id}, step {self.lesson.step}: the log-probabilities recorded while sampling differ "
                f"from the learner's by {gap:.2g} per token (max_logprob_gap is {config.max_logprob_gap}), and "
                f"{clipped:.0%} of its own rollouts are outside the clip before any update (at most "
                f"{MAX_CLIPPED_BEFORE_UPDATE:.0%} may be): ratios would be noise. Use dtype: float32, or {advice}."
            )

    def _note_gradients(self, total: float, parts: dict[str, float]) -> None:
        """Norms of the own and the foreign part of the gradient, and the angle between them."""
        self._gradients["grad_norm"].append(total)
        for name, norm in parts.items():
            self._gradients[f"grad_norm_{name}"].append(norm if len(parts) == 2 else total)
        if len(parts) == 2 and min(parts.values()) > 0:
            own, foreign = parts["own"], parts["foreign"]
            # |a + b|^2 = |a|^2 + |b|^2 + 2 a b
            cosine = (total**2 - own**2 - foreign**2) / (2 * own * foreign)
            self._gradients["grad_cosine"].append(min(max(cosine, -1.0), 1.0))

    def _record(self, batch: list[int], sequences: Sequences, terms: Terms, weight_N: Tensor, notes: Notes) -> None:
        columns = {
            "row": torch.tensor(batch),
            "update": torch.full((len(batch),), self.made),
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
            notes.records[name].append(column.detach())

    def records(self) -> dict[str, np.ndarray]:
        """One entry for each rollout and update, as columns."""
        return {name: torch.cat(parts).cpu().numpy() for name, parts in self._notes.records.items()}

    def metrics(self) -> dict[str, float]:
        notes = self._notes
        metrics = {
            "learning_rate": self.lesson.learning_rate,
            "updates": self.made,
            "nonfinite_updates": self._nonfinite,
            "tokens_trained": notes.sum("tokens"),
            "tokens_forward": notes.sum("forward"),
            "loss": -float(np.mean(self._objectives)) if self._objectives else math.nan if self._nonfinite else 0.0,
        }
        if notes.sum("entropy_tokens"):
            metrics["entropy"] = notes.sum("entropy") / notes.sum("entropy_tokens")
        if notes.sum("sampler_ratios"):
            metrics["sampler_ratio"] = notes.sum("sampler_ratio") / notes.sum("sampler_ratios")
        if notes.sum("kl_rollouts"):
            metrics["kl"] = notes.sum("kl") / notes.sum("kl_rollouts")
        metrics |= {name: float(np.mean(values)) for name, values in self._gradients.items()}
        if notes.sum("gap_tokens"):
            metrics |= self._gap(notes)
        return metrics
