"""How a learner turns rollouts into updates of its model: the updates of a step, from top to bottom."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Algorithm, k3_kl
from hacrl.config import AgentConfig
from hacrl.decoder.packing import to_device
from hacrl.decoder.policy import Policy, Score
from hacrl.learners.gap import ahead_of, check_gap, correct_for_sampler, note_gap, note_gap_ahead
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.learners.minibatch import Minibatch, Texts, texts_of
from hacrl.learners.notes import Notes, StepNotes
from hacrl.learners.parts import Parts
from hacrl.learners.ranks import ALONE, Ranks
from hacrl.learners.updating import Updater
from hacrl.learners.weights import Weights
from hacrl.rollouts.rollout import Rollout

AnyTexts = TypeVar("AnyTexts", bound=Texts)


class Learner(Updater):
    """Learns from rollouts. Holds the trained model of one agent, and the starting model to compare it with."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        algorithm: Algorithm,
        weights: Weights,
        policy: Policy,
        reference: Score | None,
        saves_work: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(config, weights, policy, ranks)
        self.index, self.algorithm, self.reference, self.saves_work = index, algorithm, reference, saves_work
        """Whether rollouts without a gradient are left out. The result is the same, but a trace would lack them."""

    def learn(self, lesson: Lesson, rollouts: Minibatch) -> LearnResult:
        """Make an optimizer update for each mini-batch of prompts. `rollouts` are the usable ones of the lesson."""
        self.set_learning_rate(lesson.learning_rate)
        own = (rollout for rollout in lesson.rollouts if rollout.source == self.index)
        notes = StepNotes(stale=any(rollout.policy_version != self.updates for rollout in own))
        with self.policy.driven():
            for positions in lesson.minibatches:
                self.update(lesson, rollouts, positions, notes)
        records = {name: torch.cat(parts).cpu().numpy() for name, parts in notes.notes.records.items()}
        return LearnResult(records, {"learning_rate": lesson.learning_rate, **notes.metrics()})

    def update(self, lesson: Lesson, rollouts: Minibatch, positions: list[int], step: StepNotes) -> None:
        """Make one optimizer update from the rollouts of these prompts; skip and count it if it is not finite."""
        if not (rows := rollouts.rows_of(positions)):
            return
        loss = partial(self.loss, step=step)
        for attempt in self.attempts(lesson.step):
            split = None  # frees the memory of an attempt that failed
            with attempt:
                notes = Notes()
                if step.first:
                    notes.note(forward=self.score_old(rollouts, lesson.minibatches, step.stale))
                    if step.stale:
                        note_gap_ahead(rollouts, self.algorithm, self.device, notes)
                minibatch = self.weighted(rollouts[rows])
                any_own = bool(minibatch.own_N.any())
                own, foreign = self.needed(minibatch)
                if self.config.corrects_sampler:
                    own = correct_for_sampler(own, self.config, notes)
                notes.add(*self.add_gradients(self.batches(own), loss))
                if step.first:
                    check_gap(self.config, lesson.step, notes)
                if any_own and not minibatch.own_N.all():
                    split = Parts(self.weights.gradients, self.ranks)
                if self.saves_work and not self.algorithm.keeps_all:
                    foreign = self.kept(foreign, notes, step)
                notes.add(*self.add_gradients(self.batches(foreign), loss))
                total = self.ranks.norm(self.weights.gradients)
                parts = {"own" if any_own else "foreign": float(total)}
                if split is not None:
                    parts = {"own": float(split.first), "foreign": float(split.second(self.weights.gradients))}
                    split = None
        step.notes.add(notes)
        objective = notes.sum("objective")
        if self.apply(total, math.isfinite(objective), lesson.step):
            step.note_update(objective, float(total), parts)
        else:
            step.nonfinite += 1

    def weighted(self, minibatch: Minibatch) -> Minibatch:
        """Return the rollouts of one update with their weights in its objective.

        The KL is averaged as the terms are; the entropy is a mean over tokens, whatever the loss_type, as in TRL.
        """
        algorithm, own_N, longest = self.algorithm, minibatch.own_N, self.config.max_completion_length
        length_N = minibatch.length_N
        length_factor_N = torch.zeros(len(minibatch), dtype=torch.float64)
        length_factor_N[own_N] = algorithm.length_factors(length_N[own_N], longest)
        return replace(
            minibatch,
            mean_weight_N=algorithm.rollout_weights(minibatch.source_N, self.index, length_N, longest),
            length_factor_N=length_factor_N,
            kl_weight=algorithm.beta / max(int(own_N.sum()), 1),
            entropy_weight=algorithm.entropy_coef / max(int(length_N[own_N].sum()), 1),
        )

    def needed(self, minibatch: Minibatch) -> tuple[Minibatch, Minibatch]:
        """Split rollouts into own and foreign ones, without those that have neither value nor gradient (A = 0)."""
        own_N, foreign_N = minibatch.own_N, ~minibatch.own_N
        if self.saves_work:
            foreign_N = foreign_N & minibatch.teaches_N
            if not (self.algorithm.beta or self.algorithm.entropy_coef):  # these count all own rollouts
                own_N = own_N & minibatch.teaches_N
        return minibatch.where(own_N), replace(minibatch.where(foreign_N), kl_weight=0.0, entropy_weight=0.0)

    def batches(self, texts: AnyTexts) -> Iterator[AnyTexts]:
        """Divide completions into batches, one for each pass."""
        return (texts[rows] for rows in self.split(*texts.by_length()))

    def kept(self, rollouts: Minibatch, notes: Notes, step: StepNotes) -> Minibatch:
        """Return the rollouts that have a gradient. A pass without gradients finds them, and records all rollouts."""

        def look(batch: Minibatch, counts: bool) -> Notes:
            with torch.no_grad():
                _, new = self.loss(batch, step)  # all ranks must do this, whether their share counts or not
            return new if counts else Notes()

        looks = self.passes(self.batches(rollouts), look)
        notes.add(*looks)
        place = {row: n for n, row in enumerate(rollouts.row_N.tolist())}
        kept = [place[row] for new in looks for row in new.kept_rows()]
        return replace(rollouts[kept], seen=True)

    def loss(self, batch: Minibatch, step: StepNotes) -> tuple[Tensor, Notes]:
        """Return minus these rollouts' part of the objective, and notes. The rollouts are all own or all foreign."""
        notes, own, weight_N = Notes(), bool(batch.own_N.all()), to_device(batch.mean_weight_N, self.device)
        current = self.policy.scorer(batch.prompts, batch.completions, self.config.temperature)
        notes.note(forward=batch.num_tokens)
        sequences = batch.sequences(current.logp_NT.double(), current.mask_NT)
        terms = self.algorithm.terms(sequences, step.made)
        objective = (terms.objective_N * weight_N).sum()
        if not batch.seen:
            notes.note(objective=objective)
            notes.record(batch.row_N, step.made, sequences, terms, weight_N)
        if own and self.reference is not None and (batch.kl_weight > 0 or step.first):
            with torch.no_grad():
                start = self.reference(batch.prompts, batch.completions, self.config.temperature)
            kl_N = k3_kl(current.logp_NT, start.logp_NT, current.mask_NT)
            penalty = batch.kl_weight * (kl_N.double() * to_device(batch.length_factor_N, self.device)).sum()
            objective = objective - penalty
            notes.note(forward=batch.num_tokens, objective=-penalty, kl=kl_N.sum(), kl_rollouts=len(batch))
        if batch.entropy_weight > 0:
            bonus = batch.entropy_weight * current.entropy_NT.double().sum()
            objective = objective + bonus
            notes.note(objective=bonus)
        if torch.is_grad_enabled():
            notes.note(tokens=batch.num_tokens)
        if own:
            teaching = batch.teaches_N.nonzero().flatten().tolist()
            tokens = sum(len(batch.completions[n]) for n in teaching)
            notes.note(entropy=current.entropy_NT[teaching].sum(), entropy_tokens=tokens)
            if step.first and not step.stale:
                note_gap(batch, sequences, terms, notes)
        return -objective, notes

    def score(self, texts: Texts) -> dict[int, np.ndarray]:
        """Return the log-probabilities of the tokens of completions under the current model, by `row_N`."""

        def work(batch: Texts, counts: bool) -> dict[int, np.ndarray]:
            with torch.no_grad():
                scored = self.policy.scorer(batch.prompts, batch.completions, self.config.temperature)
            rows = zip(batch.row_N.tolist(), batch.completions, scored.logp_NT.double().cpu().numpy(), strict=True)
            return {row: logp_T[: len(ids)] for row, ids, logp_T in rows} if counts else {}

        return {row: logp_T for part in self.passes(self.batches(texts), work) for row, logp_T in part.items()}

    def score_within_memory(self, texts: Texts, step: int) -> dict[int, np.ndarray]:
        """Score texts outside of an update, with smaller batches if memory runs out."""
        with self.policy.driven():
            for attempt in self.attempts(step, learns=False):
                with attempt:
                    scored = self.score(texts)
        return scored

    def score_ahead(self, rollouts: list[Rollout], prompts: list[list[int]]) -> None:
        """Record the learner's current log-probabilities of its rollouts, before the updates that come first.

        It scores all rollouts if it recomputes log-probabilities; else one of each prompt, to check the sampler's.
        """
        chosen = [rollout for rollout in rollouts if self.config.recomputes_logprobs or rollout.index == 0]
        tokens = {row: rollout.token_ids for row, rollout in enumerate(chosen)}
        prompt_of = {row: rollout.prompt_index for row, rollout in enumerate(chosen)}
        texts = texts_of(dict(enumerate(prompts)), prompt_of, tokens)
        for row, logps in self.score_within_memory(texts, chosen[0].step).items():
            chosen[row].learner_logps = logps.tolist()

    def score_old(self, rollouts: Minibatch, minibatches: list[list[int]], stale: bool) -> int:
        """Score the rollouts whose ratio is taken to the learner before its first update; return the number of tokens.

        In bfloat16 the sampler's rounding differs from the learner's by more than the width of GSPO's clip, so own
        rollouts are scored too, or have been scored ahead when they were sampled. Rounding depends on what else is in a
        batch, so the batches are those of the coming updates, and each attempt scores anew.
        """
        wanted = self.config.recomputes_logprobs, self.algorithm.rescores_foreign
        old: dict[int, np.ndarray] = {}
        if wanted[0] and stale:
            wanted, old = (False, wanted[1]), ahead_of(rollouts)
        tokens = 0
        for positions in minibatches if any(wanted) else []:
            parts = zip(wanted, self.needed(rollouts[rollouts.rows_of(positions)]), strict=True)
            for part in [part for is_wanted, part in parts if is_wanted]:
                unknown = part[[n for n, row in enumerate(part.row_N.tolist()) if row not in old]]
                old |= self.score(unknown)
                tokens += unknown.num_tokens
        rollouts.set_old(old)
        return tokens
