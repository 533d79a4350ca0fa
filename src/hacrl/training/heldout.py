"""Accuracy of the agents on held-out problems, during a run."""

from typing import Any

import numpy as np

from hacrl.config import RunConfig
from hacrl.execution.executor import Executor
from hacrl.tasks import Task
from hacrl.tasks.problem import Problem
from hacrl.training.metrics import accuracy_metrics
from hacrl.training.watcher import Watcher

History = list[dict[int, float]]
"""For each agent, a value by step."""


class HeldOut:
    """Evaluates the agents on held-out problems, and keeps the results."""

    def __init__(self, config: RunConfig, task: Task, executor: Executor, watcher: Watcher) -> None:
        self.config, self.task, self.executor, self.watcher = config, task, executor, watcher
        self.ids = [agent.id for agent in config.agents]
        self.accuracy: History = [{} for _ in self.ids]
        """Accuracy of greedy answers."""
        self.sampled: History = [{} for _ in self.ids]
        """Mean reward of sampled answers."""

    def evaluate(self, step: int) -> dict[str, Any]:
        """Measure every agent's accuracy on held-out problems: greedy and, if asked for, sampled as in training."""
        problems = self.task.eval_problems
        if not problems:
            return {}
        self.watcher.on_phase("evaluating")
        metrics = self._evaluate(step, problems, sampled=False)
        if self.config.eval_samples:
            of_samples = self._evaluate(step, problems * self.config.eval_samples, sampled=True)
            for agent in self.ids:
                of_samples[f"{agent}/time/eval"] += metrics[f"{agent}/time/eval"]
            metrics |= of_samples
        return metrics

    def _evaluate(self, step: int, problems: list[Problem], sampled: bool) -> dict[str, Any]:
        """Measure the mean reward of the judged answers, over all problems and over each part of a mixture."""
        name, unverified, history = "eval_accuracy", "eval_unverified", self.accuracy
        if sampled:
            name, unverified, history = "eval_sampled", "eval_sampled_unverified", self.sampled
        metrics: dict[str, Any] = {}
        for k, answer in enumerate(self.executor.answer(problems, sampled)):
            verdicts = self.task.score(problems, answer.value)
            found: dict[str, Any] = accuracy_metrics(name, problems, verdicts)
            if name in found:
                history[k][step] = found[name]
            found[unverified] = sum(verdict.reward is None for verdict in verdicts)
            found["time/eval"] = answer.seconds
            metrics |= {f"{self.ids[k]}/{key}": value for key, value in found.items()}
        return metrics

    def best_step(self) -> int | None:
        """The step at which the mean accuracy over agents was highest; the earliest of equals."""
        steps = [step for step in self.accuracy[0] if step > 0 and all(step in own for own in self.accuracy)]
        means = {step: float(np.mean([own[step] for own in self.accuracy])) for step in sorted(steps)}
        return max(means, key=means.__getitem__) if means else None

    def summary(self, k: int) -> dict[str, float | None]:
        """The first and the last accuracy of one agent, greedy and, if measured, sampled."""
        found = first_and_last(self.accuracy[k], "accuracy")
        return found | (first_and_last(self.sampled[k], "sampled") if self.config.eval_samples else {})

    def state_dict(self) -> dict[str, Any]:
        return {
            "accuracy": [list(own.items()) for own in self.accuracy],
            "sampled": [list(own.items()) for own in self.sampled],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accuracy = [dict(own) for own in state["accuracy"]]
        self.sampled = [dict(own) for own in state.get("sampled", [])] or self.sampled


def first_and_last(values: dict[int, float], name: str) -> dict[str, float | None]:
    """The values of step 0 and of the last step."""
    return {f"start_{name}": values.get(0), f"final_{name}": values[max(values)] if values else None}
