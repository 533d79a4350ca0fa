"""Whole runs of real tiny models."""

import gc
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
from conftest import MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.algorithms import ALGORITHMS
from hacrl.errors import TrainingDiverged, UserError
from hacrl.execution.local import LocalExecutor
from hacrl.run import resumed_config, train
from hacrl.tasks import build_task
from hacrl.tasks.arithmetic import ArithmeticTask, verify
from hacrl.training.checkpoint import complete_checkpoints, step_of
from hacrl.training.run_dir import RunDir, read_jsonl
from hacrl.training.trainer import Trainer
from integration.test_guards import Overflowing


def finite(metrics: dict[str, Any]) -> bool:
    return all(value is None or math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    "models",
    [
        ["llama-plus"],
        ["llama-plus", "llama-minus"],
        ["llama-plus", "neox-pair", "qwen3-bpe"],
        ["llama-plus", "neox-pair", "qwen3-bpe", "olmo2-char"],
    ],
)
@pytest.mark.parametrize("algorithm", ["hacpo", "gspo", "grpo", "naive"])
def test_any_number_of_agents_under_any_algorithm(make_config: MakeConfig, algorithm: str, models: list[str]) -> None:
    config = make_config(*models, algorithm={"name": algorithm, "beta": 0.01}, max_steps=1)
    result = train(config)
    step = RunDir(result.run_dir).metrics()[1]
    assert finite(step)
    shares = algorithm in ("hacpo", "naive")
    for k, agent in enumerate(config.agents):
        rollouts_used = 16 * (len(models) if shares else 1)
        assert step[f"{agent.id}/updates"] == rollouts_used / 16
        assert step[f"{agent.id}/logprob_gap"] < 1e-5
        others = [other.id for j, other in enumerate(config.agents) if j != k]
        assert all((f"{agent.id}/from_{other}/ratio_mean" in step) == shares for other in others)
    assert len(read_jsonl(RunDir(result.run_dir).step_file("rollouts", 1))) == 16 * len(models)


def test_swarm_takes_every_part_of_a_mixture_from_both(make_config: MakeConfig) -> None:
    """The parts of a mixture alternate: by position, one would come from the learner and one from the other agent."""
    parts = [{"name": "arithmetic", "id": "easy", "max_operand": 9}, {"name": "arithmetic", "id": "hard"}]
    config = make_config(
        *("llama-plus", "llama-minus"),
        algorithm={"name": "swarm"},
        task={"mixture": parts, "eval_size": 2},
        prompts_per_step=16,
        max_steps=2,
    )
    run = RunDir(train(config).run_dir)
    lines = [line for step in (1, 2) for line in read_jsonl(run.step_file("rollouts", step))]
    used = {
        (line["prompt_id"].partition("/")[0], line["source"])
        for line in lines
        if line["learners"]["agent0"].get("advantage")
    }
    assert used == {(part, source) for part in ("easy", "hard") for source in ("agent0", "agent1")}


def test_token_ratios_between_tokenizers_are_refused_at_the_start(make_config: MakeConfig) -> None:
    config = make_config("llama-plus", "llama-minus", "neox-pair", algorithm={"name": "ftis"}, max_steps=1)
    with pytest.raises(UserError, match=r"not defined between agent0 and agent2: .* algorithm\.spread=true"):
        train(config)
    assert not Path(config.output_dir).exists()
    train(make_config("llama-plus", "llama-minus", algorithm={"name": "ftis"}, max_steps=1))


def test_token_ratios_of_a_run_of_an_earlier_version_go_on_with_a_warning(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"save_every": 1, "max_steps": 1}
    config = make_config("llama-plus", "neox-pair", algorithm={"name": "ftis", "spread": True}, **settings)
    run = RunDir(train(config).run_dir)
    run.config_file.write_text(run.config_file.read_text().replace("  spread: true\n", ""))
    train(resumed_config(run.path, ["max_steps=2"]), resume=True)
    assert "not defined between agent0 and agent1: their tokenizers differ." in caplog.text
    assert run.metrics()[-1]["step"] == 2


