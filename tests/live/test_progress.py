"""The live table: it fits, it does not move, it is honest about the time left, and warnings stand above it."""

import io
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conftest import MakeConfig
from hacrl.config import RunConfig
from hacrl.errors import warn
from hacrl.live.progress import COLUMNS, Progress, View, duration, fit
from hacrl.run import resumed_config, train
from hacrl.training.run_dir import RunDir
from screen import Screen, in_a_terminal


def four_agents(**changes: Any) -> RunConfig:
    ids = ["qwen3-1.7b", "llama-3.2-1b", "smollm2", "gemma"]
    agents = [{"id": name, "model": "zoo:llama-plus"} for name in ids]
    data = {"algorithm": {"name": "hacpo"}, "agents": agents, "task": {"name": "arithmetic"}, "output_dir": "runs/x"}
    return RunConfig.from_dict({**data, **changes})


def metrics_of(config: RunConfig, step: int, value: float | None) -> dict[str, Any]:
    """A line of metrics.jsonl in which every number of the table is the same."""
    line: dict[str, Any] = {"step": step, "step_time": 2.0}
    for agent in config.agents:
        names = ["reward", "eval_accuracy", "completions/mean_length", "time/tokens_per_second"]
        names += [f"from_{o.id}/{key}" for o in config.agents if o is not agent for key in ("ratio_mean", "kept")]
        line |= {f"{agent.id}/{name}": value for name in names}
    return line


def shown(view: View, width: int) -> list[str]:
    return [line.plain for line in view.lines(width)]


# --- how it looks --------------------------------------------------------------------------------------


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(4, 12), st.integers(0, 3))
def test_a_number_never_takes_more_room_than_it_has(value: float, width: int, decimals: int) -> None:
    assert 1 <= len(fit(value, width, decimals)) <= width


@pytest.mark.parametrize(
    ("value", "width", "decimals", "text"),
    [
        (0.51249, 6, 3, "0.512"),
        (-0.5, 6, 3, "-0.500"),
        (-10.25, 6, 3, "-10.25"),
        (12345.67, 6, 1, "12346"),
        (1234567.0, 6, 1, "1e6"),
        (-3e100, 5, 1, "…"),
        (None, 6, 3, "–"),
    ],
)
def test_numbers(value: float | None, width: int, decimals: int, text: str) -> None:
    assert fit(value, width, decimals) == text


@given(
    st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=3),
    st.integers(12, 160),
    st.booleans(),
)
def test_nothing_wraps_and_nothing_moves(values: list[float | None], width: int, busy: bool) -> None:
    config = four_agents(max_steps=1000)
    view = View(config)
    empty = shown(view, width)
    for step, value in enumerate(values, 1):
        view.add(metrics_of(config, step, value))
        view.busy = {"gemma"} if busy else set()
        lines = shown(view, width)
        assert lines[:3] == empty[:3]
        assert [len(line) for line in lines[3:-1]] == [len(line) for line in empty[3:-1]]
        assert len(lines) == len(empty)
        console = Console(file=io.StringIO(), width=width)
        console.print(view)
        assert console.file.getvalue().count("\n") == len(lines)


def test_four_agents_in_80_columns_have_every_column() -> None:
    config = four_agents()
    view = View(config)
    view.add(metrics_of(config, 3, 0.25))
    view.phase, view.busy = "sampling", {"gemma"}
    lines = shown(view, 80)
    assert lines[1].split() == ["agent", *COLUMNS]
    numbers = ["0.250", "0.250", "→", "0.250", "0.2", "0.25", "0.25", "0"]
    assert [line.split() for line in lines[3:7]] == [
        ["qwen3-1.7b", *numbers],
        ["llama-3.2-1b", *numbers],
        ["smollm2", *numbers],
        ["gemma", *numbers, "sampling"],
    ]
    assert max(map(len, lines)) <= 80


