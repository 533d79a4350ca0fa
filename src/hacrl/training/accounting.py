"""What a run has cost: rollouts, tokens, updates and seconds of each agent."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hacrl.execution.executor import Timed
from hacrl.learners.lesson import LearnResult
from hacrl.rollouts.rollout import Rollout
from hacrl.training.records import Costs

ACCOUNTED = tuple(Costs.__annotations__)


class Accounts:
    """Counts for each agent, from the start of the run; checkpoints hold them."""

    def __init__(self, num_agents: int) -> None:
        self.totals: list[Counter[str]] = [Counter() for _ in range(num_agents)]
        """Rollouts, tokens and updates of each agent so far."""
        self.times = [{"sample_seconds": 0.0, "learn_seconds": 0.0} for _ in range(num_agents)]
        """Seconds that each agent sampled and learned; scoring for others counts as learning."""
        self.seconds = 0.0
        """Seconds of all steps."""
        self.began = time.monotonic()
        """When this process began, or continued, the run."""
        self.earlier = 0.0
        """Seconds until the checkpoint that the run was continued from."""
        self.waited = np.zeros(num_agents)
        """Seconds of this step's sampling and learning in which each agent had nothing to do."""

    def start_step(self) -> None:
        self.waited[:] = 0

    def note_waiting(self, start: float, answers: Sequence[Timed[Any]]) -> None:
        """Add the time that each agent waited: all were asked at `start`, and the last answer has just come."""
        self.waited += time.perf_counter() - start - np.array([answer.seconds for answer in answers])

    def add_sampled(self, k: int, rollouts: Sequence[Rollout], seconds: float) -> dict[str, Any]:
        """Count what an agent sampled in a step, and return metrics of it."""
        tokens = sum(rollout.num_tokens for rollout in rollouts)
        verified = {
            "unverified": sum(rollout.reward is None for rollout in rollouts),
            "verifier_errors": sum(rollout.verdict.get("problem") == "error" for rollout in rollouts),
            "verifier_timeouts": sum(rollout.verdict.get("problem") == "timeout" for rollout in rollouts),
        }
        self.totals[k].update(rollouts=len(rollouts), tokens=tokens, unverified=verified["unverified"])
        self.times[k]["sample_seconds"] += seconds
        return {**verified, "time/sample": seconds, "time/tokens_per_second": tokens / max(seconds, 1e-9)}

    def add_learned(self, k: int, answer: Timed[LearnResult], scoring: float, tokens_scored: int) -> dict[str, Any]:
        """Count what an agent learned from in a step and what it scored for others, and return metrics of it."""
        metrics, own = answer.value.metrics, self.totals[k]
        imitated = int(metrics.get("imitation/tokens", 0))
        own.update(
            updates=int(metrics["updates"]) + int(metrics.get("imitation/updates", 0)),
            tokens_trained=int(metrics["tokens_trained"]) + imitated,
            tokens_forward=int(metrics["tokens_forward"]) + imitated + tokens_scored,
            dropped=len(answer.value.dropped),
            nonfinite_updates=int(metrics["nonfinite_updates"]),
        )
        self.times[k]["learn_seconds"] += scoring + answer.seconds
        so_far = {"num_tokens": own["tokens"], "num_rollouts": own["rollouts"], "num_updates": own["updates"]}
        return {**so_far, "time/learn": answer.seconds, "time/wait": float(self.waited[k])}

    def wall_seconds(self) -> float:
        """Seconds that the run has taken in all, with loading, the first evaluation and saving."""
        return self.earlier + time.monotonic() - self.began

    def state_dict(self) -> dict[str, Any]:
        seconds = {"seconds": self.seconds, "wall_seconds": self.wall_seconds()}
        return {"totals": self.totals, "times": self.times, **seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = [Counter(own) for own in state["totals"]]
        self.times, self.seconds = state["times"], state["seconds"]
        self.earlier = state.get("wall_seconds", self.seconds)  # checkpoints of earlier versions have none
