"""Anybody can recompute the paper's formulas from a run's files: this does, with the independent reference."""

import math
from pathlib import Path
from typing import Any

import pytest

import reference
from conftest import MakeConfig
from hacrl.algorithms import ALGORITHMS
from hacrl.run import train
from hacrl.training.run_dir import RunDir, read_jsonl

CLOSE = {"rel": 1e-9, "abs": 1e-9}


def run_with_trace(make_config: MakeConfig, algorithm: dict[str, Any], *models: str, **changes: Any) -> RunDir:
    return RunDir(train(make_config(*models, algorithm=algorithm, trace=True, max_steps=3, **changes)).run_dir)


def capabilities_by_step(run: RunDir, ids: list[str], steps: int) -> list[list[float | None]]:
    performances = []
    for step in range(1, steps + 1):
        lines = read_jsonl(run.step_file("rollouts", step))
        rewards = [[line["reward"] for line in lines if line["source"] == agent] for agent in ids]
        performances.append([reference.performance(own) for own in rewards])
    return reference.capability_history(performances, 5)


@pytest.mark.parametrize(
    ("options", "models"),
    [
        ({}, ["llama-plus", "llama-minus"]),
        ({"alpha": 3.0, "delta": 0.5, "delta_step": 0.1}, ["llama-plus", "neox-pair", "qwen3-bpe"]),
        ({"cross_baseline": "source", "cross_omega": False}, ["llama-plus", "qwen3-bpe"]),
        ({"baseline": "joint", "cross_clip": False}, ["llama-small", "llama-large"]),
    ],
)
def test_hacpo_trace_is_the_papers_arithmetic(
    make_config: MakeConfig, options: dict[str, Any], models: list[str]
) -> None:
    run = run_with_trace(make_config, {"name": "hacpo", **options}, *models)
    config = run.config()
    ids = [agent.id for agent in config.agents]
    expected_options = reference.Options(**options)
    history = capabilities_by_step(run, ids, 3)
    seen_foreign_kept = 0
    for step in range(1, 4):
        capabilities = history[step - 1]
        rollouts = read_jsonl(run.step_file("rollouts", step))
        prompts = list(dict.fromkeys(line["prompt_id"] for line in rollouts))
        by_key = {(r["source"], r["prompt_id"], r["index"]): position for position, r in enumerate(rollouts)}
        group = [
            reference.Rollout(ids.index(r["source"]), prompts.index(r["prompt_id"]), r["reward"], (), ())
            for r in rollouts
        ]
        trace = read_jsonl(run.step_file("trace", step))
        for k, learner in enumerate(ids):
            advantages = reference.capability_advantages(group, k, capabilities, expected_options)
            lines = [line for line in trace if line["learner"] == learner]
            assert sorted({line["update"] for line in lines}) == list(range(len(models)))
            for line in lines:
                position = by_key[line["source"], line["prompt_id"], line["index"]]
                source, own = rollouts[position], line["source"] == learner
                assert line["advantage"] == pytest.approx(advantages[position], **CLOSE)
                old = source["logp_sum"] / source["num_tokens"]
                log_ratio = reference.clip(line["logp_sum"] / line["num_tokens"] - old, -10, 10)
                assert line["log_ratio"] == pytest.approx(log_ratio, **CLOSE)
                s, a = math.exp(log_ratio), line["advantage"]
                if own:
                    assert (line["omega"], line["lower"], line["upper"]) == (1, 1 - 3e-4, 1 + 4e-4)
                    objective, slope = reference.clipped_surrogate(s, a, 1 - 3e-4, 1 + 4e-4)
                    assert line["objective"] == pytest.approx(objective, **CLOSE)
                    assert line["kept"] == (slope != 0)
                else:
                    j = ids.index(line["source"])
                    omega = reference.omega(capabilities, j, k) if expected_options.cross_omega else 1.0
                    assert line["omega"] == pytest.approx(omega, **CLOSE)
                    if expected_options.cross_clip:
                        lower = reference.lower_bound(
                            line["update"], expected_options.delta, expected_options.delta_step
                        )
                        assert (line["lower"], line["upper"]) == (pytest.approx(lower, **CLOSE), 1.0)
                        assert line["kept"] == (lower <= s <= 1)
                        weight = reference.clip(s, lower, 1) ** (1 + expected_options.alpha) * omega
                        seen_foreign_kept += line["kept"]
                    else:
                        assert line["upper"] is None
                        weight = s * min(s, 1) ** expected_options.alpha * omega
                        seen_foreign_kept += 1
                    assert line["weight"] == pytest.approx(weight, **CLOSE)
                    assert line["objective"] == pytest.approx(weight * a, **CLOSE)
    assert seen_foreign_kept > 0