@pytest.mark.parametrize("algorithm", ["swarm", "ftis", "success_gated", "luffy", "topr"])
def test_the_other_ways_to_share(make_config: MakeConfig, algorithm: str) -> None:
    """Among two agents with one vocabulary and one with another, foreign rollouts reach the gradient."""
    models = ["llama-plus", "neox-pair", "llama-minus"]
    spread = {"spread": True} if algorithm == "ftis" else {}
    config = make_config(
        *models, algorithm={"name": algorithm, "beta": 0.01, **spread}, prompts_per_step=8, max_steps=3
    )
    steps = RunDir(train(config).run_dir).metrics()[1:]
    assert all(finite(step) for step in steps)
    ids = [agent.id for agent in config.agents]
    for agent in ids:
        assert all(step[f"{agent}/updates"] == (2 if algorithm == "swarm" else 6) for step in steps)
        assert all(step[f"{agent}/logprob_gap"] < 1e-5 for step in steps)
    for source in ids:
        assert any(step.get(f"{agent}/from_{source}/gradient_mass", 0) > 0 for step in steps for agent in ids)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "rft"},
        {"name": "rft", "reinforce": "never", "imitation": {"when": "step", "epochs": 1}},
        {"name": "rft", "reinforce": "after", "imitation": {"when": "middle", "answers": "others", "restart": True}},
        {"name": "hacpo_robust", "imitation": {"when": "end", "batch_size": 16}},
    ],
    ids=str,
)
def test_imitation(make_config: MakeConfig, options: dict[str, Any]) -> None:
    """Right answers of a run are kept and imitated when the schedule says so; their updates are counted."""
    config = make_config(algorithm=options, prompts_per_step=16, max_steps=4)
    result = train(config)
    steps = RunDir(result.run_dir).metrics()[1:]
    assert all(finite(step) for step in steps)
    imitation = config.algorithm.imitation
    for agent in config.agents:
        due = [f"{agent.id}/imitation/updates" in step for step in steps]
        assert due == [imitation.due(step, 4) for step in range(1, 5)]
        updates = sum(step[f"{agent.id}/updates"] + step.get(f"{agent.id}/imitation/updates", 0) for step in steps)
        assert result.summary["agents"][agent.id]["updates"] == updates
        assert any(step.get(f"{agent.id}/imitation/answers", 0) > 0 for step in steps)
        reinforced = [step[f"{agent.id}/updates"] > 0 for step in steps]
        assert reinforced == [config.algorithm.reinforces(step, 4) for step in range(1, 5)]


def test_held_out_accuracy_rises_beyond_what_chance_could_do(make_config: MakeConfig) -> None:
    """The mean rise of both agents exceeds every difference between untrained accuracies on disjoint problem sets."""
    config = make_config(
        task={"name": "arithmetic", "eval_size": 600},
        prompts_per_step=64,
        rollouts_per_update=128,
        lr_scheduler_type="linear",
        max_steps=10,
    )
    summary = train(config).summary
    rises = [agent["final_accuracy"] - agent["start_accuracy"] for agent in summary["agents"].values()]

    problems = ArithmeticTask().heldout("test", 3000)
    untrained = np.zeros(5)
    for agent_config in config.agents:
        agent = Agent(agent_config, 0, config.algorithm, seed=0)
        texts = agent.answer(problems)
        right = [verify(text, problem.answer) for text, problem in zip(texts, problems, strict=True)]
        untrained += np.reshape(right, (5, 600)).mean(1) / 2
    assert np.mean(rises) > max(untrained) - min(untrained)


