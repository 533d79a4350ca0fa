"""The HACRL step: prompts -> rollouts -> rewards -> capability -> advantages -> updates.

The trainer knows neither which algorithm it runs nor where the agents live: the algorithm answers what a
rollout is worth, the executor takes requests to the agents.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hacrl.algorithms import Advantages
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError, warn
from hacrl.execution.executor import Executor
from hacrl.learners.learner import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import NUMBER, SHUFFLE, global_random_state, permutation, restore_global_random_state
from hacrl.tasks import Task
from hacrl.tasks.problem import Problem, digest
from hacrl.training import checkpoint
from hacrl.training.health import CollaborationCheck
from hacrl.training.metrics import (
    accuracy_metrics,
    baseline_metrics,
    learning_metrics,
    pair_metrics,
    reward_of_parts,
    sampling_metrics,
    verification_metrics,
)
from hacrl.training.records import rollout_lines, trace_lines
from hacrl.training.run_dir import RunDir
from hacrl.training.schedule import learning_rate
from hacrl.training.scoring import Scores, scores_of

ACCOUNTED = ("rollouts", "tokens", "tokens_trained", "tokens_forward", "updates")
"""What a result has cost, besides time and memory."""


STATE = ("step", "position", "capability", "task", "totals", "times", "accuracy", "seconds", "random", "ahead")
"""What a checkpoint must say about the trainer."""


class Watcher(Protocol):
    """Somebody who looks at a run while it goes on."""

    def on_phase(self, phase: str) -> None: ...
    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...


@dataclass
class Sampled:
    """Problems with every agent's verified rollouts of them."""

    problems: list[Problem]
    rollouts: list[list[Rollout]]
    seconds: list[float]
    """Seconds that each agent sampled."""
    verify_seconds: float


