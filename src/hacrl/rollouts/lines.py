"""A line of rollouts/step-*.jsonl, the files in which a run keeps its rollouts."""

from pathlib import Path
from typing import NotRequired, TypedDict, cast

from hacrl.files import LINE_ADVICE, Kind, Number, read_lines, shape_of


class Message(TypedDict):
    """A message of a chat prompt."""

    role: str
    content: object


class Use(TypedDict, total=False):
    """How a learner used a rollout: why it was dropped; or its advantage and, if that is not 0, the figures of
    the first update that used it."""

    dropped: str
    advantage: Number
    ratio: Number
    lower: Number
    upper: Number
    kept: bool
    weight: Number


class RolloutLine(TypedDict):
    """A line of rollouts/step-*.jsonl. Earlier versions wrote fewer fields."""

    source: str
    prompt: str | list[Message]
    text: str
    step: NotRequired[int]
    prompt_id: NotRequired[str]
    index: NotRequired[int]
    reward: NotRequired[Number]
    finish_reason: NotRequired[str]
    num_tokens: NotRequired[int]
    logp_sum: NotRequired[Number]
    policy_version: NotRequired[int]
    reward_parts: NotRequired[dict[str, Number]]
    problem: NotRequired[str]
    detail: NotRequired[str | None]
    lead: NotRequired[str]
    opened: NotRequired[str]
    learners: NotRequired[dict[str, Use]]


ROLLOUT = Kind("a rollout", shape_of(RolloutLine), LINE_ADVICE)


def read_rollouts(path: Path) -> list[RolloutLine]:
    """The rollouts of a step."""
    return cast(list[RolloutLine], read_lines(path, ROLLOUT))
