"""Curricula: a task moves from easy to hard stages as rewards rise."""

from collections import deque
from typing import Any

from hacrl.config.task import CurriculumConfig


class Curriculum:
    """The current stage of a task. The next begins when the mean reward of `window` steps reaches the threshold."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self.stage = 0
        self._recent: deque[float] = deque(maxlen=config.window)
        """Mean rewards of the last steps in this stage."""

    def observe(self, reward: float) -> None:
        """Record the mean reward of a step over all agents, and go to the next stage if it is time."""
        self._recent.append(reward)
        full = len(self._recent) == self.config.window
        reached = full and sum(self._recent) / len(self._recent) >= self.config.threshold
        if reached and self.stage + 1 < len(self.config.stages):
            self.stage += 1
            self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage = state["stage"]
        self._recent = deque(state["recent"], maxlen=self.config.window)
