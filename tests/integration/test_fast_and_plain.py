"""The fast implementation beside the plain one, and models that only the plain one can run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from conftest import MakeConfig
from hacrl.agents.loading import ZOO
from hacrl.run import train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.run_dir import RunDir, read_jsonl
from tiny_models import tiny


def test_fast_and_plain_runs_are_the_same_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """The same samples in the first step, and figures that differ by rounding alone."""
    runs = []
    for fast in (True, False):
        task = {"name": "arithmetic", "eval_size": 2}
        config = make_config("llama-plus", "neox-pair", fast=fast, task=task, output_dir=str(tmp_path / str(fast)))
        runs.append(RunDir(train(config).run_dir))
    first, plain = ([line["text"] for line in read_jsonl(run.step_file("rollouts", 1))] for run in runs)
    assert first == plain
    metrics, expected = (run.metrics() for run in runs)
    apart = ("tokens_trained", "tokens_forward", "logprob_gap", "/kl", "time", "entropy")
    for step, expected_step in zip(metrics[:2], expected[:2], strict=True):
        assert step.keys() == expected_step.keys()
        for name, value in expected_step.items():
            if not any(word in name for word in apart):
                assert step[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert metrics[2]["agent0/reward"] == pytest.approx(expected[2]["agent0/reward"], abs=0.15)
    assert metrics[1]["agent0/tokens_trained"] < expected[1]["agent0/tokens_trained"]
    for name in ("agent0/logprob_gap", "agent1/logprob_gap"):
        assert max(metrics[1][name], expected[1][name]) < 1e-5


def write_task(folder: Path) -> dict[str, Any]:
    """Rewards that a model with random weights can earn: every other completion has an even length."""
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in ArithmeticTask().train(0, 20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text(
        "def score(prompts, completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n"
    )
    return {"train": str(folder / "train.jsonl"), "reward": f"{folder}/rewards.py:score"}


def test_a_model_that_cannot_be_driven_learns_through_generate(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "stablelm"
    tokenizer = AutoTokenizer.from_pretrained(ZOO / "llama-plus")
    tiny("stablelm", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    agents = [{"id": "other", "model": str(folder), "fast": True}, {"id": "zoo", "model": "zoo:llama-plus"}]
    config = make_config(agents=agents, task=write_task(tmp_path), max_completion_length=20)
    with caplog.at_level(logging.WARNING, "hacrl"):
        run = RunDir(train(config).run_dir)
    messages = {record.getMessage() for record in caplog.records if record.name == "hacrl"}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("Agent other: falling back to `generate` and to plain learning, because of StableLm")
    for step in run.metrics()[1:]:
        assert step["other/updates"] == 2
        assert step["other/logprob_gap"] < 1e-5
        assert step["other/grad_norm"] > 0
    start = tiny("stablelm", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).state_dict()
    after = type(tiny("stablelm")).from_pretrained(complete_checkpoints(run.path)[-1] / "agents" / "other").state_dict()
    assert start.keys() == after.keys()
    assert any(not torch.equal(start[name], after[name]) for name in start)
