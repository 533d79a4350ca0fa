"""Nothing is ever silent: whatever takes long says so, in a terminal and in a log. Nobody waits for real here."""

import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.text import Text

from conftest import FAST
from hacrl import signs
from hacrl.errors import UserError
from hacrl.signs import Display, advance, clock, doing, going_on
from hacrl.terminal import OUTPUT_CLOSED
from screen import Screen, in_a_terminal
from tiny_gguf import File

COMMAND = """
import time
import hacrl.signs as signs

class Long(list):
    def remove(self, activity):
        time.sleep(0.1)
        super().remove(activity)

signs._activities = Long()
signs.LOG_SECONDS, signs.SHOW_AFTER, signs.REFRESH_SECONDS = 0.0, 0.0, 0.002
from hacrl.cli import main
main()
"""
"""The command. It does not wait long before it says what it does, and what it does lasts long enough to be seen."""
REWARD = """
import os, time

def reward(completions, **columns):
    while not os.path.exists("go"):
        time.sleep(0.02)
    return [float(len(text) % 2) for text in completions]
"""
"""A reward that waits until it may go on."""
ROWS = "".join(f'{{"prompt": "{n}+2=", "answer": "{n + 2}", "completion": "{n + 2}"}}\n' for n in range(10, 18))
TINY: dict[str, Any] = {
    "algorithm": {"name": "hacpo"},
    "agents": [{"id": "a", "model": "zoo:llama-weak"}, {"id": "b", "model": "zoo:llama-weak"}],
    "task": {"train": "data.jsonl", "eval": "data.jsonl", "reward": "slow.py:reward"},
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_prompt_length": 32,
    "max_completion_length": 8,
    "log_kl": False,
    "fast": FAST,
    "max_steps": 1,
    "output_dir": "run",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("slow.py").write_text(REWARD)
    Path("data.jsonl").write_text(ROWS)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """What a process prints up to a line with the pattern."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"{pattern} never came:\n{''.join(lines)}")


def said(*arguments: str) -> str:
    process = start(*arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


# --- logs ----------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_before_its_first_step() -> None:
    process = start("train", "tiny.yaml")
    lines_until(process, "^starting, 0:0")
    lines_until(process, "^reading the problems, 0:0")
    lines_until(process, r"^0/1 steps done \| loading, 0:\d\d › loading zoo:llama-weak, 0:\d\d$")
    lines_until(process, r"^0/1 steps done \| evaluating, 16 done, 0:\d\d$")  # both agents' answers are being judged
    Path("go").touch()
    lines_until(process, r"^step 0/1 \| a: accuracy")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    for phase in ("sampling", "learning", "saving"):
        assert f"steps done | {phase}, " in out
    assert re.search(r"^Time: \d+ s$", out, re.MULTILINE)


def test_held_out_problems_are_counted_and_judging_is_told() -> None:
    process = start("eval", "zoo:llama-weak", "--config", "tiny.yaml")
    lines_until(process, r"^model: held-out problems, 0:\d\d › loading zoo:llama-weak, 0:\d\d$")
    lines_until(process, r"^model: held-out problems, 0:\d\d › answering, \d of 8, 0:\d\d")
    lines_until(process, r"^model: held-out problems, 0:\d\d › judging, 0:\d\d$")
    Path("go").touch()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "Held-out accuracy of zoo:llama-weak" in out


def test_the_commands_around_a_run_say_what_they_do() -> None:
    Path("go").touch()
    said("train", "tiny.yaml")
    assert "writing the report, 0:0" in said("report", "run")
    assert "saving models, 0:0" in said("export", "run", "models")
    File().write(Path("tiny.gguf"))
    imported = said("models", "import-gguf", "tiny.gguf", "imported")
    for what in ("starting", "reading the weights", "saving the model"):
        assert f"{what}, 0:0" in imported
    warmup = {"agents": TINY["agents"][:1], "data": "data.jsonl", "max_steps": 3, "output_dir": "warm"}
    Path("warmup.yaml").write_text(yaml.safe_dump({**warmup, "eval_size": 2, "task": {"name": "arithmetic"}}))
    warmed = said("warmup", "warmup.yaml")
    for pattern in ("0:0. › loading zoo:llama-weak, ", "0:0. › evaluating, ", r"warm-up, 3 of 3, .* › saving, 0:0"):
        assert re.search(pattern, warmed), pattern


def test_a_study_names_its_runs() -> None:
    Path("go").touch()
    base = {key: value for key, value in TINY.items() if key not in ("algorithm", "output_dir")}
    study = {"name": "tiny", "base": base, "algorithms": ["gspo"], "seeds": [0], "output_dir": "study"}
    Path("study.yaml").write_text(yaml.safe_dump(study))
    assert re.search(r"study, 0 of 1, \S+/gspo/seed-0 0/1 steps, \d+:\d\d", said("study", "study.yaml"))


def test_a_log_whose_reader_is_gone_ends_the_command() -> None:
    process = start("eval", "zoo:llama-weak", "--config", "tiny.yaml")
    lines_until(process, "^starting")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == OUTPUT_CLOSED


# --- terminals -----------------------------------------------------------------------------------------


def test_a_terminal_shows_one_line_that_is_gone_afterwards() -> None:
    seen = []

    def look(drawn: str) -> None:
        if (text := Screen.after(drawn)) and "judging" in text[-1]:
            seen.append(text)
            Path("go").touch()

    drawn = in_a_terminal(COMMAND, "eval", "zoo:llama-weak", "--config", "tiny.yaml", on_output=look)
    assert len(seen[0]) == 1
    assert re.fullmatch(r"model: held-out problems, 0:\d\d › judging, 0:\d\d", seen[0][0])
    text = "\n".join(Screen.after(drawn))
    assert text.startswith("Held-out accuracy of zoo:llama-weak")
    assert "judging" not in text


def test_the_table_of_a_run_takes_the_place_of_that_line() -> None:
    seen = []

    def look(drawn: str) -> None:
        if (text := Screen.after(drawn)) and text[-1].startswith("step 0/1") and "evaluating" in text[-1]:
            seen.append(text)
            Path("go").touch()

    in_a_terminal(COMMAND, "train", "tiny.yaml", on_output=look)
    assert [line.split()[0] for line in seen[0][-7:] if line[0] != "─"] == ["hacpo", "agent", "a", "b", "step"]
    assert not any("starting" in line or "›" in line for line in seen[0])


def test_a_terminal_shows_nothing_of_what_is_quick() -> None:
    code = COMMAND.replace("0.0, 0.0, 0.002", "0.0, 100.0, 0.002")
    Path("go").touch()
    drawn = in_a_terminal(code, "eval", "zoo:llama-weak", "--config", "tiny.yaml")
    assert "\x1b[2K" not in drawn
    assert "Held-out accuracy" in drawn


# --- what is said --------------------------------------------------------------------------------------


def test_activities_are_told_from_the_outermost_to_the_innermost() -> None:
    assert going_on() == ""
    advance(3)  # nobody counts
    with doing("a: gsm8k", total=1319) as outer:
        outer.begin("a: gsm8k", done=64)
        outer.done, outer.note = 128, "50.0 % right so far"
        with doing("answering"):
            advance(1200)
            text = going_on()
            assert re.fullmatch(
                r"a: gsm8k, 128 of 1,319, 50.0 % right so far, 0:00, left 0:00 › answering, 1,200 done, 0:00", text
            )
    assert going_on() == ""


def test_the_time_left_does_not_count_what_was_done_before() -> None:
    with doing("x", total=100) as activity:
        activity.begin("x", done=50)
        assert "left" not in str(activity)
        activity.done = 60
        activity.began -= 20
        assert str(activity) == "x, 60 of 100, 0:20, left 1:20"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.9, "1:05"), (7261, "2:01:01")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_an_inner_display_takes_the_place_of_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(signs, "LOG_SECONDS", 0.0)
    outer, inner = io.StringIO(), io.StringIO()
    with Display(Console(file=outer)), doing("outer"):
        with Display(Console(file=inner), line=lambda: "inner"):
            at_the_start = outer.getvalue()
            while inner.getvalue().count("inner\n") < 5:
                os.sched_yield()
            assert outer.getvalue() == at_the_start
        while outer.getvalue() == at_the_start:
            os.sched_yield()
    assert "outer, 0:0" in outer.getvalue()


class Cell:
    """The output of a notebook's cell."""

    def __init__(self) -> None:
        self.transient, self.drawn = True, list[str]()

    def start(self) -> None:
        self.drawn.append("start")

    def refresh(self) -> None:
        self.drawn.append("refresh")

    def stop(self) -> None:
        self.drawn.append(f"stop, transient {self.transient}")


def test_a_table_of_another_kind_is_drawn_in_place_of_the_lines_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(signs, "LOG_SECONDS", 0.0)
    cell, log = Cell(), io.StringIO()
    display = Display(Console(file=log), lambda width: [Text("row")], table=lambda: cell)
    assert display.draws
    with suppress(UserError), display:
        while not cell.drawn:
            os.sched_yield()
        raise UserError("what was reached stays")
    assert cell.drawn == ["start", "refresh", "stop, transient False"]
    assert log.getvalue() == ""