def test_unequal_numbers_of_completions_and_settings_of_each_agent(make_config: MakeConfig) -> None:
    agents = [
        {"id": "a", "model": "zoo:llama-plus", "num_generations": 2, "temperature": 0.7},
        {"id": "b", "model": "zoo:neox-pair", "num_generations": 6, "learning_rate": 0.0, "max_completion_length": 20},
    ]
    config = make_config(agents=agents, max_steps=1)
    run = RunDir(train(config).run_dir)
    lines, metrics = read_jsonl(run.step_file("rollouts", 1)), run.metrics()[1]
    assert [sum(line["source"] == agent for line in lines) for agent in "ab"] == [8, 24]
    assert metrics["a/learning_rate"] == 1e-4
    assert metrics["b/learning_rate"] == 0
    assert max(line["num_tokens"] for line in lines if line["source"] == "b") <= 20
    before = torch_weights(ZOO / "neox-pair")
    after = torch_weights(complete_checkpoints(run.path)[-1] / "agents" / "b")
    assert all(torch.equal(before[name].float(), after[name]) for name in before)


def torch_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_checkpoints_open_without_this_package(make_config: MakeConfig) -> None:
    """In an interpreter that cannot import hacrl, from the checkpoint's folders alone."""
    config = make_config("llama-plus", "neox-pair", "qwen3-bpe", max_steps=1)
    checkpoint = complete_checkpoints(train(config).run_dir)[-1]
    script = (
        "import sys; sys.modules['hacrl'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)\n"
        "    text = tokenizer.apply_chat_template([{'role': 'user', 'content': '12+7-3='}], tokenize=False)\n"
        "    ids = tokenizer(text, return_tensors='pt', add_special_tokens=False).input_ids\n"
        "    print(model.dtype, tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))\n"
    )
    folders = [str(checkpoint / "agents" / agent.id) for agent in config.agents]
    done = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.float32") == 3
    assert done.stdout.count("12+7-3=") == 3


def test_rewards_of_none_are_left_out_and_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    """A whole agent's, too: its capability window stays as it was, the others learn on."""
    task = write_task(tmp_path, "return [None if len(c) % 2 else 1.0 * (len(c) % 4 == 0) for c in completions]")
    run = RunDir(train(make_config(task=task, trace=True, max_steps=1)).run_dir)
    lines, metrics = read_jsonl(run.step_file("rollouts", 1)), run.metrics()[1]
    for agent in ("agent0", "agent1"):
        unjudged = [line for line in lines if line["source"] == agent and line["reward"] is None]
        assert metrics[f"{agent}/unverified"] == len(unjudged)
        judged = [line["reward"] for line in lines if line["source"] == agent and line["reward"] is not None]
        assert metrics[f"{agent}/reward"] == pytest.approx(np.mean(judged))
    judged_keys = {key(line) for line in lines if line["reward"] is not None}
    for learner in ("agent0", "agent1"):
        traced = [key(line) for line in read_jsonl(run.step_file("trace", 1)) if line["learner"] == learner]
        assert len(traced) == len(set(traced))
        assert set(traced) <= judged_keys


def test_an_agent_without_any_valid_reward_keeps_its_window(make_config: MakeConfig, tmp_path: Path) -> None:
    # Agent 1 is cut off after two tokens, which this verifier refuses to judge.
    task = write_task(tmp_path, "return [None if len(c) < 5 else float('#' in c) for c in completions]")
    agents = [
        {"id": "a", "model": "zoo:llama-plus"},
        {"id": "b", "model": "zoo:llama-minus", "max_completion_length": 2},
    ]
    run = RunDir(train(make_config(task=task, agents=agents, max_steps=2)).run_dir)
    for metrics in run.metrics()[1:]:
        assert metrics["b/unverified"] == 16
        assert metrics["b/capability"] is None
        assert metrics["a/from_b/omega"] == 1.0
        assert "a/reward" in metrics


def test_nothing_to_judge_at_all_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    task = write_task(tmp_path, "return [None] * len(completions)")
    with pytest.raises(UserError, match="judge none of 32 rollouts"):
        train(make_config(task=task))


def key(line: dict[str, Any]) -> tuple[str, str, int]:
    return line["source"], line["prompt_id"], line["index"]


