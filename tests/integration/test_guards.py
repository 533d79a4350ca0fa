"""What protects a run: loud failures, failures that are counted, and files that stay as they were."""

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from conftest import FAST, MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.algorithms import ALGORITHMS, GRPO, GSPO, HACPO, Advantages, Algorithm
from hacrl.cli.demo import NO_EVIDENCE, print_result, run_demo, same_experiment
from hacrl.cli.tables import print_plan
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError
from hacrl.evaluation.heldout import evaluate_target
from hacrl.learners.lesson import Lesson
from hacrl.live.browse import show_rollouts
from hacrl.run import resumed_config, train
from hacrl.statistics import reward_interval
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.checkpoint import checkpoint_dir, complete_checkpoints, step_of
from hacrl.training.run_dir import RunDir, read_jsonl


def write_task(folder: Path, *body: str, chat: bool = False) -> dict[str, Any]:
    """A data file and a reward function whose body is given; `call` counts its calls, over processes too."""
    rows = []
    for problem in ArithmeticTask().train(0, 20):
        prompt = [{"role": "user", "content": problem.prompt}] if chat else problem.prompt
        rows.append(json.dumps({"prompt": prompt, "answer": problem.answer}))
    (folder / "train.jsonl").write_text("\n".join(rows))
    lines = [
        "import os, time",
        "from pathlib import Path",
        "",
        "def score(prompts, completions, answer, **columns):",
        f"    log = Path({str(folder / 'calls')!r})",
        "    call = len(log.read_text()) if log.exists() else 0",
        "    log.write_text('x' * (call + 1))",
        *(f"    {line}" for line in body),
    ]
    (folder / "rewards.py").write_text("\n".join(lines) + "\n")
    return {"train": str(folder / "train.jsonl"), "reward": f"{folder}/rewards.py:score"}


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything that lies in a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- rewards -------------------------------------------------------------------------------------------


def test_chat_messages_from_a_file_to_the_reward_function(make_config: MakeConfig, tmp_path: Path) -> None:
    task = write_task(
        tmp_path,
        "texts = [message['content'] for (message,) in completions]",
        "assert completions == [[{'role': 'assistant', 'content': text}] for text in texts]",
        "assert all(prompt == [{'role': 'user', 'content': prompt[0]['content']}] for prompt in prompts)",
        "return [len(text) for text in texts]",
        chat=True,
    )
    run = RunDir(train(make_config("llama-plus", "neox-pair", task=task, max_steps=1)).run_dir)
    lines = read_jsonl(run.step_file("rollouts", 1))
    assert len(lines) == 32
    assert all(line["reward"] == len(line["text"]) for line in lines)
    assert all(line["prompt"][0]["role"] == "user" for line in lines)