def test_sources_that_are_no_agents_have_a_row_and_what_they_did_not_answer() -> None:
    teacher = {"id": "teacher", "endpoint": {"url": "http://host/v1", "model": "big"}}
    config = four_agents(sources=[teacher, {"id": "past", "rollouts": "somewhere"}], rollouts_per_update=1024)
    view = View(config)
    given = {"reward": 0.75, "completions/mean_length": 20.0, "unverified": 2, "failed": 3, "late": 1, "skipped": 0}
    for step in (1, 2):
        line = metrics_of(config, step, 0.25) | {"past/unverified": 0, "past/rollouts": 0}
        view.add(line | {f"teacher/{name}": value for name, value in given.items()})
    lines = shown(view, 80)
    assert lines[1].split() == ["source", *COLUMNS]
    assert [line.split() for line in lines[7:9]] == [
        ["teacher", "0.750", "–", "20.0", "–", "–", "–"],
        ["past", "–", "–", "–", "–", "–", "–"],
    ]
    assert lines[-2:] == [
        "rollouts without a verdict so far: teacher 4",
        "requests without a usable answer so far: teacher 8",
    ]
    assert "| teacher: reward 0.750 length 20.0 | left" in view.line()


def test_a_narrow_terminal_drops_columns_and_keeps_the_accuracy() -> None:
    view = View(four_agents())
    headers = [shown(view, width)[1].split()[1:] for width in range(120, 24, -1)]
    for wider, narrower in pairwise(headers):
        assert [name for name in wider if name in narrower] == narrower
    assert headers[0] == list(COLUMNS)
    assert headers[-1] == ["accuracy"]


def test_agents_alone_have_no_ratio() -> None:
    view = View(four_agents(algorithm={"name": "gspo"}))
    assert shown(view, 80)[1].split() == ["agent", "reward", "accuracy", "length", "tok/s", "phase"]


@pytest.mark.parametrize(("algorithm", "leaves_out"), [("naive", True), ("ftis", True), ("hacpo_robust", False)])
def test_kept_is_shown_where_rollouts_may_be_left_out(algorithm: str, leaves_out: bool) -> None:
    columns = shown(View(four_agents(algorithm={"name": algorithm})), 80)[1].split()
    assert "s" in columns
    assert ("kept" in columns) == leaves_out


def test_lines_of_an_older_run_and_nulls() -> None:
    config = four_agents()
    view = View(config)
    view.add({"step": 0, "gemma/eval_accuracy": 0.5})
    view.add({"step": 1, "gemma/reward": None, "gemma/unverified": 3, "gemma/from_smollm2/kept": None})
    cells = view.cells("gemma")
    assert cells == dict.fromkeys(COLUMNS, "–") | {"accuracy": "0.500 → 0.500", "phase": ""}
    assert "rollouts without a verdict so far: gemma 3" in shown(view, 80)


# --- time left -----------------------------------------------------------------------------------------


def line_of(step: int, seconds: float, evaluation: float | None = None) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step, "step_time": seconds}
    return line if evaluation is None else {**line, "gemma/time/eval": evaluation}


def test_time_left_counts_evaluations_and_checkpoints_still_to_come() -> None:
    view = View(four_agents(max_steps=100, eval_every=10, save_every=30))
    assert view.seconds_left() is None
    view.add({"step": 0, "gemma/time/eval": 4.0, "smollm2/time/eval": 3.0})
    assert view.seconds_left() is None
    view.add(line_of(1, 2.0))
    assert view.seconds_left() == pytest.approx(99 * 2 + 10 * 4)  # as long as the first evaluation: 10, 20, ... 100
    for step in range(2, 10):
        view.add(line_of(step, 2.0))
    view.add(line_of(10, 7.5, evaluation=5.0))
    view.save_seconds = 6.0
    assert view.seconds_left() == pytest.approx(90 * 2 + 9 * 5.5 + 4 * 6)  # saved at 30, 60, 90, 100
    for step in range(11, 101):
        view.add(line_of(step, 1.0))
    assert view.seconds_left() == 0


def test_time_left_without_a_last_checkpoint() -> None:
    view = View(four_agents(max_steps=12, eval_every=1, save_every=4, save_final=False))
    view.add(line_of(1, 2.0))
    view.save_seconds = 6.0
    assert view.seconds_left() == pytest.approx(11 * 2 + 2 * 6)  # saved at 4 and 8, not at 12


def test_time_left_where_every_step_is_evaluated() -> None:
    view = View(four_agents(max_steps=10, eval_every=1))
    view.add({"step": 0, "gemma/time/eval": 4.0})
    for step in (1, 2):
        view.add(line_of(step, 6.0, evaluation=4.0))
    assert view.seconds_left() == pytest.approx(8 * 6)


