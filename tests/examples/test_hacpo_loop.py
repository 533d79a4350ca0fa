"""The loop in one file computes what the trainer computes, and runs as its docstring says."""

import copy
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import hacpo_loop
from conftest import MakeConfig
from hacrl.algorithms import HACPO
from hacrl.config import RunConfig
from hacrl.execution.local import LocalExecutor
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks import build_task
from hacrl.tasks.problem import Problem
from hacrl.training.run_dir import RunDir, read_jsonl
from hacrl.training.trainer import Trainer
from tiny_models import compute_in_full

ROOT = Path(__file__).parents[2]
STEPS, SEED = 2, 3
CLOSE = {"rel": 1e-9, "abs": 1e-9}
KEYS = ("learner", "update", "source", "prompt_id", "index")
"""What names a line of a trace."""


class RecordingExecutor(LocalExecutor):
    """Runs the agents, and keeps the rollouts of each step."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.recorded: list[list[list[Rollout]]] = []

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[list[Rollout]]:
        rollouts = super().sample(problems, step, sampling_round)
        self.recorded.append([copy.deepcopy(own.value) for own in rollouts])
        return rollouts


class Nobody:
    """A watcher that does nothing."""

    def on_phase(self, phase: str) -> None: ...
    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...


def config_of_the_loop(make_config: MakeConfig, *models: str) -> RunConfig:
    """A run of the trainer with the settings of the loop."""
    return make_config(
        *models,
        prompts_per_step=hacpo_loop.PROMPTS_PER_STEP,
        num_generations=hacpo_loop.NUM_GENERATIONS,
        rollouts_per_update=hacpo_loop.ROLLOUTS_PER_UPDATE,
        max_completion_length=hacpo_loop.MAX_COMPLETION_LENGTH,
        learning_rate=hacpo_loop.LEARNING_RATE,
        lr_scheduler_type="linear",
        max_grad_norm=hacpo_loop.MAX_GRAD_NORM,
        max_steps=STEPS,
        save_final=False,
        seed=SEED,
        trace=True,
    )


def test_the_loop_has_the_defaults_of_hacpo() -> None:
    hacpo = HACPO()
    assert hacpo.capability.window == hacpo_loop.WINDOW
    for option in ("alpha", "delta", "delta_step", "epsilon", "epsilon_high"):
        assert getattr(hacpo, option) == getattr(hacpo_loop, option.upper())


@pytest.mark.parametrize("models", [("llama-plus", "neox-pair"), ("llama-plus", "llama-minus")], ids="-".join)
def test_the_loop_is_the_trainer(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, models: tuple[str, ...]
) -> None:
    """From the same rollouts: the same advantages, ratios and weights, and after two steps the same models.

    In float64. In float32 AdamW turns rounding into steps as large as the learning rate where a gradient is zero but
    for rounding, as that of a bias of attention keys is.
    """
    monkeypatch.setattr(hacpo_loop, "PROMPTS_PER_STEP", 16)  # as many updates as with 64 and 128
    monkeypatch.setattr(hacpo_loop, "ROLLOUTS_PER_UPDATE", 32)
    config = config_of_the_loop(make_config, *models)
    task, _ = build_task(config.task, config.seed)
    run = RunDir.create(config)
    with task.verifier, closing(RecordingExecutor(config)) as executor:
        for trained in executor.agents:
            compute_in_full(trained.model.double(), monkeypatch)
        Trainer(config, task, executor, run, Nobody()).train()

    agents = [hacpo_loop.Agent(index, f"zoo:{model}") for index, model in enumerate(models)]
    starts = [[weight.detach().clone() for weight in agent.model.parameters()] for agent in agents]
    for agent in agents:
        compute_in_full(agent.model.double(), monkeypatch)

    def recorded(agent: hacpo_loop.Agent, problems: list[Problem], step: int) -> list[Rollout]:
        rollouts = executor.recorded[step - 1][agent.index]
        assert [problems[rollout.prompt_index].id for rollout in rollouts] == [r.prompt_id for r in rollouts]
        return rollouts

    foreign_kept = 0
    for step, (performance_K, updates_K) in enumerate(hacpo_loop.train(agents, STEPS, SEED, recorded), 1):
        metrics = run.metrics()[step]
        trace = {tuple(line[key] for key in KEYS): line for line in read_jsonl(run.step_file("trace", step))}
        seen = 0
        for k, updates in enumerate(updates_K):
            assert performance_K[k] == pytest.approx(metrics[f"agent{k}/reward"], **CLOSE)
            for u, update in enumerate(updates):
                for i, rollout in enumerate(update.batch):
                    line = trace[f"agent{k}", u, f"agent{rollout.source}", rollout.prompt_id, rollout.index]
                    assert float(update.advantage_N[i]) == pytest.approx(line["advantage"], **CLOSE)
                    assert float(update.ratio_N[i]) == pytest.approx(math.exp(line["log_ratio"]), **CLOSE)
                    assert float(update.term_N[i]) == pytest.approx(line["objective"], **CLOSE)
                    if rollout.source != k:
                        assert float(update.weight_N[i]) == pytest.approx(line["weight"], **CLOSE)
                        assert bool(update.kept_N[i]) == line["kept"]
                        foreign_kept += line["kept"]
                    seen += 1
        assert seen == len(trace)
    assert foreign_kept > 20
    for agent, trained, start in zip(agents, executor.agents, starts, strict=True):
        weights = zip(agent.model.parameters(), trained.model.parameters(), start, strict=True)
        for weight, expected, was in weights:
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)
            assert (weight - was).abs().max() > hacpo_loop.LEARNING_RATE


def test_the_command_of_the_docstring_prints_the_table_of_the_docstring() -> None:
    """The same rows as the docstring has, and the same accuracies before training."""
    docstring = str(hacpo_loop.__doc__)
    (command,) = re.findall(r"^ +python (.*)$", docstring, re.MULTILINE)
    arguments = [sys.executable, *command.split(), "--steps", "2"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    assert table(done.stdout).keys() == table(docstring).keys() == {"zoo:llama-plus", "zoo:neox-pair"}
    for name, (before, after) in table(done.stdout).items():
        assert before == pytest.approx(table(docstring)[name][0], abs=0.2)  # machines round differently
        assert 0 < after < 100
    lines = re.findall(r"^ +(\d) +(zoo:\S+) +[\d.]+ +[\d.]+ +\d+%$", done.stdout, re.MULTILINE)
    assert lines == [(step, name) for step in "12" for name in ("zoo:llama-plus", "zoo:neox-pair")]


def table(text: str) -> dict[str, tuple[float, float]]:
    rows = re.findall(r"^ *(zoo:\S+) +([\d.]+)% +([\d.]+)%$", text, re.MULTILINE)
    return {name: (float(before), float(after)) for name, before, after in rows}