def write_task(folder: Path, body: str) -> dict[str, Any]:
    """A data file and a reward function whose body is given."""
    problems = ArithmeticTask().train(0, 40)
    rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text(f"def score(prompts, completions, answer, **columns):\n    {body}\n")
    return {"train": str(folder / "train.jsonl"), "reward": f"{folder}/rewards.py:score"}


def test_long_completions_can_be_penalised(make_config: MakeConfig, tmp_path: Path) -> None:
    """In each agent's own tokens, also in a mixture; held-out answers are not."""
    rows = write_task(tmp_path, "return [1.0] * len(completions)")
    penalty = {"name": "soft_overlong", "max_completion_length": 30, "soft_punish_cache": 20, "weight": 0.5}
    part = {**rows, "eval": rows["train"], "reward": [rows["reward"], penalty]}
    mixture = {"mixture": [{"name": "arithmetic"}, {"id": "own", **part}], "eval_size": 4}
    algorithm = {"name": "hacpo_robust", "reward_min": -0.5}
    config = make_config("llama-plus", "neox-pair", algorithm=algorithm, task=mixture, max_steps=1)
    run = RunDir(train(config).run_dir)
    lines = [line for line in read_jsonl(run.step_file("rollouts", 1)) if "reward_parts" in line]
    expected = [reference.soft_overlong(line["num_tokens"], 30, 20) for line in lines]
    assert len(lines) == 16
    assert [line["reward_parts"]["soft_overlong"] for line in lines] == pytest.approx(expected)
    assert [line["reward"] for line in lines] == pytest.approx([1 + p / 2 for p in expected])
    assert len(set(expected)) > 3
    assert run.metrics()[1]["agent0/eval_accuracy/own"] == 1.0


def test_dynamic_sampling_replaces_groups_without_spread(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1, dynamic_sampling=True, dynamic_sampling_rounds=4, num_generations=2)
    run = RunDir(train(config).run_dir)
    metrics = run.metrics()[1]
    lines = read_jsonl(run.step_file("rollouts", 1))
    assert len(lines) == 4 * 4
    assert metrics["prompts_discarded"] > 0
    assert metrics["agent0/num_rollouts"] == (4 + metrics["prompts_discarded"]) * 2
    with_spread = [len({line["reward"] for line in lines if line["prompt_id"] == p}) > 1 for p in prompt_ids(lines)]
    assert sum(with_spread) >= 3


def prompt_ids(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["prompt_id"] for line in lines))


def test_truncated_completions_can_be_masked(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1, mask_truncated_completions=True, max_completion_length=17, trace=True)
    run = RunDir(train(config).run_dir)
    cut = {key(line) for line in read_jsonl(run.step_file("rollouts", 1)) if line["finish_reason"] == "length"}
    traced = {key(line) for line in read_jsonl(run.step_file("trace", 1))}
    assert cut
    assert not cut & traced


def test_old_checkpoints_go_and_the_best_stays(make_config: MakeConfig) -> None:
    config = make_config(max_steps=5, eval_every=1, save_every=1, save_total_limit=2, keep_best=True)
    result = train(config)
    steps = [step_of(path) for path in complete_checkpoints(result.run_dir)]
    assert steps == sorted({4, 5, result.summary["best_step"]} | ({3} if result.summary["best_step"] > 3 else set()))


def test_held_out_answers_are_also_sampled(make_config: MakeConfig, tmp_path: Path) -> None:
    """Almost without temperature they are the greedy ones; at temperature 2 they are worse."""
    changes: dict[str, Any] = {"max_steps": 1, "eval_samples": 2, "task": {"name": "arithmetic", "eval_size": 40}}
    cold = train(make_config(**changes, temperature=1e-3, max_logprob_gap=100.0)).summary["agents"].values()
    assert all(agent["start_sampled"] == agent["start_accuracy"] > 0 for agent in cold)
    hot = train(make_config(**changes, temperature=2.0, output_dir=str(tmp_path / "hot"))).summary["agents"].values()
    assert [agent["start_accuracy"] for agent in hot] == [agent["start_accuracy"] for agent in cold]
    assert all(agent["start_sampled"] < agent["start_accuracy"] / 2 for agent in hot)


