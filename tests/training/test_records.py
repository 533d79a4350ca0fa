"""What the files of a run hold, as types: what a run writes has them, and what has not is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from hacrl.errors import UserError
from hacrl.files import mismatch, shape_of
from hacrl.rollouts.lines import RolloutLine, Use, read_rollouts
from hacrl.run import train
from hacrl.training.records import AgentSummary, Summary, TraceLine, read_trace
from hacrl.training.run_dir import RunDir, write_lines


def test_a_run_writes_what_the_types_say(make_config: MakeConfig) -> None:
    run = RunDir(train(make_config(max_steps=1, trace=True)).run_dir)
    rollouts, trace = read_rollouts(run.step_file("rollouts", 1)), read_trace(run.step_file("trace", 1))
    assert all(line.keys() <= RolloutLine.__annotations__.keys() for line in rollouts)
    assert all(use.keys() <= Use.__annotations__.keys() for line in rollouts for use in line["learners"].values())
    assert all(line.keys() == TraceLine.__annotations__.keys() for line in trace)
    summary = run.summary()
    assert summary is not None
    assert summary.keys() == Summary.__annotations__.keys() - {"sources"}  # there are none besides the agents
    assert all(agent.keys() <= AgentSummary.__annotations__.keys() for agent in summary["agents"].values())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text": 3}, "text is 3"),
        ({"reward": "much"}, 'reward is "much"'),
        ({"reward": True}, "reward is true"),
        ({"index": 2**63}, "index is 9223372036854775808"),
        ({"prompt": [{"role": "user"}]}, "prompt.content is missing"),
        ({"learners": {"a": {"kept": 1}}}, "learners.a.kept is 1"),
        ({"learners": {"a": []}}, "learners.a is a list"),
    ],
)
def test_a_line_that_is_not_of_its_type_is_named(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    line = {"source": "a", "prompt": "1+1=", "text": "2", "of another version": {}}
    path = tmp_path / "step.jsonl"
    write_lines(path, [line, {**line, "reward": float("nan"), "learners": {"a": {"kept": True}}}])
    assert [found.get("reward") for found in read_rollouts(path)] == [None, None]
    write_lines(path, [line, line | changes])
    with pytest.raises(UserError) as refused:
        read_rollouts(path)
    assert str(refused.value) == f"{path}, line 2, is not a rollout: {fault}. Fix or delete that line."


def test_shapes_of_types() -> None:
    assert shape_of(dict[str, list[float | None]]) == {"*": [((int, float), type(None))]}
    assert mismatch({"a": [1, None]}, shape_of(dict[str, list[float | None]])) is None
    assert mismatch({"a": ["1"]}, shape_of(dict[str, list[float | None]])) == 'a is "1"'
