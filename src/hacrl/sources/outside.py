"""Sources that are no agents of the run: they give rollouts and learn nothing."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.config.sources import LOGPS_NEEDED, SourceConfig
from hacrl.errors import UserError
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem


@dataclass
class Given:
    """What a source gave in one round of sampling."""

    rollouts: list[Rollout]
    figures: Counter[str] = field(default_factory=Counter)
    """What the source counted meanwhile: numbers that may be added over rounds."""


class OutsideSource(ABC):
    """A source in the config's section `sources`. It works in the process of the trainer, wherever the agents are."""

    def __init__(self, config: SourceConfig, index: int, seed: int) -> None:
        """`index` is the number of the source in its rollouts: those of agents are smaller."""
        self.config, self.index, self.seed = config, index, seed
        self.totals: Counter[str] = Counter()
        """What the source has given and used since the start of the run."""

    @property
    @abstractmethod
    def is_measured(self) -> bool:
        """Whether its mean reward can be compared with that of agents; if not, omega is 1."""

    @abstractmethod
    def prepare(self, problems: Sequence[Problem], needs_logps: bool, folder: Path) -> list[str]:
        """Check, before the run begins, that the source can be used; return remarks for the user.

        `problems` are known problems of the task, at least one. `needs_logps` says that the algorithm cannot use
        rollouts without log-probabilities. The source may keep files in `folder` from the first step on.
        """

    @abstractmethod
    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Given:
        """Return rollouts of the problems, in their order, at most `num_generations` of each."""

    def give(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Given:
        """Return rollouts of the problems, and count the problems."""
        given = self.sample(problems, step, sampling_round) if problems else Given([])
        given.figures["prompts"] = len(problems)
        return given

    def rollout(self, problem: Problem, position: int, index: int, step: int, **own: Any) -> Rollout:
        """An answer to the problem at a position, as a rollout; `own` are the fields that only this source knows.

        The tokens of the answer are not known, so learners read its text.
        """
        return Rollout(
            step=step,
            prompt_id=problem.id,
            prompt=problem.prompt,
            prompt_index=position,
            source=self.index,
            index=index,
            token_ids=[],
            special_inside=False,
            vocabulary=f"source {self.config.id}",
            policy_version=0,
            **own,
        )

    @abstractmethod
    def metrics(self, figures: Counter[str]) -> dict[str, float]:
        """Metrics of a step from the sums of its figures, besides those that are counted from the rollouts."""

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = Counter(state["totals"])

    def close(self) -> None:
        """End what the source has started."""

    def without_logps(self, why: str, needs_logps: bool) -> str:
        """A remark that the source has no log-probabilities; UserError if the algorithm needs them."""
        if needs_logps:
            raise UserError(f"sources.{self.config.id}: {why}, {LOGPS_NEEDED}.")
        return f"Source {self.config.id}: {why}; its rollouts count as if the learner had found them as likely (s = 1)."
