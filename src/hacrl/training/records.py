"""What the files of runs and studies hold, as types; and the lines of rollouts/ and trace/, as the trainer makes them.

Reading a file checks it against its type. The docs explain every field.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

import numpy as np

from hacrl.files import LINE_ADVICE, NUMBER, Kind, Line, Number, read_lines, read_object, shape_of
from hacrl.rollouts.lines import Use
from hacrl.rollouts.rollout import Rollout

if TYPE_CHECKING:  # commands that only read files need not wait for transformers
    from hacrl.learners.lesson import LearnResult, Lesson


class TraceLine(TypedDict):
    """A line of trace/step-*.jsonl: a rollout that a learner used in an update."""

    step: int
    learner: str
    source: str
    prompt_id: str
    index: int
    update: Number
    num_tokens: Number
    logp_sum: Number
    log_ratio: Number
    lower: Number
    upper: Number
    kept: bool
    advantage: Number
    omega: Number
    weight: Number
    objective: Number


class Costs(TypedDict, total=False):
    """What a run, or an agent of it, has cost besides time and memory."""

    rollouts: Number
    tokens: Number
    tokens_trained: Number
    tokens_forward: Number
    updates: Number


class AgentSummary(Costs, total=False):
    """What an agent has reached, and what that has cost."""

    model: object
    start_accuracy: Number
    final_accuracy: Number
    start_sampled: Number
    final_sampled: Number
    sample_seconds: Number
    learn_seconds: Number
    peak_memory_gib: Number
    unverified: Number
    dropped: object
    nonfinite_updates: Number


class Summary(Costs):
    """summary.json of a finished run. Earlier versions wrote fewer fields."""

    steps: int
    seconds: Number
    agents: dict[str, AgentSummary]
    wall_seconds: NotRequired[Number]
    peak_memory_gib: NotRequired[Number]
    algorithm: NotRequired[object]
    best_step: NotRequired[int | None]
    sources: NotRequired[dict[str, dict[str, Number]]]
    """What sources that are no agents have given and used."""


class StudyRun(TypedDict, total=False):
    """A run in study.json."""

    team: str
    pair: str
    """The team, in files of earlier versions."""
    variant: str
    seed: int
    dir: str
    status: str
    error: object
    gpu_seconds: Number
    summary: object


class StudyResults(TypedDict):
    """The fields of study.json that are read again. `collect` in study/results.py writes all fields."""

    runs: list[StudyRun]
    name: NotRequired[str | None]
    title: NotRequired[str | None]


class ProgressState(TypedDict):
    """progress.json: what a run does at this moment, for `hacrl watch`."""

    step: NotRequired[int]
    phase: str
    since: float
    agents: list[str]
    """Agents at work in this phase."""
    save_seconds: float
    """Seconds that the last checkpoint took."""
    warning: str | None


METRICS = Kind("a line of metrics", {"step": int, "*": NUMBER}, LINE_ADVICE, grows=True)
"""A line of metrics.jsonl: the step, and numbers by name."""
TRACE = Kind("a line of a trace", shape_of(TraceLine), LINE_ADVICE)
SUMMARY = Kind("the summary of a run", shape_of(Summary), "Delete the file: continuing with --resume writes it again.")
STUDY = Kind("the results of a study", shape_of(StudyResults), "Delete the file: `hacrl study` writes it again.")
PROGRESS = Kind(
    "the progress of a run", shape_of(ProgressState), "Delete the file: a run that goes on writes it again."
)


def read_trace(path: Path) -> list[TraceLine]:
    """The trace of a step."""
    return cast(list[TraceLine], read_lines(path, TRACE))


def read_study(path: Path) -> StudyResults:
    """The results of a study, from its study.json. Earlier versions called teams pairs there."""
    results = read_object(path, STUDY)
    rows = [row for part in results.values() if isinstance(part, list) for row in part if isinstance(row, dict)]
    for row in (results, *rows):
        row.update({new: row.pop(old) for old, new in (("pair", "team"), ("pairs", "teams")) if old in row})
    return cast(StudyResults, results)


# --- lines of rollouts/ and trace/ -----------------------------------------------------------------


def rollout_lines(
    sources: Sequence[str],
    rollouts: Sequence[Sequence[Rollout]],
    ids: Sequence[str] = (),
    lessons: Sequence["Lesson"] = (),
    results: Sequence["LearnResult"] = (),
) -> list[Line]:
    """One line for every rollout; after learning, with how each learner used it. `ids` are those of the learners."""
    learners: dict[tuple[int, int, int], Line] = {}
    for learner, lesson, result in zip(ids, lessons, results, strict=False):
        for rollout, use in zip(lesson.rollouts, uses(result, lesson), strict=True):
            learners.setdefault(rollout.key, {})[learner] = use
    lines = []
    for source, own in zip(sources, rollouts, strict=True):
        for rollout in own:
            known = {"learners": learners.get(rollout.key, {})} if lessons else {}
            lines.append({**rollout.record(source), **known})
    return lines


def uses(result: "LearnResult", lesson: "Lesson") -> list[Use]:
    """How one learner used each rollout of its lesson: the learner's entry in the rollout's `learners`."""
    lines: list[Use] = [{"advantage": advantage} for advantage in lesson.mean_advantages]
    for row, reason in result.dropped.items():
        lines[row] = {"dropped": reason}
    records = {name: column.tolist() for name, column in teaching(result.records).items()}
    for i, row in enumerate(records.get("row", [])):
        if "ratio" not in lines[row]:  # the first update counts
            lines[row] |= {
                "ratio": math.exp(records["log_ratio"][i]),
                "lower": records["lower"][i],
                "upper": records["upper"][i] if math.isfinite(records["upper"][i]) else None,
                "kept": bool(records["kept"][i]),
                "weight": records["weight"][i],
            }
    return lines


def teaching(records: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows with A other than 0. Others are computed for a trace only, and metrics must not depend on a trace."""
    return {name: column[records["advantage"] != 0] for name, column in records.items()}


def trace_lines(
    sources: Sequence[str], lessons: Sequence["Lesson"], results: Sequence["LearnResult"]
) -> Iterator[Line]:
    """One line for every rollout that a learner used in each update. The first of the sources are the learners."""
    for learner, lesson, result in zip(sources, lessons, results, strict=False):
        columns = {name: column.tolist() for name, column in result.records.items() if name != "mean_weight"}
        rows = columns.pop("row", [])
        for row, *values in zip(rows, *columns.values(), strict=True):
            rollout = lesson.rollouts[row]
            place = {"step": lesson.step, "learner": learner, "source": sources[rollout.source]}
            which = {"prompt_id": rollout.prompt_id, "index": rollout.index}
            yield {**place, **which, **dict(zip(columns, values, strict=True))}
