"""Collecting the rollouts of a step: prompts, sampling, verification, dynamic sampling."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hacrl.config import RunConfig
from hacrl.execution.executor import Executor, Timed
from hacrl.rollouts.rollout import Rollout
from hacrl.sources.outside import OutsideSource
from hacrl.tasks import Task
from hacrl.tasks.problem import Problem
from hacrl.training.accounting import Accounts
from hacrl.training.asking import Asked, Asking
from hacrl.training.watcher import Watcher

Answered = tuple[Problem, list[list[Rollout]]]
"""A problem with every source's rollouts of it."""


@dataclass
class Collected:
    """Problems with every source's verified rollouts of them: those of the agents come first."""

    problems: list[Problem]
    rollouts: list[list[Rollout]]
    seconds: list[float]
    """Seconds that each agent sampled."""
    verify_seconds: float
    figures: list[Counter[str]] = field(default_factory=list)
    """What the sources that are no agents counted."""

    def group(self, position: int) -> list[list[Rollout]]:
        """Every source's rollouts of one problem."""
        return [[rollout for rollout in own if rollout.prompt_index == position] for own in self.rollouts]


class Collector:
    """Takes problems from the training stream, lets every source answer them and the verifier judge the answers."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        executor: Executor,
        accounts: Accounts,
        watcher: Watcher,
        sources: Sequence[OutsideSource] = (),
    ) -> None:
        self.config, self.task, self.executor = config, task, executor
        self.asking = Asking(config, sources)
        self.accounts, self.watcher = accounts, watcher
        self.ids = [agent.id for agent in config.agents]
        self.position = 0
        """How many problems of the training stream have been taken."""
        self.ahead: Collected | None = None
        """With overlap: the next step's rollouts, sampled ahead."""

    def collect(self, step: int) -> tuple[list[Problem], list[list[Rollout]], dict[str, Any]]:
        """Return the step's problems, every source's verified rollouts of them, and metrics.

        With dynamic sampling, prompts whose rewards are all equal are replaced by further ones, in at most
        `dynamic_sampling_rounds` rounds; if that is not enough, they stay.
        """
        config, wanted = self.config, self.config.prompts_per_step
        metrics: dict[str, Any] = {**self.task.metrics()}
        chosen, spare = list[Answered](), list[Answered]()
        batches: list[Collected] = []
        for sampling_round in range(config.dynamic_sampling_rounds if config.dynamic_sampling else 1):
            batch = self._next_batch(wanted - len(chosen), {p.id for p, _ in [*chosen, *spare]}, step, sampling_round)
            if batch is None:
                continue
            batches.append(batch)
            for position, problem in enumerate(batch.problems):
                group = batch.group(position)
                spread = len({r.reward for own in group for r in own if r.reward is not None}) > 1
                (chosen if spread or not config.dynamic_sampling else spare).append((problem, group))
            if len(chosen) == wanted:
                break
        self._observe(batches)
        discarded = len(chosen) + len(spare) - wanted
        chosen = [*chosen, *spare][:wanted]
        for position, (_, group) in enumerate(chosen):
            for rollout in chain.from_iterable(group):
                rollout.prompt_index = position
        sources = range(len(self.ids) + len(self.asking.sources))
        rollouts = [[r for _, group in chosen for r in group[k]] for k in sources]
        for k, agent_id in enumerate(self.ids):
            sampled = [rollout for batch in batches for rollout in batch.rollouts[k]]
            counted = self.accounts.add_sampled(k, sampled, sum((batch.seconds[k] for batch in batches), 0.0))
            metrics |= {f"{agent_id}/{name}": value for name, value in counted.items()}
        for m, source in enumerate(self.asking.sources):
            given = [rollout for batch in batches for rollout in batch.rollouts[len(self.ids) + m]]
            figures = sum((batch.figures[m] for batch in batches), Counter[str]())
            metrics |= self.asking.metrics(source, given, figures)
        metrics["time/verify"] = sum((batch.verify_seconds for batch in batches), 0.0)
        if config.dynamic_sampling:
            metrics["prompts_discarded"] = discarded
        return [problem for problem, _ in chosen], rollouts, metrics

    def _observe(self, batches: Sequence[Collected]) -> None:
        """Tell the task the rewards of its problems, which a curriculum depends on."""
        own = [(batch.problems, batch.rollouts[: len(self.ids)]) for batch in batches]
        sampled = [(problems, rollout) for problems, rollouts in own for rollout in chain.from_iterable(rollouts)]
        self.task.observe([(problems[r.prompt_index], r.reward) for problems, r in sampled if r.reward is not None])

    def _next_batch(self, count: int, known: set[str], step: int, sampling_round: int) -> Collected | None:
        """Return problems with rollouts: those sampled ahead, else further ones; None if the stream has no new ones."""
        if self.ahead is not None:
            batch, self.ahead = self.ahead, None
            return batch
        problems = [problem for problem in self.next_problems(count) if problem.id not in known]
        if not problems:
            return None
        self.watcher.on_phase("sampling")
        start = time.perf_counter()
        asked = self.asking.begin(problems, step, sampling_round)
        sampled = self.executor.sample(problems, step, sampling_round)
        self.accounts.note_waiting(start, sampled)
        self.watcher.on_phase("verifying")
        return self._verified(problems, sampled, asked, step, sampling_round)

    def next_problems(self, count: int) -> list[Problem]:
        problems = self.task.train(self.position, count)
        self.position += len(problems)
        return problems

    def keep_ahead(self, problems: list[Problem], sampled: Sequence[Timed[list[Rollout]]], step: int) -> None:
        """Verify the next step's rollouts while agents learn; the time of their sampling does not count as waiting."""
        asked = self.asking.begin(problems, step, 0)
        self.ahead = self._verified(problems, sampled, asked, step, 0)
        self.accounts.waited -= self.ahead.seconds

    def _verified(
        self,
        problems: list[Problem],
        sampled: Sequence[Timed[list[Rollout]]],
        asked: Asked,
        step: int,
        sampling_round: int,
    ) -> Collected:
        """Verify what the agents sampled; then what other sources give, which may depend on these rewards."""
        own = [answer.value for answer in sampled]
        spent = self._judge(problems, own)
        given = self.asking.finish(asked, problems, own, step, sampling_round)
        others = [one.rollouts for one in given]
        spent += self._judge(problems, others)
        seconds, figures = [answer.seconds for answer in sampled], [one.figures for one in given]
        return Collected(problems, [*own, *others], seconds, spent, figures)

    def _judge(self, problems: list[Problem], rollouts: Sequence[Sequence[Rollout]]) -> float:
        """Give each rollout its reward, unless it has one already; return the seconds that this took."""
        start = time.perf_counter()
        for new in ([rollout for rollout in own if rollout.reward is None] for own in rollouts):
            if not new:
                continue
            answered = [problems[rollout.prompt_index] for rollout in new]
            verdicts = self.task.score(answered, [r.text for r in new], [r.num_tokens for r in new])
            for rollout, verdict in zip(new, verdicts, strict=True):
                rollout.reward = verdict.reward
                if verdict.problem:
                    rollout.verdict = {"problem": verdict.problem, "detail": verdict.detail}
                elif len(verdict.parts) > 1:
                    rollout.verdict = {"reward_parts": verdict.parts}
        return time.perf_counter() - start

    # --- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Includes rollouts sampled ahead, because their policy is gone; their problems can be drawn again."""
        state = None
        if self.ahead is not None:
            state = {
                "rollouts": [[asdict(rollout) for rollout in own] for own in self.ahead.rollouts],
                "seconds": self.ahead.seconds,
                "verify_seconds": self.ahead.verify_seconds,
                "figures": self.ahead.figures,
            }
        sources = [source.state_dict() for source in self.asking.sources]
        return {"position": self.position, "task": self.task.state_dict(), "ahead": state, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the state; False if the task no longer gives the problems that were sampled ahead."""
        self.position = state["position"]
        self.task.load_state_dict(state["task"])
        for source, own in zip(self.asking.sources, state.get("sources", ()), strict=True):
            source.load_state_dict(own)
        ahead = state["ahead"]
        if ahead is None:
            return True
        count = self.config.prompts_per_step
        rollouts = [[Rollout(**rollout) for rollout in own] for own in ahead["rollouts"]]
        problems = self.task.train(self.position - count, count)
        figures = [Counter(own) for own in ahead.get("figures", [])]
        self.ahead = Collected(problems, rollouts, ahead["seconds"], ahead["verify_seconds"], figures)
        return all(problems[r.prompt_index].id == r.prompt_id for own in rollouts for r in own)


def nothing_verified(rollouts: Sequence[Sequence[Rollout]], folder: Path) -> str:
    """The error message if no rollout has a reward; `folder` has the lines of the rollouts."""
    details = [r.verdict["detail"] for own in rollouts for r in own if r.verdict.get("detail")]
    first = f" The first problem: {details[0]}." if details else ""
    failed = f"The verifier could judge none of {sum(map(len, rollouts))} rollouts, so there is nothing to learn from."
    return f"{failed}{first} Check task.reward on one of the lines of {folder}."
