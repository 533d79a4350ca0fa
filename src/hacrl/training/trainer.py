"""The HACRL step: prompts -> rollouts -> rewards -> capability -> advantages -> updates.

The trainer knows neither which algorithm it runs nor where the agents live: the algorithm answers what a
rollout is worth, the executor takes requests to the agents.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from hacrl.config import RunConfig
from hacrl.errors import UserError, warn
from hacrl.execution.executor import Executor, Timed
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import global_random_state, restore_global_random_state
from hacrl.sources.outside import OutsideSource
from hacrl.tasks import Task
from hacrl.tasks.problem import digest
from hacrl.training import checkpoint
from hacrl.training.accounting import ACCOUNTED, Accounts
from hacrl.training.collect import Collector, nothing_verified
from hacrl.training.health import Health
from hacrl.training.heldout import HeldOut
from hacrl.training.lessons import lesson_for
from hacrl.training.metrics import agent_metrics, exchange_metrics
from hacrl.training.records import rollout_lines, trace_lines
from hacrl.training.run_dir import RunDir
from hacrl.training.scoring import Scores, scores_of
from hacrl.training.watcher import Watcher

STATE = ("step", "position", "capability", "task", "totals", "times", "accuracy", "seconds", "random", "ahead")
"""Keys of the trainer's state that a checkpoint must have."""


