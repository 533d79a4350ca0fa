"""The section `task` of a run: where problems come from, and how answers to them are verified."""

import reprlib
from math import fsum
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hacrl.config.given import GIVEN, Data, GivenReward, GivenRows, RewardName
from hacrl.config.strict import Few, Label, Length, Options, Positive, Seconds, Size, Strict, Weight


class RewardConfig(Strict):
    """One reward function and its weight."""

    name: RewardName
    """The reward function: exact, math, soft_overlong, or module:function; from Python, also the function itself."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of the function's value in the sum that is the reward."""
    max_completion_length: Length | None = None
    """The number of tokens from which soft_overlong is -1."""
    soft_punish_cache: Annotated[int, Field(ge=0, le=2**20)] | None = None
    """How many tokens before `max_completion_length` soft_overlong begins to fall."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        longest, cache = self.max_completion_length, self.soft_punish_cache
        if self.name != "soft_overlong" and (longest, cache) != (None, None):
            raise ValueError("max_completion_length and soft_punish_cache are for soft_overlong: remove them")
        if self.name == "soft_overlong" and (longest is None or cache is None or cache > longest):
            raise ValueError("soft_overlong needs max_completion_length, and soft_punish_cache of at most that")
        return self


def _with_weight(reward: Any) -> Any:
    """The section of a reward that is given by its name, as a function, or as a pair of either and its weight."""
    if isinstance(reward, tuple):
        if len(reward) != 2 or isinstance(reward[1], bool) or not isinstance(reward[1], Real):
            raise ValueError("a tuple is (reward, weight), and the weight a number; several rewards are a list")
        return {"name": reward[0], "weight": float(reward[1])}
    if isinstance(reward, str) or callable(reward):
        return {"name": reward}
    if not isinstance(reward, dict | RewardConfig):
        expected = "exact, math, module:function, {name, weight} or, from Python, a function or (function, weight)"
        raise ValueError(f"expected {expected}, not {reprlib.repr(reward)}")
    return reward


class CurriculumConfig(Strict):
    """Stages of a task from reasoning-gym, from easy to hard."""

    stages: Annotated[list[Options], Field(min_length=2, max_length=1000)]
    """Options of each stage, which override `options`."""
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    """The next stage begins when the mean reward of the last `window` steps is at least this."""
    window: Positive = 5
    """Number of steps over which the mean reward is taken."""


class ProblemsConfig(Strict):
    """One kind of problems, and how answers to them are verified."""

    name: str | None = None
    """A procedural task: arithmetic, or gym:GENERATOR of reasoning-gym. Otherwise give `train`."""
    min_operators: Few = 2
    """The fewest operators in a chain of `arithmetic`."""
    max_operators: Few = 3
    """The most operators in a chain of `arithmetic`."""
    max_operand: Annotated[int, Field(ge=9, le=99)] = 99
    """The largest number in a chain of `arithmetic`."""
    minus_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the chains of `arithmetic` that lean to subtraction."""
    options: Options = {}
    """Options of a gym task's generator."""
    answer: Literal["tag", "last_line", "whole"] = "tag"
    """What is scored in a gym task: the text in the last `<answer>...</answer>`, the last line, or all of it."""
    instruction: str | None = None
    """Text added to every question of a gym task; default: a sentence that asks for an answer in that form."""
    curriculum: CurriculumConfig | None = None
    """Stages of a gym task, from easy to hard."""
    train: Data = None
    """Training data: a JSONL or parquet file, a folder written by `datasets`, or a hub id; from Python, also rows."""
    eval: Data = None
    """Held-out data: a file, a folder or a hub id, as in `train`; from Python, also rows."""
    subset: str | None = None
    """Subset of the hub data set in `train`."""
    eval_subset: str | None = None
    """Subset of the hub data set in `eval`."""
    train_split: str = "train"
    """Split of the hub data set in `train`."""
    eval_split: str = "test"
    """Split of the hub data set in `eval`; for tasks with a name: test or validation."""
    reward: list[RewardConfig] = []
    """Reward functions: exact, math, soft_overlong or module:function; or a list of them with weights."""
    reward_timeout: Seconds = 10.0
    """Time limit in seconds for one completion in `math`, and in the scorer of a gym task."""
    reward_call_timeout: Seconds = 120.0
    """Time limit in seconds for one call of your own reward function."""
    reward_workers: Few = 2
    """Number of processes that run `math`, or the scorer of a gym task."""
    reward_memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = 4.0
    """Memory that each process of a reward function may use, with the processes it starts; null: no limit."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is None or name == "arithmetic" or name.startswith("gym:"):
            return name
        raise ValueError(f"expected 'arithmetic' or gym:GENERATOR, not {name!r}")

    @field_validator("reward", mode="before")
    @classmethod
    def _as_list(cls, reward: Any) -> Any:
        if reward is None:
            return []
        if not isinstance(reward, list):
            return [_with_weight(reward)]
        rewards = []
        for position, each in enumerate(reward):
            try:
                rewards.append(_with_weight(each))
            except ValueError as error:
                raise ValueError(f"entry {position}: {error}") from None
        return rewards

    @property
    def generator(self) -> str | None:
        """The name of a gym task's generator."""
        return self.name.removeprefix("gym:") if self.name and self.name.startswith("gym:") else None

    @property
    def has_heldout(self) -> bool:
        """Whether there are held-out problems to measure accuracy on."""
        return self.name is not None or self.eval is not None

    def given(self, *, gone: bool = False) -> list[str]:
        """The settings that are objects given from Python; with `gone`, those that were, and are only a text now."""
        kinds = str if gone else str | GivenRows | GivenReward
        values = [("train", self.train), ("eval", self.eval), *(("reward", reward.name) for reward in self.reward)]
        found = [setting for setting, value in values if isinstance(value, kinds) and str(value).startswith(GIVEN)]
        return list(dict.fromkeys(found))

    def doubt(self, min_reward: float) -> str | None:
        """A sentence if the weights of the rewards do not go with the smallest reward of a right answer.

        It takes functions to return 1 at most, which nothing demands.
        """
        weights = {str(each.name).rpartition(":")[2].strip(): max(each.weight, 0.0) for each in self.reward}
        weights.pop("soft_overlong", None)
        if not weights or min_reward <= 0:  # chosen on purpose
            return None
        first, total = max(weights, key=lambda name: weights[name]), fsum(weights.values())
        advice = "Change the weights or algorithm.imitation.min_reward."
        if total < min_reward:
            found = f"The weights of the rewards add up to {total:g}, and an answer is right from {min_reward:g} on"
            return f"{found}: nothing will be imitated, unless a function returns more than 1. {advice}"
        if fsum(weight for name, weight in weights.items() if name != first) >= min_reward:
            found = f"Answers that are wrong for {first} may be imitated: other rewards alone reach {min_reward:g}"
            return f"{found}, from which on an answer is right. {advice}"
        return None

    def check_problems(self) -> None:
        """Raise ValueError unless the settings say where problems come from and how answers are verified."""
        if self.name is None and self.train is None:
            other = "or give name: arithmetic, or gym:GENERATOR"
            raise ValueError(f"train is missing: a file, a hub id or, from Python, rows; {other}")
        if self.name is not None and self.train is not None:
            raise ValueError("give either name (arithmetic, or gym:GENERATOR) or train (a file), not both")
        if self.name is None and not self.reward:
            raise ValueError("reward is missing: exact, math, module:function or, from Python, a function")
        if self.reward and all(reward.name == "soft_overlong" for reward in self.reward):
            raise ValueError("soft_overlong is a penalty beside a reward: add exact, math or module:function")
        if self.name is not None and self.reward:
            raise ValueError(f"the task {self.name} has its own verifier: remove reward")
        if self.name is not None and self.eval is not None:
            raise ValueError(f"the task {self.name} has its own held-out problems: remove eval")
        if self.name is not None and self.eval_split not in ("test", "validation"):
            raise ValueError(f"eval_split of {self.name} is test or validation")
        arithmetic, gym = "the task arithmetic (name: arithmetic)", "tasks from reasoning-gym (name: gym:GENERATOR)"
        for fits, whose, options in (
            (self.name == "arithmetic", arithmetic, ("min_operators", "max_operators", "max_operand", "minus_share")),
            (self.generator is not None, gym, ("options", "answer", "instruction", "curriculum")),
            (is_data_set(self.train), "data sets of the hub (org/name)", ("subset", "train_split")),
            (is_data_set(self.eval), "data sets of the hub (org/name)", ("eval_subset",)),
        ):
            for option in options:
                if not fits and getattr(self, option) != ProblemsConfig.model_fields[option].default:
                    raise ValueError(f"{option} is for {whose}: remove it")
        if self.min_operators > self.max_operators:
            raise ValueError("min_operators is larger than max_operators")