@pytest.mark.parametrize(("save_every", "steps"), [(0, []), (2, [2])])
def test_a_run_may_end_without_a_checkpoint(make_config: MakeConfig, save_every: int, steps: list[int]) -> None:
    result = train(make_config(max_steps=4, save_every=save_every, save_final=False))
    assert [step_of(path) for path in complete_checkpoints(result.run_dir)] == steps
    assert result.summary["steps"] == 4
    if not steps:
        with pytest.raises(UserError, match="no checkpoint to go on from"):
            train(resumed_config(result.run_dir, ["max_steps=5"]), resume=True)
        assert RunDir(result.run_dir).summary() == result.summary


def test_three_updates_that_are_not_finite_end_the_run(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is updated, and the last good checkpoint stays whole."""
    monkeypatch.setitem(ALGORITHMS, "overflowing", Overflowing)
    task = write_task(tmp_path, "return [float(i % 2) for i in range(len(completions))]")
    config = make_config("llama-plus", algorithm={"name": "overflowing"}, task=task, max_steps=1, save_every=1)
    run_dir = train(config).run_dir
    good = complete_checkpoints(run_dir)[-1]
    weights = (good / "agents" / "agent0" / "model.safetensors").read_bytes()
    # Infinite log-ratios are clamped, so it takes infinite advantages to break the objective.
    write_task(tmp_path, "return [2.0 * (i % 2) for i in range(len(completions))]")
    with pytest.raises(TrainingDiverged, match="3 updates in a row"):
        train(resumed_config(run_dir, ["max_steps=9", "save_every=0"]), resume=True)
    assert complete_checkpoints(run_dir) == [good]
    assert (good / "agents" / "agent0" / "model.safetensors").read_bytes() == weights


def test_side_by_side_on_a_cpu_gives_the_same_as_one_after_the_other(make_config: MakeConfig, tmp_path: Path) -> None:
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "import hacrl.execution.local as local\n"
        "from hacrl import RunConfig, train\n"
        "config = RunConfig.load(sys.argv[1])\n"
        "workers = int(sys.argv[2])\n"
        "executor = local.LocalExecutor.__init__\n"
        "def patched(self, *arguments):\n"
        "    executor(self, *arguments); self.workers = workers\n"
        "local.LocalExecutor.__init__ = patched\n"
        "train(config)\n"
    )
    weights = []
    for workers in (1, 2):
        config = make_config(max_steps=2, output_dir=str(tmp_path / f"run{workers}"))
        (tmp_path / f"{workers}.yaml").write_text(config.to_yaml())
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, str(tmp_path / f"{workers}.yaml"), str(workers)]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        checkpoint = complete_checkpoints(tmp_path / f"run{workers}")[-1]
        weights.append([torch_weights(checkpoint / "agents" / agent.id) for agent in config.agents])
    for alone, beside in zip(*weights, strict=True):
        assert all(torch.equal(alone[name], beside[name]) for name in alone)


class Census:
    """A watcher that counts what is alive in this process after each step."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.open: list[tuple[int, int]] = []

    def on_phase(self, phase: str) -> None: ...

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        gc.collect()
        self.tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        self.open.append((len(os.listdir("/proc/self/fd")), threading.active_count()))


def test_steps_leave_nothing_behind(make_config: MakeConfig) -> None:
    """Neither tensors nor open files nor threads become more from step to step."""
    config = make_config("llama-plus", "neox-pair", max_steps=12, save_every=4, eval_every=4)
    task, _ = build_task(config.task, config.seed)
    census = Census()
    with task.verifier, closing(LocalExecutor(config)) as executor:
        Trainer(config, task, executor, RunDir.create(config), census).train()
    settled = slice(2, None)  # the optimizer's state comes with the first update
    assert len(census.tensors) == 13
    assert len(set(census.tensors[settled])) == 1
    assert len(set(census.open[settled])) == 1