class Trainer:
    def __init__(
        self,
        config: RunConfig,
        task: Task,
        executor: Executor,
        run: RunDir,
        watcher: Watcher,
        sources: Sequence[OutsideSource] = (),
    ) -> None:
        """`sources` are those that are no agents, in the order of the config."""
        self.config, self.executor, self.run, self.watcher = config, executor, run, watcher
        self.algorithm = config.algorithm
        self.ids = [agent.id for agent in config.agents]
        self.sources = sources
        self.names = [*self.ids, *(source.config.id for source in sources)]
        """All sources of rollouts: the agents, then the others."""
        self.tracker = self.algorithm.tracker(len(self.names))
        self.step = 0
        self.accounts = Accounts(len(self.ids))
        self.collector = Collector(config, task, executor, self.accounts, watcher, sources)
        self.heldout = HeldOut(config, task, executor, watcher)
        self.problems_digest = digest((*task.listed, *task.eval_problems))
        """Digest of the problems that are known beforehand."""
        self.health = Health(config)

    # --- the run -----------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Do all steps that are left, and return the summary of the run."""
        config = self.config
        if self.step == 0:
            self._log({"step": 0, **self.heldout.evaluate(0)})
        elif self.step == config.max_steps and self.step not in self.heldout.accuracy[0]:
            self._end_here()
        while self.step < config.max_steps:
            self.step += 1
            start = time.perf_counter()
            metrics = self.train_step()
            due = self._due(config.eval_every)
            if due:
                metrics |= self.heldout.evaluate(self.step)
            metrics["step_time"] = time.perf_counter() - start
            self.accounts.seconds += metrics["step_time"]
            metrics["time/elapsed"] = self.accounts.seconds
            self._log({"step": self.step, **metrics})
            for warning in self.health.warnings(metrics):
                warn(f"Step {self.step}: {warning}")
            best = due and config.keep_best and self.step == self.heldout.best_step()
            if best or self._due(config.save_every, at_the_end=config.save_final):
                self.save()
        summary = self.summary()
        self.run.write_summary(summary)
        return summary

    def _due(self, every: int, *, at_the_end: bool = True) -> bool:
        return at_the_end if self.step == self.config.max_steps else every > 0 and self.step % every == 0

    def _end_here(self) -> None:
        """Evaluate the last step of a run that has been made shorter: it was not evaluated as the last step."""
        start = time.perf_counter()
        metrics = self.heldout.evaluate(self.step)
        self.accounts.seconds += time.perf_counter() - start
        metrics["time/elapsed"] = self.accounts.seconds
        self.run.amend_metrics(self.step, metrics)
        self.watcher.on_metrics(self.step, {"step": self.step, **metrics})

    def _log(self, metrics: dict[str, Any]) -> None:
        self.run.append_metrics(metrics)
        self.watcher.on_metrics(self.step, metrics)

    # --- one step ----------------------------------------------------------------------------------

    def train_step(self) -> dict[str, Any]:
        """Do one step, algorithm 1 of the paper, and return its metrics."""
        self.accounts.start_step()
        problems, rollouts, metrics = self.collector.collect(self.step)
        # Written before anything can go wrong with them.
        self.run.write_step("rollouts", self.step, rollout_lines(self.names, rollouts))

        valid = [[rollout for rollout in own if rollout.reward is not None] for own in rollouts]
        measured = [True] * len(self.ids) + [source.is_measured for source in self.sources]
        performances = [self._performance(*pair) for pair in zip(self.names, valid, strict=True)]
        self.tracker.update([p if m else None for p, m in zip(performances, measured, strict=True)])
        capabilities = self.tracker.capabilities()
        omega_KK = self.algorithm.omega(capabilities)

        agents = slice(len(self.ids))
        if not any(valid[agents]):
            raise UserError(nothing_verified(rollouts[agents], self.run.path / "rollouts"))
        scores = self._score(valid[agents], capabilities[agents])
        made = [lesson_for(k, self.step, self.config, problems, valid, omega_KK, scores) for k in range(len(self.ids))]
        lessons = [lesson for lesson, _ in made]
        learned = self._learn(lessons)
        results = [answer.value for answer in learned]

        for k, answer in enumerate(learned):
            seconds, tokens = (scores.seconds[k], scores.tokens[k]) if scores else (0.0, 0)
            counted = self.accounts.add_learned(k, answer, seconds, tokens)
            own = agent_metrics(problems, rollouts[k], k, *made[k], answer.value)
            own |= {"capability": capabilities[k], **counted}
            if self.algorithm.shares_rollouts:
                own |= exchange_metrics(k, self.names, lessons[k], answer.value, omega_KK)
            if scores:
                own |= scores.metrics(k, self.ids)
            metrics |= {f"{self.ids[k]}/{name}": value for name, value in own.items()}
        self.run.write_step("rollouts", self.step, rollout_lines(self.names, rollouts, self.ids, lessons, results))
        if self.config.trace:
            self.run.write_step("trace", self.step, trace_lines(self.names, lessons, results))
        return metrics

    def _performance(self, name: str, rollouts: Sequence[Rollout]) -> float | None:
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        try:
            return self.algorithm.performance(rewards) if len(rewards) else None
        except ValueError as error:
            raise UserError(f"The rewards of {name}: {error}.") from None

    def _score(self, rollouts: list[list[Rollout]], capabilities: list[float | None]) -> Scores | None:
        """Let other agents score each learner's rollouts, if the algorithm asks for it."""
        if not self.algorithm.scores_by_others:
            return None
        self.watcher.on_phase("scoring")
        start = time.perf_counter()
        scores, answers = scores_of(self.algorithm, rollouts, capabilities, self.executor)
        self.accounts.note_waiting(start, answers)
        return scores

    def _learn(self, lessons: list[Lesson]) -> list[Timed[LearnResult]]:
        """Let agents learn. With overlap, they first sample the next step's rollouts, which are verified meanwhile."""
        self.watcher.on_phase("learning")
        start = time.perf_counter()
        if self.config.overlap and self.step < self.config.max_steps:
            problems = self.collector.next_problems(self.config.prompts_per_step)
            learned = self.executor.sample_and_learn(
                problems,
                self.step + 1,
                lessons,
                lambda sampled: self.collector.keep_ahead(problems, sampled, self.step + 1),
            )
        else:
            learned = self.executor.learn(lessons)
        self.accounts.note_waiting(start, learned)
        return learned

    # --- files -------------------------------------------------------------------------------------

    def save(self) -> None:
        self.watcher.on_phase("saving")
        checkpoint.save_checkpoint(self.run.path, self.step, self.state_dict(), self.executor.save)
        best = self.heldout.best_step() if self.config.keep_best else None
        checkpoint.prune(self.run.path, self.config.save_total_limit, best)

    def resume(self) -> None:
        """Go back to the newest whole checkpoint, or to the start if there is none."""
        self.watcher.on_phase("checking")
        found = checkpoint.to_continue_from(self.run.path)
        if found:
            self.load_state_dict(checkpoint.load_state(found, STATE))
            self.executor.load(found)
        self.run.rewind(self.step if found else -1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "capability": self.tracker.state_dict(),
            "problems": self.problems_digest,
            **self.collector.state_dict(),
            **self.accounts.state_dict(),
            **self.heldout.state_dict(),
            "random": global_random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = state.get("problems", self.problems_digest) == self.problems_digest
        if not known or not self.collector.load_state_dict(state):
            raise UserError(
                f"{self.run.path} cannot be continued: its task no longer gives the problems that the run was started "
                "with: data or the version of a package has changed. Put that back, or start a new run with another "
                "output_dir."
            )
        self.step = state["step"]
        self.tracker.load_state_dict(state["capability"])
        self.accounts.load_state_dict(state)
        self.heldout.load_state_dict(state)
        restore_global_random_state(state["random"])

    def summary(self) -> dict[str, Any]:
        accounts = self.accounts
        agents = {
            agent.id: {
                "model": agent.model,
                **self.heldout.summary(k),
                **accounts.totals[k],
                **accounts.times[k],
                "peak_memory_gib": self.executor.peak_memory[k],
            }
            for k, agent in enumerate(self.config.agents)
        }
        return {
            "algorithm": self.algorithm.name,
            "steps": self.step,
            "seconds": accounts.seconds,
            "wall_seconds": accounts.wall_seconds(),
            **{name: sum(own[name] for own in accounts.totals) for name in ACCOUNTED},
            "peak_memory_gib": self.executor.run_peak_memory(),
            "best_step": self.heldout.best_step(),
            "agents": agents,
            **({"sources": {source.config.id: source.totals for source in self.sources}} if self.sources else {}),
        }
