"""One agent in two processes (FSDP on a CPU, with gloo) does what it does in one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import FAST, MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.agents.processes import ShardedAgent
from hacrl.algorithms import HACPO
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.run import resumed_config, train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.run_dir import RunDir, read_jsonl

PROBLEMS = ArithmeticTask().heldout("test", 5)


def agent_config(model: str = "llama-plus", **settings: Any) -> AgentConfig:
    options = {
        "num_generations": 4,
        "max_completion_length": 30,
        # The rollouts are old after the first step.
        "recompute_logprobs": True,
        "max_logprob_gap": 100.0,
        "adam_epsilon": 1e-3,  # Adam's division would make much of rounding
        "fast": FAST,
        "micro_batch_size": 3,
        **settings,
    }
    return AgentConfig(id="a", model=f"zoo:{model}", **options)


def lesson(rollouts: list[Rollout], step: int) -> Lesson:
    """Own and foreign rollouts, with advantages of both signs and some of 0, in three updates."""
    advantages = [(n * 7 % 5 - 2) / 2 for n in range(len(rollouts))]
    return Lesson(
        step=step,
        prompts=[problem.prompt for problem in PROBLEMS],
        rollouts=rollouts,
        advantage_N=torch.tensor(advantages, dtype=torch.float64),
        omega_N=torch.tensor([1.0 if rollout.source == 0 else 0.8 for rollout in rollouts], dtype=torch.float64),
        minibatches=[[0, 3], [1, 4], [2]],
        learning_rate=1e-4,
    )


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    own = Agent(agent_config(log_kl=False), 0, HACPO(), seed=0).sample(PROBLEMS, 1, 0)
    foreign = Agent(agent_config("llama-minus", log_kl=False), 1, HACPO(), seed=0).sample(PROBLEMS, 1, 0)
    return own + foreign


BOUNDS = {"delta": 1.0, "delta_step": 0.0, "epsilon": 0.2, "epsilon_high": 0.2}
ALGORITHM = HACPO(beta=0.1, loss_type="dapo", entropy_coef=0.05, **BOUNDS)


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama-plus", {}), ("neox-pair", {"gradient_checkpointing": True}), ("llama-plus", {"fast": False})],
    ids=["llama", "neox, checkpointing", "plain"],
)
def test_two_processes_learn_what_one_does(
    model: str, settings: dict[str, Any], rollouts: list[Rollout], tmp_path: Path
) -> None:
    """Nine updates, saved and, for the first model, resumed on the way: losses and weights to 1e-5."""
    if model != "llama-plus":
        rollouts = [*Agent(agent_config(model), 0, HACPO(), seed=0).sample(PROBLEMS, 1, 0), *rollouts[20:]]
    one = Agent(agent_config(model, **settings), 0, ALGORITHM, seed=0)
    two = ShardedAgent(agent_config(model, fsdp=2, **settings), 0, ALGORITHM, seed=0)
    for step in range(1, 4):
        expected, result = (agent.learn(lesson(rollouts, step)) for agent in (one, two))
        assert result.metrics["updates"] == 3
        # Rounding shows more in an angle between gradients of which one is much the longer.
        assert result.metrics.pop("grad_cosine") == pytest.approx(expected.metrics.pop("grad_cosine"), abs=1e-4)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
        order, expected_order = (own.records["row"].argsort(kind="stable") for own in (result, expected))
        for name, column in expected.records.items():
            assert result.records[name][order] == pytest.approx(column[expected_order], rel=1e-5, abs=1e-5), name
        for folder, agent in ((tmp_path / f"one{step}", one), (tmp_path / f"two{step}", two)):
            folder.mkdir()
            agent.save(folder / "model", folder / "a.pt")
        assert sorted(path.name for path in (tmp_path / f"two{step}").iterdir()) == ["a.pt", "a.rank1", "model"]
        if step == 1 and not settings:
            two.end()
            two = ShardedAgent(agent_config(model, fsdp=2, **settings), 0, ALGORITHM, seed=0)
            two.load(tmp_path / "two1" / "model", tmp_path / "two1" / "a.pt")
    start, weights, others = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one1", "one3", "two3")
    )
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - start[name]).abs().max()) for name in weights) > 1e-4
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-5
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "two3" / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(opened(ids).logits, one.model(ids).logits, atol=1e-3)
    two.end()


# --- runs ----------------------------------------------------------------------------------------------


def run_config(make_config: MakeConfig, **changes: Any) -> RunConfig:
    """The second of two agents is in two processes, and in bfloat16."""
    agents = [
        {"id": "a", "model": "zoo:llama-minus"},
        {"id": "b", "model": "zoo:llama-plus", "fsdp": 2, "dtype": "bfloat16"},
    ]
    return make_config(**{"agents": agents, "max_steps": 2, "save_every": 1, **changes})


def test_a_run_and_its_resumption(make_config: MakeConfig, tmp_path: Path) -> None:
    """Sampled, evaluated, saved; continued, it is the same to the bit. A checkpoint opens as any other."""
    whole = train(run_config(make_config, output_dir=str(tmp_path / "whole"))).run_dir
    lines = RunDir(whole).metrics()
    assert [line["b/num_rollouts"] for line in lines[1:]] == [16, 32]
    assert lines[-1]["b/num_updates"] > 0
    assert all(line["b/logprob_gap"] < 0.05 for line in lines if "b/logprob_gap" in line)
    rollouts = read_jsonl(RunDir(whole).step_file("rollouts", 1))
    assert len({line["text"] for line in rollouts if line["source"] == "b"}) > 8

    train(run_config(make_config, max_steps=1))
    resumed = train(resumed_config(tmp_path / "run", ["max_steps=2"]), resume=True).run_dir
    assert (resumed / "rollouts" / "step-000002.jsonl").read_bytes() == (
        whole / "rollouts" / "step-000002.jsonl"
    ).read_bytes()
    for path in (whole / "checkpoint-2").rglob("*.safetensors"):
        assert (resumed / path.relative_to(whole)).read_bytes() == path.read_bytes()
    start = AutoModelForCausalLM.from_pretrained(ZOO / "llama-plus", dtype=torch.float32).state_dict()
    opened, report = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-2/agents/b", output_loading_info=True)
    assert not report["missing_keys"]
    state = opened.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    # Less than bfloat16 could show.
    moved = [float((state[name] - start[name]).abs().max()) for name in start]
    assert 0 < max(moved) < 1e-2


def test_errors_of_a_process_are_told_and_none_is_left(make_config: MakeConfig) -> None:
    agent = ShardedAgent(agent_config(fsdp=2, max_prompt_length=3), 0, ALGORITHM, seed=0)
    with pytest.raises(UserError, match="more than max_prompt_length"):
        agent.check_prompts(PROBLEMS)
    assert all(process.returncode is not None for process in agent.processes)

    agent = ShardedAgent(agent_config(fsdp=2, log_kl=False), 0, ALGORITHM, seed=0)
    agent.processes[1].kill()
    with pytest.raises(RuntimeError, match="A process of agent a has ended"):
        agent.answer(PROBLEMS)
    assert all(process.returncode is not None for process in agent.processes)

    with pytest.raises(UserError, match="fsdp: an agent in several processes has no lora; leave it out"):
        run_config(make_config, lora={"r": 4})


def test_sampling_ahead(make_config: MakeConfig) -> None:
    """The second step's rollouts are scored by the policy before the first step's updates, in both processes."""
    run_dir = train(run_config(make_config, overlap=1, save_every=0)).run_dir
    lines = RunDir(run_dir).metrics()
    assert all(line["b/logprob_gap"] < 0.05 for line in lines if "b/logprob_gap" in line)
    assert lines[-1]["b/num_updates"] > 0
    rollouts = read_jsonl(RunDir(run_dir).step_file("rollouts", 2))
    assert {line["policy_version"] for line in rollouts if line["source"] == "b"} == {0}
