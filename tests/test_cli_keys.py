"""`hacrl config`, `hacrl studies`, `python -m hacrl`, and completion in shells."""

import json
import os
import subprocess
import sys

import pytest

from hacrl.cli import main
from hacrl.config.reference import markdown
from hacrl.config.schema import json_schema
from hacrl.config.study import study_names


def hacrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hacrl", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hacrl", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_keys_that_contain_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert hacrl(monkeypatch, "config", "save", "total") == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "_" in line.split()[0]]
    assert keys == ["save_total_limit", "save_total_limit"], "of runs and of warm-ups"
    assert hacrl(monkeypatch, "config", "capability.window") == 0
    assert "Capability (`hacpo`, `hacpo_robust`)" in capsys.readouterr().out
    assert hacrl(monkeypatch, "config", "nonsense") == 2
    assert capsys.readouterr().err == "error No key contains nonsense. `hacrl config` lists all keys.\n"


def test_schema_and_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert hacrl(monkeypatch, "config", "--schema") == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert hacrl(monkeypatch, "config", "--markdown") == 0
    assert capsys.readouterr().out == markdown()


def test_studies_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert hacrl(monkeypatch, "studies") == 0
    listed = capsys.readouterr().out
    for name in study_names():
        assert f" {name} " in listed
    assert "Zoo pairs" in listed


def test_the_package_is_a_program_and_mistakes_stay_short() -> None:
    done = module("train", "no-such-preset")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error 'no-such-preset' is neither a file nor a preset")
    done = module("tran")
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_completes_commands() -> None:
    asked = {"_HACRL_COMPLETE": "complete_bash", "COMP_WORDS": "hacrl stu", "COMP_CWORD": "1"}
    done = module(**asked)
    assert (done.returncode, done.stdout.split()) == (0, ["study", "studies"])