def is_data_set(source: str | GivenRows | None) -> bool:
    """Whether a name stands for a data set of the hub or a folder, not for a single file."""
    return isinstance(source, str) and not source.endswith((".jsonl", ".json", ".parquet"))


def part_label(id: str | None, name: str | None, train: str | GivenRows | None) -> str:
    """The name of a part of a mixture in metrics."""
    return id or (name or "").removeprefix("gym:") or Path(str(train)).stem


class PartConfig(ProblemsConfig):
    """One part of a mixture."""

    id: Label | None = None
    """The name of the part in metrics; default: the task's or the file's name."""
    weight: Weight = 1.0
    """Share of the problems, relative to the weights of the other parts."""

    @property
    def label(self) -> str:
        return part_label(self.id, self.name, self.train)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self.check_problems()
        if self.id is None and isinstance(self.train, GivenRows):
            raise ValueError("id is missing: a part whose rows are given from Python needs one")
        return self


class TaskConfig(ProblemsConfig):
    """Where problems come from and how answers are verified."""

    mixture: Annotated[list[PartConfig], Field(max_length=100)] = []
    """Several kinds of problems in one task, each with a weight. Only `eval_size` may be set beside it."""
    eval_size: Size = 500
    """The most held-out problems that are used during training."""

    @model_validator(mode="before")
    @classmethod
    def _section(cls, data: Any) -> Any:
        if isinstance(data, str):
            key = "name" if data == "arithmetic" or data.startswith("gym:") else "train"
            raise ValueError(f"expected a section, not {data!r}; write task.{key}={data}")
        return data

    @property
    def has_heldout(self) -> bool:
        return super().has_heldout or any(part.has_heldout for part in self.mixture)

    def given(self, *, gone: bool = False) -> list[str]:
        parts = [f"mixture.{part.label}.{setting}" for part in self.mixture for setting in part.given(gone=gone)]
        return super().given(gone=gone) + parts

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.mixture:
            self.check_problems()
            return self
        for field in ProblemsConfig.model_fields:
            if getattr(self, field) != ProblemsConfig.model_fields[field].default:
                raise ValueError(f"{field} belongs to a part of the mixture, not beside it")
        labels = [part.label for part in self.mixture]
        if len(set(labels)) < len(labels):
            raise ValueError(f"mixture: every part needs an id of its own, but they are {', '.join(labels)}")
        return self