def test_dynamic_sampling_counts_what_was_not_verified_also_where_it_is_replaced(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    task = write_task(
        tmp_path,
        "rewards = [None if len(prompt) % 2 else float(i % 2) for i, prompt in enumerate(prompts)]",
        f"with open({str(tmp_path / 'open')!r}, 'a') as file:",
        "    file.write('x' * rewards.count(None))",
        "return rewards",
    )
    settings = {"dynamic_sampling": True, "dynamic_sampling_rounds": 2, "prompts_per_step": 4, "max_steps": 2}
    run = RunDir(train(make_config("llama-plus", algorithm={"name": "gspo"}, task=task, **settings)).run_dir)
    lines = run.metrics()[1:]
    assert any(line["prompts_discarded"] for line in lines)
    summary = run.summary()
    assert summary is not None
    unverified = summary["agents"]["agent0"]["unverified"]
    assert unverified == sum(line["agent0/unverified"] for line in lines) == len((tmp_path / "open").read_text())


def test_verifier_timeouts_and_errors_are_counted_apart_and_never_0(make_config: MakeConfig, tmp_path: Path) -> None:
    """The function is called once for each agent in each step."""
    task = write_task(
        tmp_path,
        "if call == 1:",
        "    time.sleep(1000)",
        "if call == 2:",
        "    os._exit(3)",
        "return [float(i % 2) for i in range(len(completions))]",
    )
    run = RunDir(train(make_config(task=task | {"reward_call_timeout": 1}, max_steps=2)).run_dir)
    assert (tmp_path / "calls").read_text() == "x" * 4
    happened = {(1, "agent0"): None, (1, "agent1"): "timeout", (2, "agent0"): "error", (2, "agent1"): None}
    for (step, agent), problem in happened.items():
        metrics = run.metrics()[step]
        assert metrics[f"{agent}/verifier_timeouts"] == 16 * (problem == "timeout")
        assert metrics[f"{agent}/verifier_errors"] == 16 * (problem == "error")
        assert metrics[f"{agent}/unverified"] == 16 * (problem is not None)
        lines = [line for line in read_jsonl(run.step_file("rollouts", step)) if line["source"] == agent]
        if problem is None:
            assert metrics[f"{agent}/reward"] == 0.5
            assert {line["reward"] for line in lines} == {0.0, 1.0}
        else:
            assert f"{agent}/reward" not in metrics
            assert {line["reward"] for line in lines} == {None}
            assert {line["problem"] for line in lines} == {problem}


def test_a_start_that_fails_leaves_nothing_of_its_own(make_config: MakeConfig, tmp_path: Path) -> None:
    """In the first evaluation; the function's own notes stay."""
    folder = tmp_path / "run"
    for note in ("pass", f"(Path({str(folder)!r}) / 'note.txt').write_text('mine')"):
        task = write_task(tmp_path, note, "raise RuntimeError('sandbox down')")
        task["eval"] = task["train"]
        with pytest.raises(UserError, match=r"sandbox down \(.*rewards.py:\d+\)\.$"):
            train(make_config(task=task, max_steps=1, report_to=["tensorboard"]))
        assert [path.name for path in tmp_path.glob("run/*")] == ([] if note == "pass" else ["note.txt"])
        assert folder.exists() == (note != "pass")
    (folder / "note.txt").unlink()
    train(make_config(task=write_task(tmp_path, "return [1.0] * len(prompts)"), max_steps=1))


def test_a_run_that_ends_early_says_at_which_step_and_how_it_goes_on(make_config: MakeConfig, tmp_path: Path) -> None:
    """The function is called once in each step, and fails in the first, in the third and never again."""
    body = (
        "if call in (0, 3):",
        "    raise RuntimeError('sandbox down')",
        "return [i % 2 for i in range(len(prompts))]",
    )
    settings: dict[str, Any] = {"algorithm": {"name": "gspo"}, "task": write_task(tmp_path, *body), "save_every": 2}
    config, folder = make_config("llama-plus", **settings, max_steps=3), tmp_path / "run"
    again = re.escape(f"`hacrl train {folder} --resume` continues it from")
    with pytest.raises(UserError, match=rf"\d\)\. The run ended at step 1; {again} the beginning, for there is no"):
        train(config)
    console = Console(file=StringIO())
    with pytest.raises(UserError, match=rf"\d\)\. The run ended at step 3; {again} checkpoint-2\.$"):
        train(config, resume=True, console=console)
    assert f"note {folder} has no checkpoint yet: it starts from the beginning.\n" in console.file.getvalue()
    console = Console(file=StringIO())
    assert train(config, resume=True, console=console).summary["steps"] == 3
    assert "no checkpoint yet" not in console.file.getvalue()


def test_a_reward_that_needs_more_memory_ends_the_run_which_goes_on_with_a_higher_limit(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    body = ("used = b'x' * ((1 << 30) * (call > 0))", "time.sleep(0.3)", "return [i % 2 for i in range(len(prompts))]")
    task = {**write_task(tmp_path, *body), "reward_memory_gib": 0.5}
    config = make_config("llama-plus", algorithm={"name": "gspo"}, task=task, max_steps=2, save_every=1)
    with pytest.raises(UserError, match=r"score used more than the 0\.5 GiB of memory that task.*ended at step 2"):
        train(config)
    with pytest.raises(UserError, match=r"task\.reward_timeout cannot be changed"):
        resumed_config(config.output_dir, ["task.reward_timeout=1"])
    higher = resumed_config(config.output_dir, ["task.reward_memory_gib=null"])
    assert train(higher, resume=True).summary["steps"] == 2


@dataclass(frozen=True)
class Overflowing(GSPO):
    """GSPO whose objective overflows where a reward is above 1."""

    name: Literal["overflowing"] = "overflowing"  # type: ignore[assignment]

    def advantages(self, rewards_N: torch.Tensor, *others: Any) -> Advantages:
        found = super().advantages(rewards_N, *others)
        return replace(found, advantage_N=found.advantage_N * (1e308 if rewards_N.max() > 1 else 1))


def test_an_update_that_is_not_finite_is_left_out_and_training_goes_on(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "overflowing", Overflowing)
    task = write_task(tmp_path, "return [(1.0 if call else 2.0) * (i % 2) for i in range(len(completions))]")
    config = make_config("llama-plus", algorithm={"name": "overflowing"}, task=task, max_steps=2, save_every=1)
    run = RunDir(train(config).run_dir)
    start = weights(ZOO / "llama-plus")
    first, second = (weights(checkpoint_dir(run.path, step) / "agents" / "agent0") for step in (1, 2))
    _, *steps = run.metrics()
    assert [step["agent0/nonfinite_updates"] for step in steps] == [1, 0]
    assert [step["agent0/updates"] for step in steps] == [0, 1]
    assert equal(start, first)
    assert not equal(first, second)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in second.values())
    assert run.summary()["agents"]["agent0"]["nonfinite_updates"] == 1


# --- recorded and recomputed log-probabilities ---------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "max_logprob_gap", "noise"),
    [
        (GSPO(), 100.0, 0.01),  # outside the clip, however wide a gap is allowed
        (GRPO(epsilon=0.99, epsilon_high=1e6), 0.05, 0.3),  # inside the clip, however large the gap
    ],
)
def test_weights_that_are_not_the_ones_sampled_from_are_an_error(
    algorithm: Algorithm, max_logprob_gap: float, noise: float
) -> None:
    config = AgentConfig(
        id="able",
        model="zoo:llama-plus",
        num_generations=4,
        max_completion_length=40,
        max_logprob_gap=max_logprob_gap,
        fast=FAST,
    )
    agent = Agent(config, 0, algorithm, seed=0)
    problems = ArithmeticTask().heldout("test", 4)
    rollouts = agent.sample(problems, step=3, sampling_round=0)
    lesson = Lesson(
        step=3,
        prompts=[problem.prompt for problem in problems],
        rollouts=rollouts,
        advantage_N=torch.linspace(-1, 1, len(rollouts), dtype=torch.float64),
        omega_N=torch.ones(len(rollouts), dtype=torch.float64),
        minibatches=[[0, 1, 2, 3]],
        learning_rate=0.0,
    )
    assert agent.learn(lesson).metrics["logprob_gap"] < 1e-5
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in agent.model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    for rollout in rollouts:
        rollout.policy_version = agent.learner.updates
    with pytest.raises(UserError, match=r"Agent able, step 3: .* differ from the learner's by") as caught:
        agent.learn(lesson)
    gap, clipped = re.search(r"by (\S+) per token .* and (\d+)% of", str(caught.value)).groups()
    assert (float(gap) > max_logprob_gap) == isinstance(algorithm, GRPO)
    assert (int(clipped) > 5) == isinstance(algorithm, GSPO)


