"""Overlap: rollouts of the next step are sampled before the updates of this one, and everything knows it."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import MakeConfig
from hacrl.agents.agent import Agent
from hacrl.algorithms import GSPO
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.run import resumed_config, train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.checkpoint import write_marker
from hacrl.training.run_dir import RunDir, read_jsonl
from integration.test_resume import assert_equal_runs, interruptible


def config(output_dir: Path, **changes: Any) -> RunConfig:
    return RunConfig.from_dict({**interruptible(output_dir).model_dump(mode="json"), "overlap": 1, **changes})


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tmp_path_factory.mktemp("overlap") / "run")).run_dir


def test_rollouts_are_one_step_old_and_say_so(overlapped: Path) -> None:
    metrics = RunDir(overlapped).metrics()
    for agent in ("a", "b"):
        made = [line.get(f"{agent}/num_updates", 0) for line in metrics]
        assert made[1] > 0
        for step in range(1, 6):
            lines = read_jsonl(RunDir(overlapped).step_file("rollouts", step))
            # Step 1 and step 2 by the starting policy, step t by the one before the updates of step t - 1.
            assert {line["policy_version"] for line in lines if line["source"] == agent} == {made[max(step - 2, 0)]}


def test_ratios_correct_for_the_age_and_the_gap_does_not_count_it(overlapped: Path) -> None:
    """By the trace: own ratios before the first update are 1 in step 1 and not later; the gap stays rounding."""
    metrics = RunDir(overlapped).metrics()
    ratios: dict[int, list[float]] = {}
    for step in range(1, 6):
        for line in read_jsonl(RunDir(overlapped).step_file("trace", step)):
            if line["learner"] == line["source"] and line["update"] == 0:
                ratios.setdefault(step, []).append(math.exp(line["log_ratio"]))
        assert all(metrics[step][f"{agent}/logprob_gap"] < 1e-4 for agent in ("a", "b"))
        assert all(metrics[step][f"{agent}/logprob_gap_clipped"] == 0 for agent in ("a", "b"))
    assert max(abs(ratio - 1) for ratio in ratios[1]) < 1e-4
    for step in range(2, 6):
        assert max(abs(ratio - 1) for ratio in ratios[step]) > 1e-2


def test_rollouts_of_an_earlier_policy_are_not_compared_with_the_one_of_now() -> None:
    """Also if none is left of those that were scored when they were sampled."""
    problems = ArithmeticTask().heldout("test", 2)
    settings = {"num_generations": 8, "max_completion_length": 20}
    agent = Agent(AgentConfig(id="a", model="zoo:llama-plus", **settings), 0, GSPO(), seed=0)

    def lesson(rollouts: list[Rollout]) -> Lesson:
        advantage_N = torch.tensor([(-1.0) ** n for n in range(len(rollouts))], dtype=torch.float64)
        prompts = [problem.prompt for problem in problems]
        return Lesson(1, prompts, rollouts, advantage_N, torch.ones_like(advantage_N), [[0, 1]], learning_rate=1e-3)

    now, ahead = agent.sample(problems, 1, 0), agent.sample_ahead(problems, 2)
    assert agent.learn(lesson(now)).metrics["logprob_gap"] < 1e-4
    result = agent.learn(lesson([rollout for rollout in ahead if rollout.index > 0]))
    assert abs(result.records["log_ratio"]).max() > 1e-3
    assert "logprob_gap" not in result.metrics


def test_every_agent_samples_the_problems_of_the_plain_run(overlapped: Path, tmp_path: Path) -> None:
    """Step 1 is the same with and without overlap, and in all steps the problems are."""
    plain = train(interruptible(tmp_path / "plain")).run_dir
    for step in range(1, 6):
        with_overlap, without = (read_jsonl(RunDir(run).step_file("rollouts", step)) for run in (overlapped, plain))
        assert [line["prompt_id"] for line in with_overlap] == [line["prompt_id"] for line in without]
        assert (with_overlap == without) == (step == 1)


@pytest.mark.parametrize("newest", [2, 4])
def test_a_run_continues_to_the_bit_with_what_was_sampled_ahead(overlapped: Path, tmp_path: Path, newest: int) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(overlapped, run_dir)
    for step in (4, 5):
        if step > newest:
            shutil.rmtree(run_dir / f"checkpoint-{step}")
    (run_dir / "summary.json").unlink()
    train(resumed_config(run_dir, []), resume=True)
    assert_equal_runs(run_dir, overlapped)


def test_rollouts_that_were_sampled_for_other_problems_are_refused(overlapped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(overlapped, run_dir)
    shutil.rmtree(run_dir / "checkpoint-5")
    (run_dir / "summary.json").unlink()
    file = run_dir / "checkpoint-4" / "trainer.json"
    state = json.loads(file.read_text())
    state["ahead"]["rollouts"][1][3]["prompt_id"] = "1+1="
    file.write_text(json.dumps(state))
    write_marker(file.parent)
    with pytest.raises(UserError, match="no longer gives the problems that the run was started with"):
        train(resumed_config(run_dir, []), resume=True)


def test_agents_wait_for_the_slowest(overlapped: Path, make_config: MakeConfig) -> None:
    """Without overlap, what an agent does and waits is the same for all. With it, nobody waits less than nothing."""
    plain = RunDir(train(make_config("llama-plus", "neox-pair", max_steps=2)).run_dir).metrics()
    for line in plain[1:]:
        spent = [sum(line[f"agent{k}/time/{part}"] for part in ("sample", "learn", "wait")) for k in range(2)]
        assert spent[0] == pytest.approx(spent[1])
    for line in RunDir(overlapped).metrics()[1:]:
        assert all(line[f"{agent}/time/wait"] >= 0 for agent in ("a", "b"))


# --- one agent -------------------------------------------------------------------------------------

PROBLEMS = ArithmeticTask().heldout("test", 3)


def make_agent(**changes: Any) -> Agent:
    settings = {"num_generations": 4, "max_completion_length": 32, "learning_rate": 1e-3, "log_kl": False, **changes}
    return Agent(AgentConfig(id="a", model="zoo:llama-plus", **settings), 0, GSPO(), seed=0, trace=True)


def lesson(rollouts: list[Rollout]) -> Lesson:
    advantage_N = torch.tensor([1.0, -1.0] * (len(rollouts) // 2), dtype=torch.float64)
    prompts = [problem.prompt for problem in PROBLEMS]
    return Lesson(1, prompts, rollouts, advantage_N, torch.ones(len(rollouts), dtype=torch.float64), [[0, 1, 2]], 1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_old_log_probabilities_are_those_of_the_policy_that_sampled(recompute: bool) -> None:
    agent = make_agent(recompute_logprobs=recompute)
    now = agent.sample(PROBLEMS, 1, 0)
    ahead = agent.sample_ahead(PROBLEMS, 2)
    noted = [rollout for rollout in ahead if rollout.learner_logps is not None]
    assert len(noted) == (len(ahead) if recompute else len(PROBLEMS))
    for rollout in noted:
        assert rollout.learner_logps == pytest.approx(rollout.logps, abs=1e-4)
    agent.learn(lesson(now))
    assert agent.learner.updates == 1
    result = agent.learn(lesson(ahead))
    assert len(result.records["row"]) == len(ahead)
    for row, log_ratio, logp_sum in zip(
        *(result.records[name] for name in ("row", "log_ratio", "logp_sum")), strict=True
    ):
        old = ahead[row].learner_logps if recompute else ahead[row].logps
        assert old is not None
        assert log_ratio == pytest.approx((logp_sum - sum(old)) / len(old), abs=1e-9)
    assert abs(result.records["log_ratio"]).max() > 1e-2


def test_a_sampler_with_another_policy_is_still_noticed() -> None:
    agent = make_agent()
    now, ahead = agent.sample(PROBLEMS, 1, 0), agent.sample_ahead(PROBLEMS, 2)
    agent.learn(lesson(now))
    wrong = [dataclasses.replace(rollout, logps=[logp - 0.2 for logp in rollout.logps]) for rollout in ahead]
    with pytest.raises(UserError, match=r"differ from the learner's by 0\.2 per token"):
        agent.learn(lesson(wrong))
    assert agent.learner.updates == 1
    agent.learn(lesson(ahead))
    assert agent.learner.updates == 2
