"""The example of own data and rewards trains, and its rewards are what its functions return."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from hacrl import RunConfig
from hacrl.run import train
from hacrl.training.run_dir import read_jsonl

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_reward"


@pytest.fixture
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward_of_the_example", EXAMPLE / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: ModuleType) -> None:
    monkeypatch.chdir(ROOT)
    changes = ["max_steps=1", "task.eval_size=20", f"output_dir={tmp_path / 'run'}"]
    result = train(RunConfig.load(EXAMPLE / "run.yaml", changes))
    rows = {row["prompt"]: row for row in read_jsonl(EXAMPLE / "train.jsonl")}
    lines = read_jsonl(result.run_dir / "rollouts" / "step-000001.jsonl")
    assert len(lines) == 2 * 32 * 4
    for line in lines:
        columns = {name: [value] for name, value in rows[line["prompt"]].items()}
        expected = {name: getattr(reward, name)([line["text"]], **columns)[0] for name in ("right", "steps")}
        assert line["reward_parts"] == expected
        assert line["reward"] == pytest.approx(0.8 * expected["right"] + 0.2 * (expected["steps"] or 0.0))
    assert {line["reward_parts"]["right"] for line in lines} == {0.0, 1.0}


def test_the_rewards_by_hand(reward: ModuleType) -> None:
    texts = ["1+2=3;3-1=2;#2", "1+2=4;4-1=3;#2", "#2", "#3"]
    assert reward.steps(texts) == [1.0, 0.5, None, None]
    assert reward.right(texts, answer=["2"] * 4, longest=[14, 13, 2, 2]) == [1.0, 0.0, 1.0, 0.0]


def test_the_data_have_no_row_twice() -> None:
    prompts = [json.loads(line)["prompt"] for name in ("train", "test") for line in (EXAMPLE / f"{name}.jsonl").open()]
    assert len(prompts) == len(set(prompts)) == 700