# --- continuing a run ----------------------------------------------------------------------------------


def test_another_config_is_no_continuation_and_changes_nothing(make_config: MakeConfig) -> None:
    run_dir = train(make_config(max_steps=1)).run_dir
    before = contents(run_dir)
    refused: list[tuple[dict[str, Any], set[str]]] = [
        ({"algorithm": {"name": "gspo"}}, {"algorithm"}),
        ({"algorithm": {"name": "hacpo", "alpha": 2.0}}, {"algorithm"}),
        ({"seed": 1}, {"seed"}),
        ({"learning_rate": 1e-3}, {"learning_rate", "agents"}),
        ({"task": {"name": "arithmetic", "eval_size": 21}}, {"task.eval_size"}),
    ]
    for change, names in refused:
        for max_steps in (1, 2):
            with pytest.raises(UserError, match="was started with another") as caught:
                train(make_config(max_steps=max_steps, **change), resume=True)
            named = str(caught.value).partition("was started with another ")[2].partition(". When")[0]
            assert set(named.split(", ")) == names
            assert contents(run_dir) == before
    assert train(make_config(max_steps=2), resume=True).summary["steps"] == 2
    assert [step_of(path) for path in complete_checkpoints(run_dir)] == [1, 2]
    assert [line["step"] for line in RunDir(run_dir).metrics()] == [0, 1, 2]


def test_what_is_not_the_runs_own_stays_when_it_is_continued(make_config: MakeConfig) -> None:
    """Nor is it taken for a checkpoint or a step."""
    run_dir = train(make_config(max_steps=1)).run_dir
    shutil.copytree(run_dir / "checkpoint-1", run_dir / "checkpoint-1-backup")
    shutil.copytree(run_dir / "checkpoint-1", run_dir / "checkpoint-1-half")
    (run_dir / "checkpoint-1-half" / "COMPLETE").unlink()
    (run_dir / "checkpoint-notes").mkdir()
    (run_dir / "checkpoint-notes" / "monday.txt").write_text("it learns")
    (run_dir / "checkpoint-plot.png").write_bytes(b"\x89PNG")
    (run_dir / "rollouts" / "step-000009-marked.jsonl").write_text("{}\n")
    (run_dir / "rollouts" / "step-notes.jsonl").write_text("{}\n")
    foreign = {
        name: data for name, data in contents(run_dir).items() if re.search("-backup|-half|note|plot|mark", name)
    }
    result = train(make_config(max_steps=2, save_total_limit=1), resume=True)
    assert result.summary["steps"] == 2
    assert [path.name for path in complete_checkpoints(run_dir)] == ["checkpoint-2"]
    assert contents(run_dir).items() >= foreign.items()
    assert RunDir(run_dir).steps("rollouts") == [1, 2]
    show_rollouts(Console(file=StringIO()), run_dir, step=None, prompt=None, agent=None, limit=1)