class Trainer:
    def __init__(self, config: RunConfig, task: Task, executor: Executor, run: RunDir, watcher: Watcher) -> None:
        self.config, self.task, self.executor, self.run, self.watcher = config, task, executor, run, watcher
        self.algorithm = config.algorithm
        self.ids = [agent.id for agent in config.agents]
        self.tracker = self.algorithm.tracker(len(self.ids))
        self.step = 0
        self.position = 0
        """How many problems of the training stream have been taken."""
        self.ahead: Sampled | None = None
        """With overlap: the next step's rollouts."""
        self.waited = np.zeros(len(self.ids))
        """Seconds of this step's sampling and learning in which each agent had nothing to do."""
        self.totals: list[Counter[str]] = [Counter() for _ in self.ids]
        """Rollouts, tokens and updates of each agent so far."""
        self.times = [{"sample_seconds": 0.0, "learn_seconds": 0.0} for _ in self.ids]
        """Seconds each agent sampled and learned; what it scored for others counts as learning."""
        self.accuracy: list[dict[int, float]] = [{} for _ in self.ids]
        """Held-out accuracy of each agent by step."""
        self.sampled: list[dict[int, float]] = [{} for _ in self.ids]
        """Mean reward of sampled held-out answers, of each agent by step."""
        self.seconds = 0.0
        self.problems_digest = digest((*task.listed, *task.eval_problems))
        """Digest of the problems that are known beforehand."""
        self.check = CollaborationCheck(self.ids, self.algorithm)

    # --- the run -----------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        if self.step == 0:
            self._log({"step": 0, **self.evaluate()})
        elif self.step == self.config.max_steps and self.step not in self.accuracy[0]:
            self._end_here()
        while self.step < self.config.max_steps:
            self.step += 1
            start = time.perf_counter()
            metrics = self.train_step()
            due = self._due(self.config.eval_every)
            if due:
                metrics |= self.evaluate()
            metrics["step_time"] = time.perf_counter() - start
            self.seconds += metrics["step_time"]
            metrics["time/elapsed"] = self.seconds
            self._log({"step": self.step, **metrics})
            for warning in self.check.warnings(metrics):
                warn(f"Step {self.step}: {warning}")
            best = due and self.config.keep_best and self.step == self._best_step()
            if best or self._due(self.config.save_every, at_the_end=self.config.save_final):
                self.save()
        summary = self.summary()
        self.run.write_summary(summary)
        return summary

    def _end_here(self) -> None:
        """The run was to be longer than it is now: its last step lacks the evaluation."""
        start = time.perf_counter()
        metrics = self.evaluate()
        self.seconds += time.perf_counter() - start
        metrics["time/elapsed"] = self.seconds
        self.run.amend_metrics(self.step, metrics)
        self.watcher.on_metrics(self.step, {"step": self.step, **metrics})

    def train_step(self) -> dict[str, Any]:
        """Algorithm 1 of the paper."""
        self.waited[:] = 0
        problems, rollouts, metrics = self._collect()
        performances = [self._performance(own) for own in rollouts]
        self.tracker.update(performances)
        capabilities = self.tracker.capabilities()
        omega_KK = self.algorithm.omega(capabilities)

        everybodys = [rollout for own in rollouts for rollout in own if rollout.reward is not None]
        if not everybodys:
            raise UserError(self._nothing_verified(rollouts))
        scores, score_seconds = self._score(rollouts, capabilities)
        lessons, advantages = [], []
        for k, agent in enumerate(self.config.agents):
            used = [r for r in everybodys if self.algorithm.shares_rollouts or r.source == k]
            lesson, advantage = self._lesson(agent, k, problems, used, omega_KK)
            lesson.examples = self._examples(k, everybodys)
            if scores:
                lesson.token_advantages = scores.token_advantages[k]
            lessons.append(lesson)
            advantages.append(advantage)
        results = self._learn(lessons)
        learn_seconds = list(self.executor.seconds)

        for k, agent_id in enumerate(self.ids):
            self._count(k, results[k])
            self.times[k]["learn_seconds"] += score_seconds[k] + learn_seconds[k]
            agent_metrics: dict[str, Any] = {
                **sampling_metrics(rollouts[k]),
                **reward_of_parts(rollouts[k], problems),
                **learning_metrics(results[k], lessons[k], k),
                **baseline_metrics(advantages[k]),
                "capability": capabilities[k],
                "num_tokens": self.totals[k]["tokens"],
                "num_rollouts": self.totals[k]["rollouts"],
                "num_updates": self.totals[k]["updates"],
                "time/learn": learn_seconds[k],
                "time/wait": float(self.waited[k]),
            }
            if self.algorithm.shares_rollouts:
                pairs = pair_metrics(results[k], lessons[k], len(self.ids))
                for j, (source_id, pair) in enumerate(zip(self.ids, pairs, strict=True)):
                    if j != k:
                        pair["omega"] = float(omega_KK[j, k])
                        pair["omega_baseline"] = float(omega_KK[k, j])
                        agent_metrics |= {f"from_{source_id}/{name}": value for name, value in pair.items()}
            self.totals[k]["tokens_forward"] += scores.tokens[k] if scores else 0
            if scores:
                agent_metrics |= {"tokens_scored": scores.tokens[k], "time/score": score_seconds[k]}
                for j, pair in scores.pairs[k].items():
                    agent_metrics |= {f"from_{self.ids[j]}/{name}": value for name, value in pair.items()}
            metrics |= {f"{agent_id}/{name}": value for name, value in agent_metrics.items()}
        self.run.write_step("rollouts", self.step, rollout_lines(self.ids, rollouts, lessons, results))
        if self.config.trace:
            learned = zip(self.ids, lessons, results, strict=True)
            lines = [line for own in learned for line in trace_lines(self.step, self.ids, *own)]
            self.run.write_step("trace", self.step, lines)
        return metrics

    # --- one step ----------------------------------------------------------------------------------

    def _collect(self) -> tuple[list[Problem], list[list[Rollout]], dict[str, Any]]:
        """The step's problems and every agent's verified rollouts of them.

        With dynamic sampling, prompts whose rewards are all equal make room for further ones, in at most
        `dynamic_sampling_rounds` rounds; if that is not enough, they stay.
        """
        wanted = self.config.prompts_per_step
        rounds = self.config.dynamic_sampling_rounds if self.config.dynamic_sampling else 1
        chosen: list[tuple[Problem, list[list[Rollout]]]] = []
        spare: list[tuple[Problem, list[list[Rollout]]]] = []
        metrics: dict[str, Any] = {**self.task.metrics()}
        judged: list[tuple[Problem, float]] = []
        sampled: list[list[Rollout]] = [[] for _ in self.ids]
        seconds = np.zeros(len(self.ids))
        verify_seconds = 0.0
        for sampling_round in range(rounds):
            if self.ahead is None:
                problems = self._next_problems(wanted - len(chosen))
                known = {problem.id for problem, _ in [*chosen, *spare]}
                problems = [problem for problem in problems if problem.id not in known]
                if not problems:
                    continue
                batch = self._sample(problems, sampling_round)
            else:
                batch, self.ahead = self.ahead, None
            problems, rollouts = batch.problems, batch.rollouts
            seconds += batch.seconds
            verify_seconds += batch.verify_seconds
            for own, new in zip(sampled, rollouts, strict=True):
                own.extend(new)
                judged += [(problems[r.prompt_index], r.reward) for r in new if r.reward is not None]
            for position, problem in enumerate(problems):
                group = [[r for r in own if r.prompt_index == position] for own in rollouts]
                spread = len({r.reward for own in group for r in own if r.reward is not None}) > 1
                (chosen if spread or not self.config.dynamic_sampling else spare).append((problem, group))
            if len(chosen) == wanted:
                break
        self.task.observe(judged)
        discarded = len(chosen) + len(spare) - wanted
        chosen = [*chosen, *spare][:wanted]
        for position, (_, group) in enumerate(chosen):
            for own in group:
                for rollout in own:
                    rollout.prompt_index = position
        rollouts = [[r for _, group in chosen for r in group[k]] for k in range(len(self.ids))]
        for k, own in enumerate(sampled):
            tokens = sum(rollout.num_tokens for rollout in own)
            self.totals[k]["rollouts"] += len(own)
            self.totals[k]["tokens"] += tokens
            verified = verification_metrics(own)
            self.totals[k]["unverified"] += verified["unverified"]
            metrics |= {f"{self.ids[k]}/{name}": count for name, count in verified.items()}
            self.times[k]["sample_seconds"] += float(seconds[k])
            metrics[f"{self.ids[k]}/time/sample"] = float(seconds[k])
            metrics[f"{self.ids[k]}/time/tokens_per_second"] = tokens / max(float(seconds[k]), 1e-9)
        metrics["time/verify"] = verify_seconds
        if self.config.dynamic_sampling:
            metrics["prompts_discarded"] = discarded
        # Before anything can go wrong with them.
        self.run.write_step("rollouts", self.step, rollout_lines(self.ids, rollouts))
        return [problem for problem, _ in chosen], rollouts, metrics

    def _next_problems(self, count: int) -> list[Problem]:
        problems = self.task.train(self.position, count)
        self.position += len(problems)
        return problems

    def _sample(self, problems: list[Problem], sampling_round: int) -> Sampled:
        self.watcher.on_phase("sampling")
        start = time.perf_counter()
        rollouts = self.executor.sample(problems, self.step, sampling_round)
        self.waited += time.perf_counter() - start - np.array(self.executor.seconds)
        self.watcher.on_phase("verifying")
        return self._verified(problems, rollouts)

    def _score(
        self, rollouts: list[list[Rollout]], capabilities: list[float | None]
    ) -> tuple[Scores | None, list[float]]:
        """What others say of each learner's rollouts, if the algorithm asks for it; and each agent's seconds."""
        if not self.algorithm.scores_by_others:
            return None, [0.0] * len(self.ids)
        self.watcher.on_phase("scoring")
        start = time.perf_counter()
        valid = [[rollout for rollout in own if rollout.reward is not None] for own in rollouts]
        scores = scores_of(self.algorithm, valid, capabilities, self.executor)
        seconds = list(self.executor.seconds)
        self.waited += time.perf_counter() - start - np.array(seconds)
        return scores, seconds

    def _learn(self, lessons: list[Lesson]) -> list[LearnResult]:
        """With overlap, every agent samples the next step's rollouts first; they are verified while agents learn."""
        self.watcher.on_phase("learning")
        start = time.perf_counter()
        if self.config.overlap and self.step < self.config.max_steps:
            problems = self._next_problems(self.config.prompts_per_step)

            def on_sampled(rollouts: list[list[Rollout]]) -> None:
                self.ahead = self._verified(problems, rollouts)
                self.waited -= self.ahead.seconds

            results = self.executor.sample_and_learn(problems, self.step + 1, lessons, on_sampled)
        else:
            results = self.executor.learn(lessons)
        self.waited += time.perf_counter() - start - np.array(self.executor.seconds)
        return results

    def _verified(self, problems: list[Problem], rollouts: list[list[Rollout]]) -> Sampled:
        """What the executor has just sampled."""
        seconds = list(self.executor.seconds)
        start = time.perf_counter()
        for own in rollouts:
            self._verify(problems, own)
        return Sampled(problems, rollouts, seconds, time.perf_counter() - start)

    def _verify(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> None:
        verdicts = self.task.score(
            [problems[rollout.prompt_index] for rollout in rollouts],
            [rollout.text for rollout in rollouts],
            [rollout.num_tokens for rollout in rollouts],
        )
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            rollout.reward = verdict.reward
            if verdict.problem:
                rollout.verdict = {"problem": verdict.problem, "detail": verdict.detail}
            elif len(verdict.parts) > 1:
                rollout.verdict = {"reward_parts": verdict.parts}

    def _performance(self, rollouts: Sequence[Rollout]) -> float | None:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if not rewards:
            return None
        try:
            return self.algorithm.performance(torch.tensor(rewards, dtype=torch.float64))
        except ValueError as error:
            raise UserError(f"task.reward: {error}.") from None

    def _lesson(
        self, agent: AgentConfig, k: int, problems: list[Problem], used: list[Rollout], omega_KK: torch.Tensor
    ) -> tuple[Lesson, Advantages]:
        source_N = torch.tensor([rollout.source for rollout in used], dtype=torch.long)
        # Positions follow the task, whose parts may alternate; an algorithm that chooses by number must not.
        number_P = permutation(len(problems), self.config.seed, NUMBER, self.step)
        prompt_N = torch.tensor([number_P[rollout.prompt_index] for rollout in used], dtype=torch.long)
        rewards_N = torch.tensor([rollout.reward for rollout in used], dtype=torch.float64)
        advantages = self.algorithm.advantages(rewards_N, prompt_N, source_N, k, omega_KK)
        lesson = Lesson(
            step=self.step,
            prompts=[problem.prompt for problem in problems],
            rollouts=used,
            advantage_N=advantages.advantage_N,
            omega_N=self.algorithm.coefficients(source_N, k, omega_KK),
            minibatches=self.minibatches(agent) if self.algorithm.reinforces(self.step, self.config.max_steps) else [],
            learning_rate=learning_rate(agent, self.step, self.config.max_steps),
            imitates=self.algorithm.imitation.due(self.step, self.config.max_steps),
        )
        in_step = self.algorithm.imitation.when == "step"
        lesson.imitation_rate = lesson.learning_rate if in_step else agent.learning_rate
        return lesson, advantages

    def _examples(self, learner: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The step's right answers that a learner keeps for imitation."""
        imitation = self.algorithm.imitation
        if not self.algorithm.keeps_answers(self.step, self.config.max_steps):
            return []
        right = [r for r in rollouts if imitation.is_right(r.reward) and r.finish_reason == "stop"]
        if imitation.answers == "all":
            return right
        return [rollout for rollout in right if (rollout.source == learner) == (imitation.answers == "own")]

    def minibatches(self, agent: AgentConfig) -> list[list[int]]:
        """Prompt positions of each update, all passes in a row; seed and step alone decide the order."""
        parts = []
        for iteration in range(agent.num_iterations):
            order = permutation(self.config.prompts_per_step, self.config.seed, SHUFFLE, self.step, iteration)
            parts += [part.tolist() for part in np.array_split(order, self.config.updates_per_step(agent))]
        return parts

    def _nothing_verified(self, rollouts: Sequence[Sequence[Rollout]]) -> str:
        details = [r.verdict["detail"] for own in rollouts for r in own if r.verdict.get("detail")]
        first = f" The first problem: {details[0]}." if details else ""
        return (
            f"The verifier could judge none of {sum(map(len, rollouts))} rollouts, so there is "
            f"nothing to learn from.{first} Check task.reward on one of the lines of {self.run.path / 'rollouts'}."
        )

    def _count(self, k: int, result: LearnResult) -> None:
        self.totals[k]["updates"] += int(result.metrics["updates"])
        self.totals[k]["updates"] += int(result.metrics.get("imitation/updates", 0))
        self.totals[k]["tokens_trained"] += int(result.metrics["tokens_trained"])
        self.totals[k]["tokens_trained"] += int(result.metrics.get("imitation/tokens", 0))
        self.totals[k]["tokens_forward"] += int(result.metrics["tokens_forward"])
        self.totals[k]["tokens_forward"] += int(result.metrics.get("imitation/tokens", 0))
        self.totals[k]["dropped"] += len(result.dropped)
        self.totals[k]["nonfinite_updates"] += int(result.metrics["nonfinite_updates"])

    # --- held-out problems -------------------------------------------------------------------------

    def evaluate(self) -> dict[str, Any]:
        """Accuracy of every agent on the held-out problems: greedy and, if asked for, sampled as in training."""
        problems = self.task.eval_problems
        if not problems:
            return {}
        self.watcher.on_phase("evaluating")
        metrics = self._evaluate(problems)
        if self.config.eval_samples:
            of_samples = self._evaluate(problems * self.config.eval_samples, sampled=True)
            for agent in self.ids:
                of_samples[f"{agent}/time/eval"] += metrics[f"{agent}/time/eval"]
            metrics |= of_samples
        return metrics

    def _evaluate(self, problems: list[Problem], sampled: bool = False) -> dict[str, Any]:
        """The mean reward of what was judged, of all problems and of each part of a mixture."""
        name, unverified, history = "eval_accuracy", "eval_unverified", self.accuracy
        if sampled:
            name, unverified, history = "eval_sampled", "eval_sampled_unverified", self.sampled
        metrics: dict[str, Any] = {}
        for k, texts in enumerate(self.executor.answer(problems, sampled)):
            verdicts = self.task.score(problems, texts)
            found = accuracy_metrics(name, problems, verdicts)
            if name in found:
                history[k][self.step] = found[name]
            found[unverified] = sum(verdict.reward is None for verdict in verdicts)
            found["time/eval"] = self.executor.seconds[k]
            metrics |= {f"{self.ids[k]}/{key}": value for key, value in found.items()}
        return metrics

    def _best_step(self) -> int | None:
        """The step at which the mean accuracy over agents was highest; the earliest of equals."""
        steps = [step for step in self.accuracy[0] if step > 0 and all(step in own for own in self.accuracy)]
        means = {step: float(np.mean([own[step] for own in self.accuracy])) for step in sorted(steps)}
        return max(means, key=means.__getitem__) if means else None

    def _due(self, every: int, *, at_the_end: bool = True) -> bool:
        return at_the_end if self.step == self.config.max_steps else every > 0 and self.step % every == 0

    # --- files -------------------------------------------------------------------------------------

    def _log(self, metrics: dict[str, Any]) -> None:
        self.run.append_metrics(metrics)
        self.watcher.on_metrics(self.step, metrics)

    def save(self) -> None:
        self.watcher.on_phase("saving")
        checkpoint.save_checkpoint(self.run.path, self.step, self.state_dict(), self.executor.save)
        best = self._best_step() if self.config.keep_best else None
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
            "position": self.position,
            "capability": self.tracker.state_dict(),
            "task": self.task.state_dict(),
            "problems": self.problems_digest,
            "totals": self.totals,
            "times": self.times,
            "accuracy": [list(own.items()) for own in self.accuracy],
            "sampled": [list(own.items()) for own in self.sampled],
            "seconds": self.seconds,
            "random": global_random_state(),
            # The problems can be drawn again; the policy that sampled these rollouts is gone.
            "ahead": None
            if self.ahead is None
            else {
                "rollouts": [[asdict(rollout) for rollout in own] for own in self.ahead.rollouts],
                "seconds": self.ahead.seconds,
                "verify_seconds": self.ahead.verify_seconds,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        changed = UserError(
            f"{self.run.path} cannot be continued: its task no longer gives the problems that the run was started "
            "with: data or the version of a package has changed. Put that back, or start a new run with another "
            "output_dir."
        )
        if state.get("problems", self.problems_digest) != self.problems_digest:
            raise changed
        self.step, self.position, self.seconds = state["step"], state["position"], state["seconds"]
        self.tracker.load_state_dict(state["capability"])
        self.task.load_state_dict(state["task"])
        self.totals = [Counter(own) for own in state["totals"]]
        self.times = state["times"]
        self.accuracy = [dict(own) for own in state["accuracy"]]
        self.sampled = [dict(own) for own in state.get("sampled", [])] or self.sampled
        ahead = state["ahead"]
        if ahead is not None:
            count = self.config.prompts_per_step
            rollouts = [[Rollout(**rollout) for rollout in own] for own in ahead["rollouts"]]
            problems = self.task.train(self.position - count, count)
            if any(problems[rollout.prompt_index].id != rollout.prompt_id for own in rollouts for rollout in own):
                raise changed
            self.ahead = Sampled(problems, rollouts, ahead["seconds"], ahead["verify_seconds"])
        restore_global_random_state(state["random"])

    def summary(self) -> dict[str, Any]:
        agents = {}
        for k, agent in enumerate(self.config.agents):
            agents[agent.id] = {
                "model": agent.model,
                **first_and_last(self.accuracy[k], "accuracy"),
                **(first_and_last(self.sampled[k], "sampled") if self.config.eval_samples else {}),
                **self.totals[k],
                **self.times[k],
                "peak_memory_gib": self.executor.peak_memory[k],
            }
        return {
            "algorithm": self.algorithm.name,
            "steps": self.step,
            "seconds": self.seconds,
            **{name: sum(own[name] for own in self.totals) for name in ACCOUNTED},
            "peak_memory_gib": self.executor.run_peak_memory(),
            "best_step": self._best_step(),
            "agents": agents,
        }


def first_and_last(values: dict[int, float], name: str) -> dict[str, float | None]:
    """The first and the last of values by step."""
    return {f"start_{name}": values.get(0), f"final_{name}": values[max(values)] if values else None}