def test_time_left_is_that_of_the_recent_steps() -> None:
    view = View(four_agents(max_steps=100, eval_every=0))
    view.add(line_of(1, 500.0))
    for step in range(2, 22):
        view.add(line_of(step, 1.0))
    assert view.seconds_left() == pytest.approx(79)
    assert view.left == "1 min 19 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (7261, "2 h 01 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- while a run goes on -------------------------------------------------------------------------------


def test_plain_lines_where_there_is_no_terminal(make_config: MakeConfig) -> None:
    console = Console(file=io.StringIO(), width=40)
    run_dir = train(make_config(max_steps=2, eval_every=1), console=console).run_dir
    first, second, third = console.file.getvalue().splitlines()
    metrics = RunDir(run_dir).metrics()
    assert [line.split(" | ")[0] for line in (first, second, third)] == ["step 0/2", "step 1/2", "step 2/2"]
    accuracies = [line["agent0/eval_accuracy"] for line in metrics]
    assert f"agent0: reward {metrics[2]['agent0/reward']:.3f} accuracy" in third
    assert f"accuracy {accuracies[0]:.3f} → {accuracies[2]:.3f}" in third
    assert f"tok/s {metrics[2]['agent1/time/tokens_per_second']:.0f}" in third
    assert third.endswith("left 0 s")


def test_a_run_that_is_continued_remembers_where_it_started(make_config: MakeConfig) -> None:
    run_dir = train(make_config(max_steps=1), console=Console(file=io.StringIO())).run_dir
    start = RunDir(run_dir).metrics()[0]["agent0/eval_accuracy"]
    console = Console(file=io.StringIO())
    train(resumed_config(run_dir, ["max_steps=2"]), resume=True, console=console)
    assert f"accuracy {start:.3f} → " in console.file.getvalue()


def wait_for(path: Path, text: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.is_file() and text in path.read_text(encoding="utf-8"):
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return state
        time.sleep(0.05)
    raise AssertionError(f"{text} never came")


def test_the_phase_is_published(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    with Progress(four_agents(), Console(file=io.StringIO())) as progress:
        with progress.published(file):
            before = time.time()
            progress.on_phase("learning")
            progress.on_agent("smollm2", True)
            progress.on_agent("gemma", True)
            progress.on_agent("smollm2", False)
            warn("Agent gemma: \x1b[31mred")
            state = wait_for(file, "red")
            assert before <= state.pop("since") <= time.time()
            assert state == {
                "step": 0,
                "phase": "learning",
                "agents": ["gemma"],
                "save_seconds": 0.0,
                "warning": r"Agent gemma: \x1b[31mred",
            }
            progress.on_phase("sampling")
            assert wait_for(file, "sampling")["agents"] == []
        assert not file.exists()


IN_A_TERMINAL = """
import sys, time
from rich.console import Console
from hacrl.config import RunConfig
from hacrl.errors import warn
from hacrl.live.progress import Progress

config = RunConfig.load("demo", ["max_steps=9", "algorithm.name=hacpo"])
with Progress(config, Console()) as progress:
    for step in range(1, 4):
        progress.on_phase("sampling")
        time.sleep(0.4)
        if step == 2:
            warn("Agent llama-plus: be [bold]careful[/bold]")
        progress.on_metrics(step, {"step": step, "step_time": 1.0, "llama-plus/reward": step / 8})
    time.sleep(0.6)
    print("seen", flush=True)
    time.sleep(0.6)
"""


def test_warnings_stand_above_the_table_in_a_terminal() -> None:
    drawn = in_a_terminal(IN_A_TERMINAL)
    warning = "Agent llama-plus: be [bold]careful[/bold]"
    before_the_end = drawn[: drawn.rindex(warning) + len(warning)]
    text = Screen.after(before_the_end)
    assert text[:2] == [warning, "seen"]
    assert text[2].startswith("hacpo · ")
    words = [line.split()[0] for line in text[3:]]
    assert words == ["agent", text[4], "llama-plus", "llama-minus", text[-3], "step", "last"]
    assert "0.375" in text[5]
    assert text[-2].startswith("step 3/9")
    assert text[-1] == "last warning: Agent llama-plus: be [bold]careful[/bold]"
    assert Screen.after(drawn) == [warning, "seen"]