def test_a_run_that_another_process_trains_is_left_alone(make_config: MakeConfig) -> None:
    run_dir = train(make_config(max_steps=1)).run_dir
    before = contents(run_dir)
    with RunDir(run_dir).locked(), pytest.raises(UserError, match="is being trained by another process"):
        train(make_config(max_steps=2), resume=True)
    assert contents(run_dir) == before
    assert train(make_config(max_steps=2), resume=True).summary["steps"] == 2


def test_the_reference_of_the_kl_term_is_the_starting_model_after_a_resume_too(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "algorithm": {"name": "gspo", "beta": 0.1},
        "task": write_task(tmp_path, "return [float(i % 2) for i in range(len(completions))]"),
    }
    whole = train(make_config(**settings, max_steps=2, output_dir=str(tmp_path / "whole"))).run_dir
    train(make_config(**settings, max_steps=1))
    resumed = train(make_config(**settings, max_steps=2), resume=True).run_dir
    for agent in ("agent0", "agent1"):
        kl = [step[f"{agent}/kl"] for step in RunDir(whole).metrics()[1:]]
        # One update a step: the first is made by the starting model itself.
        assert kl[0] == pytest.approx(0, abs=1e-9)
        assert kl[1] > 1e-7
        assert [step[f"{agent}/kl"] for step in RunDir(resumed).metrics()[1:]] == kl


# --- held-out accuracy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        # Wilson, z^2 = 3.8416: z^2 / (10 + z^2) = 0.27754.
        ([0.0] * 10, 0.0, 0.27754),
        ([1.0] * 10, 0.72246, 1.0),
        ([1.0, 0.0] * 5, 0.23659, 0.76341),
        # Normal: 4 -+ 1.96 sqrt(52 / 3 / 4).
        ([-1.0, 3.0, 5.0, 9.0], -0.08007, 8.08007),
        ([0.5], 0.5, 0.5),
        ([2.0, 2.0], 2.0, 2.0),
    ],
)
def test_the_interval_of_a_mean_reward(rewards: list[float], low: float, high: float) -> None:
    assert reward_interval(rewards) == pytest.approx((low, high), abs=1e-5)


def test_no_reward_has_no_interval() -> None:
    assert all(math.isnan(bound) for bound in reward_interval([]))


def test_evaluation_with_rewards_outside_0_and_1(make_config: MakeConfig, tmp_path: Path) -> None:
    task = write_task(tmp_path, "return [[-3.0, 8.0, 10.0, None][i % 4] for i in range(len(completions))]")
    config = make_config("llama-plus", algorithm={"name": "gspo"}, task=task | {"eval": task["train"]})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    source, output = str(tmp_path / "run.yaml"), tmp_path / "answers.jsonl"
    (result,) = evaluate_target("zoo:llama-plus", source, None, None, output)
    # 15 rewards, five of each: mean 5, variance (5 * 64 + 5 * 9 + 5 * 25) / 14 = 35.
    half = 1.96 * math.sqrt(35 / 15)
    assert (result.accuracy, result.low, result.high) == pytest.approx((5, 5 - half, 5 + half))
    assert (result.problems, result.unverified) == (20, 5)
    assert [line["reward"] for line in read_jsonl(output)] == [-3.0, 8.0, 10.0, None] * 5


def test_hacpo_with_three_agents_says_that_it_is_our_decision(make_config: MakeConfig) -> None:
    console = Console(file=StringIO(), width=400)
    config = make_config("llama-plus", "llama-minus", "llama-weak", max_steps=1)
    train(config, console=console)
    decision = HACPO().explain(num_agents=3).decision
    assert f"note {decision}\n" in console.file.getvalue()
    console = Console(file=StringIO(), width=400)
    print_plan(console, config)
    assert f"note {decision}\n" in console.file.getvalue()


# --- the demo ------------------------------------------------------------------------------------------


