"""Runs in which agents score each other's rollouts: what is learned, logged and counted, and that it can be resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeConfig
from hacrl.config import RunConfig
from hacrl.run import resumed_config, train
from hacrl.training.plan import plan
from hacrl.training.run_dir import RunDir, read_jsonl
from integration.test_resume import assert_equal_runs

ONE_VOCABULARY, TWO_VOCABULARIES = ("llama-plus", "llama-minus"), ("qwen3-bpe", "neox-pair")


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("models", [ONE_VOCABULARY, TWO_VOCABULARIES], ids=["one vocabulary", "two"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_trains_and_resumes_to_the_bit(
    make_config: MakeConfig, tmp_path: Path, models: tuple[str, str], overlap: int
) -> None:
    changes = {"algorithm": {"name": "opd"}, "trace": True, "save_every": 1, "overlap": overlap}
    whole = train(make_config(*models, **changes, output_dir=str(tmp_path / "whole"))).run_dir
    metrics = RunDir(whole).metrics()
    for line in metrics[1:]:
        for k in range(2):
            other = f"agent{k}/from_agent{1 - k}"
            assert line[f"agent{k}/grad_norm"] > 0
            # Minus the KL divergence from the teacher, which is another model: below 0.
            assert -5 < line[f"{other}/token_advantage"] < 0
            assert 0.3 < line[f"{other}/scored"] <= 1
            assert line[f"agent{k}/time/score"] > 0
    summary = summary_of(whole)
    for k in range(2):
        scored = sum(line[f"agent{k}/tokens_scored"] for line in metrics[1:])
        forward = sum(line[f"agent{k}/tokens_forward"] for line in metrics[1:])
        assert summary["agents"][f"agent{k}"]["tokens_forward"] == scored + forward
        if models == ONE_VOCABULARY:  # all of the other's tokens, but for what cannot be read
            tokens = sum(line["num_tokens"] for step in (1, 2) for line in rollouts(whole, step, f"agent{1 - k}"))
            assert 0.9 * tokens < scored <= tokens
        seconds = sum(line[f"agent{k}/time/{part}"] for line in metrics[1:] for part in ("score", "learn"))
        assert summary["agents"][f"agent{k}"]["learn_seconds"] == pytest.approx(seconds)
    assert summary["tokens_forward"] == sum(agent["tokens_forward"] for agent in summary["agents"].values())

    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    (tmp_path / "run" / "summary.json").unlink()
    resumed = train(resumed_config(tmp_path / "run", []), resume=True).run_dir
    assert_equal_runs(resumed, whole)
    assert summary_of(resumed)["tokens_forward"] == summary["tokens_forward"]


def rollouts(run_dir: Path, step: int, source: str) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(RunDir(run_dir).step_file("rollouts", step)) if line["source"] == source]


def test_every_token_may_teach_where_rewards_say_nothing(make_config: MakeConfig) -> None:
    """Distillation alone, and a step: the A of a rollout is what the teacher adds, whatever its reward."""
    options = {"name": "opd", "reward_weight": 0.0}
    run_dir = train(make_config(*ONE_VOCABULARY, algorithm=options, max_steps=1, rollouts_per_update=64)).run_dir
    line = RunDir(run_dir).metrics()[1]
    for k in range(2):
        own = rollouts(run_dir, 1, f"agent{k}")
        uses = [one["learners"][f"agent{k}"] for one in own]
        assert {len(one["learners"]) for one in own} == {1}
        assert sum(use["advantage"] != 0 for use in uses) > 0.9 * len(uses)
        lengths = [one["num_tokens"] for one in own]
        total = float(np.dot([use["advantage"] for use in uses], lengths)) / sum(lengths)
        pair = {name: line[f"agent{k}/from_agent{1 - k}/{name}"] for name in ("scored", "token_advantage")}
        assert total == pytest.approx(pair["scored"] * pair["token_advantage"])
        # Before the first update all ratios are 1: the objective is the mean of A over the rollouts.
        assert -line[f"agent{k}/loss"] == pytest.approx(np.mean([use["advantage"] for use in uses]), abs=1e-4)


def test_the_weaker_learns_from_the_stronger_alone(make_config: MakeConfig) -> None:
    options = {"name": "opd", "teachers": "stronger"}
    line = RunDir(train(make_config("llama-weak", "llama-large", algorithm=options, max_steps=1)).run_dir).metrics()[1]
    assert line["agent0/capability"] < line["agent1/capability"]
    assert (line["agent0/tokens_scored"] == 0, line["agent1/tokens_scored"] > 0) == (True, True)
    assert "agent0/from_agent1/token_advantage" in line
    assert not [name for name in line if name.startswith("agent1/from_")]


def test_alone_it_is_grpo(make_config: MakeConfig, tmp_path: Path) -> None:
    runs = [
        train(make_config("llama-plus", algorithm={"name": name}, output_dir=str(tmp_path / name))).run_dir
        for name in ("opd", "grpo")
    ]
    first, second = (RunDir(run).metrics() for run in runs)
    assert {"agent0/tokens_scored", "agent0/time/score"} == set(first[1]) - set(second[1])
    for line, other in zip(first, second, strict=True):
        for name in other:
            assert "time" in name or line[name] == other[name]


def test_the_plan_has_the_passes_for_others(make_config: MakeConfig) -> None:
    def learning(config: RunConfig) -> list[float]:
        return [row.learning for row in plan(config)]

    opd, grpo = (learning(make_config(algorithm={"name": name}, log_kl=False)) for name in ("opd", "grpo"))
    # A forward pass over the other's rollouts beside forward and backward passes over as many own ones.
    assert opd == pytest.approx([seconds * 4 / 3 for seconds in grpo])
