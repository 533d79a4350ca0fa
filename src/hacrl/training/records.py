"""Lines of rollouts/ and trace/ (docs/algorithm.md): what each rollout is, and what it was to each learner."""

import math
from collections.abc import Sequence
from typing import Any

from hacrl.learners.learner import LearnResult
from hacrl.learners.minibatch import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.training.metrics import teaching

Line = dict[str, Any]


def rollout_lines(
    ids: Sequence[str],
    rollouts: Sequence[Sequence[Rollout]],
    lessons: Sequence[Lesson] = (),
    results: Sequence[LearnResult] = (),
) -> list[Line]:
    """One line for every rollout; after learning, with what it was to each learner."""
    learners: dict[int, Line] = {id(rollout): {} for own in rollouts for rollout in own}
    for learner, lesson, result in zip(ids, lessons, results, strict=False):
        for row, use in uses(result, lesson).items():
            learners[id(lesson.rollouts[row])][learner] = use
    lines = []
    for source, own in zip(ids, rollouts, strict=True):
        for rollout in own:
            use = {"learners": learners[id(rollout)]} if lessons else {}
            lines.append({**rollout.record(source), **use})
    return lines


def uses(result: LearnResult, lesson: Lesson) -> dict[int, Line]:
    """What each rollout, by row, was to one learner: its line in the rollout's `learners`.

    Ratio and clip are those of the first update that used it; where A is 0 they are not computed.
    """
    lines: dict[int, Line] = {
        row: {"dropped": result.dropped[row]} if row in result.dropped else {"advantage": advantage}
        for row, advantage in enumerate(lesson.mean_advantages)
    }
    records = {name: column.tolist() for name, column in teaching(result.records).items()}
    for i, row in enumerate(records.get("row", [])):
        if "ratio" not in lines[row]:
            lines[row] |= {
                "ratio": math.exp(records["log_ratio"][i]),
                "lower": records["lower"][i],
                "upper": records["upper"][i] if math.isfinite(records["upper"][i]) else None,
                "kept": bool(records["kept"][i]),
                "weight": records["weight"][i],
            }
    return lines


def trace_lines(step: int, ids: Sequence[str], learner: str, lesson: Lesson, result: LearnResult) -> list[Line]:
    """One line for every rollout the learner used in each update."""
    records = {name: column.tolist() for name, column in result.records.items()}
    lines = []
    for i, row in enumerate(records.get("row", [])):
        rollout = lesson.rollouts[row]
        line = {
            "step": step,
            "learner": learner,
            "source": ids[rollout.source],
            "prompt_id": rollout.prompt_id,
            "index": rollout.index,
        }
        for name, column in records.items():
            if name not in ("row", "mean_weight"):
                line[name] = column[i]
        lines.append(line)
    return lines