def test_the_demo_compares_both_agents_and_says_what_to_do_next(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=140)
    small = [
        "max_steps=1",
        "prompts_per_step=4",
        "rollouts_per_update=16",
        "task.eval_size=20",
        "eval_every=0",
        f"fast={FAST}",
    ]
    summaries = run_demo(console, str(tmp_path / "demo"), small)
    assert list(summaries) == ["gspo", "hacpo", "hacpo_robust"]
    shown = console.file.getvalue()
    table = shown[shown.index("Accuracy on held-out problems") :]
    for agent in ("llama-plus", "llama-minus"):
        (row,) = [line for line in table.splitlines() if re.match(rf"\W*{agent} ", line)]
        values = [summaries["hacpo"]["agents"][agent]["start_accuracy"]]
        values += [summaries[name]["agents"][agent]["final_accuracy"] for name in summaries]
        numbers = [f"{value:.3f}" for value in values] + [f"{100 * (values[3] - values[1]):+.1f} points", "16"]
        assert [cell.strip() for cell in row.split("│")[2:-1]] == numbers
    assert "Rollouts sampled: gspo 32, hacpo 32, hacpo_robust 32." in table
    for command in ("report", "rollouts", "eval", "train team", "train my.yaml"):
        assert re.search(rf"hacrl {command}\b", table)
    assert NO_EVIDENCE in table
    assert "Checked over" not in table
    print_result(console, summaries, tmp_path, 1.0, as_checked=True)
    assert "Checked over 5 seeds" in console.file.getvalue()

    before = contents(tmp_path / "demo")
    with pytest.raises(UserError, match="demo is not empty"):
        run_demo(console, str(tmp_path / "demo"), small)
    assert contents(tmp_path / "demo") == before


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ([], True),
        (["output_dir=x", "seed=3", "device=cpu", "report_to=[tensorboard]", "agents.llama-plus.device=cpu"], True),
        (["max_steps=3"], False),
        (["task.eval_size=20"], False),
        (["agents.llama-plus.temperature=0.7"], False),
        (["algorithm.epsilon=0.2"], False),
    ],
)
def test_the_demo_shows_evidence_for_its_own_settings_only(overrides: list[str], same: bool) -> None:
    assert same_experiment(RunConfig.load("demo", overrides), RunConfig.load("demo")) == same


def test_the_demo_pair_is_alike_enough_to_learn_from_each_other(tmp_path: Path) -> None:
    """The mean ratio of the other's rollouts is what the clip of HACPO is made for: near 1, not at it."""
    changes = ["learning_rate=0", "max_steps=1", "task.eval_size=1", f"output_dir={tmp_path / 'run'}", f"fast={FAST}"]
    config = RunConfig.load("demo", ["algorithm.name=hacpo", *changes])
    assert config.prompts_per_step == 64
    metrics = RunDir(train(config).run_dir).metrics()[1]
    one, other = config.agents[0].id, config.agents[1].id
    ratios = [metrics[f"{one}/from_{other}/ratio_mean"], metrics[f"{other}/from_{one}/ratio_mean"]]
    assert 0.78 <= sum(ratios) / 2 <= 0.95


@pytest.mark.parametrize(
    ("algorithm", "recompute_logprobs", "refused"),
    [("grpo", False, False), ("gspo", None, False), ("hacpo", None, False), ("gspo", False, True)],
)
def test_bfloat16_trains_float32_weights_unless_its_rounding_exceeds_the_clip(
    make_config: MakeConfig, algorithm: str, recompute_logprobs: bool | None, refused: bool
) -> None:
    """Short answers: GRPO's clip of a fifth does not notice, GSPO's of 0.0003 would cut by rounding alone."""
    models = ["llama-plus", "llama-minus"] if algorithm == "hacpo" else ["llama-plus"]
    config = make_config(
        *models,
        algorithm={"name": algorithm},
        dtype="bfloat16",
        recompute_logprobs=recompute_logprobs,
        task={"name": "arithmetic", "eval_size": 2},
        rollouts_per_update=8,
        max_steps=1,
    )
    if refused:
        with pytest.raises(UserError, match=r"outside the clip before any update .* recompute_logprobs: true"):
            train(config)
        assert not complete_checkpoints(Path(config.output_dir))
        return
    run = RunDir(train(config).run_dir)
    step = run.metrics()[1]
    assert step["agent0/updates"] == (4 if algorithm == "hacpo" else 2)
    assert 1e-4 < step["agent0/logprob_gap"] < 0.05
    after = load_file(complete_checkpoints(run.path)[-1] / "agents" / "agent0" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    start = weights(ZOO / "llama-plus")
    moved = max(float((after[name] - tensor).abs().max()) for name, tensor in start.items())
    assert 1e-5 < moved < 1e-2
