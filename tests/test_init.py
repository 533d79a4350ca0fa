"""`hacrl init`: its files are accepted by `hacrl train`, and one of them trains."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl import RunConfig, train
from hacrl.cli import main

TRL: dict[str, Any] = {
    "model_name_or_path": "zoo:llama-weak",
    "dataset_name": "train.jsonl",
    "reward_funcs": ["think_format_reward"],
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "num_train_epochs": 1,
    "bf16": False,
    "logging_steps": 1,
    "lr_scheduler_typ": "cosine",
    "output_dir": "run",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("grpo.yaml").write_text(yaml.safe_dump(TRL))


def hacrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hacrl", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_a_starting_file_is_valid_and_is_never_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["init", "zoo:llama-weak", "zoo:llama-weak", "--data", "train.jsonl", "--reward", "exact"]
    assert hacrl(monkeypatch, *arguments) == 0
    text = Path("my.yaml").read_text()
    assert "# " in text
    assert hacrl(monkeypatch, "train", "my.yaml", "--dry-run") == 0
    assert "The settings are valid" in capsys.readouterr().out
    assert hacrl(monkeypatch, *arguments) == 2
    assert "my.yaml exists, and is not overwritten" in capsys.readouterr().err
    assert Path("my.yaml").read_text() == text


@pytest.mark.parametrize("data", ["arithmetic", "gym:chain_sum"])
def test_tasks_without_data(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hacrl(monkeypatch, "init", "zoo:llama-weak", "--data", data, "--output", "a.yaml") == 0
    assert hacrl(monkeypatch, "train", "a.yaml", "--dry-run") == 0
    assert hacrl(monkeypatch, "init", "--from-trl", "grpo.yaml", "--data", data, "--output", "b.yaml") == 0
    assert hacrl(monkeypatch, "train", "b.yaml", "--dry-run") == 0
    assert RunConfig.load("b.yaml").task.name == data


def test_a_file_of_trl_is_translated_and_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["init", "zoo:llama-weak", "--from-trl", "grpo.yaml", "--reward", "exact", "--output", "t.yaml"]
    assert hacrl(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    for key in TRL:
        assert key in said
    assert "num_train_epochs -> max_steps: 3" in said
    assert "not taken over: lr_scheduler_typ: TRL 1.16 does not know this key; did you mean lr_scheduler_type?" in said
    config = RunConfig.load("t.yaml")
    assert [agent.id for agent in config.agents] == ["llama-weak", "llama-weak-2"]
    assert train(config).summary["steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name the models and the data"),
        (["zoo:llama-weak"], "Name the models and the data"),
        (["--from-trl", "nothing.yaml"], "There is no file nothing.yaml"),
        (["zoo:llama-weak", "--data", "trian.jsonl"], "There is no data set trian.jsonl"),
        (
            ["zoo:llama-wek", "--data", "train.jsonl"],
            "the zoo has no model 'llama-wek'; did you mean llama-weak?",
        ),
        (["zoo:llama-weak", "--data", "arithmetic", "--reward", "exact"], "has its own verifier"),
        (["--from-trl", "grpo.yaml", "--data", "arithmetic", "--reward", "exact"], "has its own verifier"),
        (["zoo:llama-weak", "--data", "arithmetic", "--output", "no/a.yaml"], "The folder no does not exist"),
    ],
)
def test_mistakes_are_sentences(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hacrl(monkeypatch, "init", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not Path("my.yaml").exists()


def test_our_own_config_is_not_taken_for_one_of_trl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ours.yaml").write_text("agents: [{id: a, model: m}]\n")
    assert hacrl(monkeypatch, "init", "--from-trl", "ours.yaml") == 2
    assert "is a config of hacrl already" in capsys.readouterr().err
