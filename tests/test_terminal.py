"""What reaches a terminal: no control character of anybody's text; and what happens when nobody reads it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.live import Live
from rich.table import Table

from conftest import FAST
from hacrl.cli import main
from hacrl.errors import CONTROL, warn
from hacrl.terminal import OUTPUT_CLOSED, Terminal

EVIL = "\x1b[31mx\x1b]0;t\x07\x9b2J\r\u202e\x7f\u2066"
FILE = EVIL.replace("/", "")
TINY: dict[str, Any] = {
    "agents": [{"id": "a", "model": "zoo:llama-weak"}, {"id": "b", "model": "zoo:llama-weak"}],
    "task": {"name": "arithmetic", "eval_size": 4},
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_prompt_length": 32,
    "max_completion_length": 8,
    "log_kl": False,
    "fast": FAST,
    "max_steps": 1,
    "output_dir": "run",
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hacrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, in an empty folder; asserts that what it printed is harmless."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hacrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        for printed in (out, err):
            assert not CONTROL.search(printed)
        return int(ended.value.code or 0), out, err

    return run


def write(name: str, **changes: Any) -> str:
    Path(name).write_text(yaml.safe_dump({**TINY, **changes}), encoding="utf-8")
    return name


def write_rows(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def test_an_unknown_key(hacrl: Run) -> None:
    code, _, err = hacrl("train", write("bad.yaml", **{EVIL: EVIL}))
    assert code == 2
    assert r"\x1b[31mx\x1b]0;t\x07\x9b2J\r\u202e\x7f\u2066: unknown key" in err
    assert r"name: unknown algorithm '\x1b[31mx" in hacrl("train", write("bad.yaml", algorithm={"name": EVIL}))[2]


def test_values_and_prompts_in_a_dry_run(hacrl: Run) -> None:
    rows = write_rows("rows.jsonl", *({"prompt": f"{EVIL} {n}", "answer": EVIL} for n in range(2)))
    task = {"train": rows, "reward": "exact"}
    code, out, err = hacrl("train", write("ok.yaml", system_prompt=EVIL, output_dir=EVIL, task=task), "--dry-run")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out[: out.index("Per step")])["system_prompt"] == EVIL
    assert out.count(r"\x1b[31mx") == 2


def test_names_of_files_and_folders(hacrl: Run) -> None:
    assert r"There is no file \x1b[31mx" in hacrl("train", f"{FILE}.yaml")[2]
    assert (
        r"There is no data set \x1b[31mx" in hacrl("train", write("a.yaml", task={"train": FILE, "reward": "exact"}))[2]
    )
    assert r"there is no folder \x1b[31mx" in hacrl("train", write("a.yaml", agents=[{"id": "a", "model": FILE}]))[2]
    assert r"run.yaml with output_dir=\x1b[31mx" not in hacrl("train", write("run.yaml"), f"output_dir={FILE}")[2]
    code, out, _ = hacrl("study", "quick", "--output-dir", FILE, "--dry-run")
    assert code == 0
    assert r"Folder: \x1b[31mx" in out
    Path(FILE).mkdir()
    Path(FILE, "config.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    assert r"\x1b[31mx" in hacrl("rollouts", FILE)[2]
    code, out, _ = hacrl("watch", FILE)
    assert code == 0
    assert r"\x1b[31mx" in out


def test_columns_of_data_and_a_note(hacrl: Run) -> None:
    write_rows("rows.jsonl", {"prompt": "1", EVIL: "2"})
    assert (
        r"columns prompt, \x1b[31mx"
        in hacrl("train", write("a.yaml", task={"train": "rows.jsonl", "reward": "exact"}))[2]
    )
    name = write_rows(f"[red]{FILE}.jsonl", *({"prompt": f"{n}+1=", "answer": "1"} for n in range(2)))
    part = {"train": name, "eval": name, "reward": "exact"}
    code, out, _ = hacrl("train", write("mixed.yaml", task={"mixture": [part]}))
    assert code == 0
    assert r"note [red]\x1b[31mx" in out


@pytest.mark.parametrize(
    "body", ["raise ValueError(EVIL)", "return [EVIL] * 99", "return [{EVIL: 1}] * len(completions)"]
)
def test_a_reward_function(hacrl: Run, body: str) -> None:
    Path("reward.py").write_text(f"EVIL = {EVIL!r}\ndef f(prompts, completions, **columns):\n    {body}\n")
    rows = write_rows("rows.jsonl", *({"prompt": f"{n}+1=", "answer": "1"} for n in range(2)))
    code, _, err = hacrl("train", write("a.yaml", task={"train": rows, "reward": "reward.py:f"}))
    assert code == 2
    assert "Reward function" in err


def test_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, because transformers' warnings go to the standard error that was there at its import."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": EVIL}), encoding="utf-8")
    command = [sys.executable, "-m", "hacrl.cli", "train", write("a.yaml", agents=[{"id": "a", "model": "model"}])]
    ended = subprocess.run(command, capture_output=True, timeout=300)
    assert ended.returncode == 2
    printed = (ended.stdout + ended.stderr).decode()
    assert r"\x1b[31mx" in printed
    assert not CONTROL.search(printed)


def test_warnings_and_live_tables(hacrl: Run, capfd: pytest.CaptureFixture[str]) -> None:
    hacrl("train", "nothing.yaml")  # which sets logs up
    warn(EVIL)
    assert not CONTROL.search(capfd.readouterr().err)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    terminal = Terminal(width=100)
    with Live(table, console=terminal):
        terminal.print(EVIL, "[red]as it is[/red] :smile:")
    out = capfd.readouterr().out
    assert not CONTROL.search(out)
    assert "[red]as it is[/red] :smile:" in out


def test_a_traceback(hacrl: Run, capfd: pytest.CaptureFixture[str]) -> None:
    hacrl("train", "nothing.yaml")
    try:
        raise RuntimeError(EVIL)
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)
    err = capfd.readouterr().err
    assert r"RuntimeError: \x1b[31mx" in err
    assert not CONTROL.search(err)


def test_a_long_message_is_cut(hacrl: Run) -> None:
    code, _, err = hacrl("train", write("a.yaml", output_dir=["x" * 99_000], task="y" * 99_000))
    assert code == 2
    assert len(err) < 12_000


# --- nobody reads the output ---------------------------------------------------------------------------------------


def without_reader(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of the real command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hacrl.cli", *arguments]
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(writer)
    return ended.returncode, ended.stderr


def test_training_without_a_reader_stops_and_can_be_resumed(hacrl: Run) -> None:
    """The first line it prints is about step 0, which is then in the folder."""
    code, err = without_reader("train", write("a.yaml"), "algorithm.name=gspo")
    assert code == OUTPUT_CLOSED
    assert err == (
        "error stopped, because the program that read the output closed it; continue with `hacrl train run --resume`.\n"
    )
    code, out, _ = hacrl("train", "run", "--resume")
    assert code == 0
    assert "step 1/1" in out
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 1
    assert without_reader("rollouts", "run") == (OUTPUT_CLOSED, "")


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--help"], [], ["--version"], ["models"]])
def test_other_commands_without_a_reader_end_silently(arguments: list[str]) -> None:
    assert without_reader(*arguments) == (OUTPUT_CLOSED, "")