@pytest.mark.parametrize(
    "algorithm", ["hacpo", "gspo", "grpo", "naive", "swarm", "ftis", "success_gated", "luffy", "topr", "opd"]
)
def test_every_valid_rollout_appears_once_per_learner_and_pass(make_config: MakeConfig, algorithm: str) -> None:
    options = {"spread": True} if algorithm == "ftis" else {}
    run = run_with_trace(make_config, {"name": algorithm, **options}, "llama-plus", "neox-pair", num_iterations=2)
    for step in (1, 2, 3):
        rollouts = read_jsonl(run.step_file("rollouts", step))
        metrics = run.metrics()[step]
        trace = read_jsonl(run.step_file("trace", step))
        for learner, other in (("agent0", "agent1"), ("agent1", "agent0")):
            used = [r for r in rollouts if ALGORITHMS[algorithm].shares_rollouts or r["source"] == learner]
            dropped = metrics.get(f"{learner}/from_{other}/dropped", 0)
            keys = [(r["source"], r["prompt_id"], r["index"]) for r in trace if r["learner"] == learner]
            assert len(keys) == 2 * (len(used) - dropped)
            assert all(keys.count(key) == 2 for key in set(keys))
            # The count of updates does not restart in the second pass.
            updates = sorted({line["update"] for line in trace if line["learner"] == learner})
            assert updates == list(range(len(updates)))


def test_mini_batches_are_whole_prompts_and_the_same_for_every_learner(make_config: MakeConfig) -> None:
    run = run_with_trace(make_config, {"name": "hacpo"}, "llama-plus", "llama-minus", prompts_per_step=6)
    for step in (1, 2, 3):
        trace = read_jsonl(run.step_file("trace", step))
        batches = []
        for learner in ("agent0", "agent1"):
            lines = [line for line in trace if line["learner"] == learner]
            batches.append(
                [
                    {line["prompt_id"] for line in lines if line["update"] == update}
                    for update in range(1 + max(line["update"] for line in lines))
                ]
            )
        assert batches[0] == batches[1]
        assert sum(len(batch) for batch in batches[0]) == 6


def test_own_ratios_are_one_before_the_first_update(make_config: MakeConfig) -> None:
    run = run_with_trace(make_config, {"name": "hacpo"}, "llama-plus", "neox-pair")
    first = [line for line in read_jsonl(run.step_file("trace", 1)) if line["update"] == 0]
    own = [line for line in first if line["source"] == line["learner"]]
    assert own
    assert all(abs(line["log_ratio"]) < 1e-5 for line in own)


def test_files_hold_the_promised_fields(make_config: MakeConfig) -> None:
    run = run_with_trace(make_config, {"name": "hacpo"}, "llama-plus", "llama-minus")
    fields = {"step", "prompt_id", "source", "index", "prompt", "text", "reward", "finish_reason", "num_tokens"}
    assert fields | {"logp_sum"} <= set(read_jsonl(run.step_file("rollouts", 1))[0])
    fields = {"step", "learner", "source", "prompt_id", "index", "update", "num_tokens", "logp_sum", "log_ratio"}
    fields |= {"lower", "upper", "kept", "advantage", "omega", "weight", "objective"}
    assert set(read_jsonl(run.step_file("trace", 1))[0]) == fields
    assert Path(run.path / "config.yaml").is_file()
