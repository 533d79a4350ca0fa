"""A run that was killed continues as if nothing had happened, to the bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import FAST, MakeConfig
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.run import check_same_run, resumed_config, train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.checkpoint import complete_checkpoints, step_of
from hacrl.training.run_dir import RunDir


def without_times(run_dir: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if "time" not in k} for line in RunDir(run_dir).metrics()]


def assert_equal_runs(run: Path, reference: Path) -> None:
    assert without_times(run) == without_times(reference)
    for kind in ("rollouts", "trace"):
        names = sorted(path.name for path in (reference / kind).glob("*"))
        assert sorted(path.name for path in (run / kind).glob("*")) == names
        for name in names:
            assert (run / kind / name).read_bytes() == (reference / kind / name).read_bytes()
    last, expected = (complete_checkpoints(folder)[-1] for folder in (run, reference))
    assert last.name == expected.name
    for path in expected.rglob("*.safetensors"):
        assert (last / path.relative_to(expected)).read_bytes() == path.read_bytes()
    for path in [*expected.rglob("*.pt"), *expected.rglob("*.rank?")]:
        assert flat(torch.load(last / path.relative_to(expected))) == flat(torch.load(path))
    state, expected_state = (json.loads((folder / "trainer.json").read_text()) for folder in (last, expected))
    for own in (state, expected_state):
        del own["seconds"], own["wall_seconds"], own["times"]
    assert state == expected_state


def flat(value: Any) -> Any:
    """An optimizer's state with tensors as lists, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not interrupted."""
    return train(interruptible(tmp_path_factory.mktemp("whole") / "run")).run_dir


def interruptible(output_dir: Path) -> RunConfig:
    agents = [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:neox-pair"}]
    sizes = {"prompts_per_step": 4, "num_generations": 4, "rollouts_per_update": 16, "max_completion_length": 40}
    times = {"max_steps": 5, "eval_every": 2, "save_every": 2, "trace": True, "learning_rate": 1e-4, "fast": FAST}
    task = {"name": "arithmetic", "eval_size": 20}
    return RunConfig.from_dict({"agents": agents, "task": task, "output_dir": str(output_dir), **sizes, **times})


COMMAND = [sys.executable, "-m", "hacrl.cli", "train"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def killed_run(folder: Path, when: list[str], number: signal.Signals = signal.SIGKILL) -> Path:
    """A run that gets a signal as soon as one of these files of it is there."""
    killed = folder / "killed"
    (folder / "run.yaml").write_text(interruptible(killed).to_yaml())
    process = subprocess.Popen(
        [*COMMAND, str(folder / "run.yaml")], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not any((killed / name).exists() for name in when):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, number)
    assert process.wait() != 0
    assert RunDir(killed).summary() is None
    return killed


@pytest.mark.parametrize(
    ("when", "number"),
    [
        pytest.param(["rollouts/step-000001.jsonl"], signal.SIGKILL, id="before the first checkpoint"),
        pytest.param(["rollouts/step-000002.jsonl"], signal.SIGTERM, id="while it learns, by SIGTERM"),
        pytest.param([".checkpoint-2.partial", "checkpoint-2"], signal.SIGKILL, id="while it saves"),
        pytest.param(["rollouts/step-000004.jsonl"], signal.SIGKILL, id="after the second checkpoint"),
    ],
)
def test_kill_and_resume_equals_an_uninterrupted_run(
    reference: Path, tmp_path: Path, when: list[str], number: signal.Signals
) -> None:
    killed = killed_run(tmp_path, when, number)
    done = subprocess.run([*COMMAND, str(killed), "--resume"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_equal_runs(killed, reference)

    assert train(RunDir.open(killed).config(), resume=True).already_finished
    assert_equal_runs(killed, reference)


def test_of_three_resumes_at_once_one_goes_on(reference: Path, tmp_path: Path) -> None:
    killed = killed_run(tmp_path, ["rollouts/step-000003.jsonl"])
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([*COMMAND, str(killed), "--resume"], env=ENVIRONMENT, **pipes) for _ in range(3)]
    errors = [process.communicate()[1].decode() for process in processes]
    codes = [process.returncode for process in processes]
    # One that comes after the run has ended finds nothing to do.
    assert 0 in codes
    assert all(
        code == 0 or "is being trained by another process" in error for code, error in zip(codes, errors, strict=True)
    )
    assert_equal_runs(killed, reference)


def test_a_half_written_checkpoint_is_not_used(make_config: MakeConfig) -> None:
    run_dir = train(make_config(max_steps=2, save_every=1)).run_dir
    newest = complete_checkpoints(run_dir)[-1]
    (newest / "COMPLETE").unlink()
    (run_dir / ".checkpoint-9.partial").mkdir()
    (run_dir / "metrics.jsonl").open("a").write('{"step": 3, "cut o')
    expected = without_times_of(run_dir, 2)
    (run_dir / "summary.json").unlink()
    result = train(RunDir.open(run_dir).config(), resume=True)
    assert [step_of(path) for path in complete_checkpoints(run_dir)] == [1, 2]
    assert not (run_dir / ".checkpoint-9.partial").exists()
    assert result.summary["steps"] == 2
    assert without_times(run_dir) == expected


def without_times_of(run_dir: Path, last: int) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[: last + 1]]
    return [{k: v for k, v in line.items() if "time" not in k} for line in lines]


def test_a_longer_run_continues_a_finished_one(make_config: MakeConfig, tmp_path: Path) -> None:
    reference = train(make_config(max_steps=3, save_every=1, output_dir=str(tmp_path / "reference"))).run_dir
    run_dir = train(make_config(max_steps=2, save_every=1)).run_dir
    result = train(resumed_config(run_dir, ["max_steps=3"]), resume=True)
    assert not result.already_finished
    # The held-out accuracy of step 2 was measured only where step 2 was the last.
    shorter = [{k: v for k, v in line.items() if "eval" not in k} for line in without_times(run_dir)]
    longer = [{k: v for k, v in line.items() if "eval" not in k} for line in without_times(reference)]
    assert shorter == longer
    assert RunDir(run_dir).config().max_steps == 3


def test_an_interrupted_run_can_end_at_the_step_it_came_to_but_not_before(make_config: MakeConfig) -> None:
    reference = train(make_config(max_steps=2, save_every=1))
    run = RunDir(train(make_config(max_steps=3, save_every=1, output_dir=f"{reference.run_dir}-cut")).run_dir)
    run.summary_file.unlink()
    shutil.rmtree(run.path / "checkpoint-3")
    with pytest.raises(UserError, match=r"has done 2 steps; max_steps=1 is fewer\. Give 2 or more\."):
        train(resumed_config(run.path, ["max_steps=1"]), resume=True)
    result = train(resumed_config(run.path, ["max_steps=2"]), resume=True)
    assert without_times(run.path) == without_times(reference.run_dir)
    for agent, expected in reference.summary["agents"].items():
        assert result.summary["agents"][agent]["final_accuracy"] == expected["final_accuracy"]
    assert result.summary["best_step"] == 2
    assert train(RunDir.open(run.path).config(), resume=True).already_finished


def test_a_run_that_met_a_long_question_continues_with_more_room(make_config: MakeConfig, tmp_path: Path) -> None:
    settings = {
        "max_steps": 4,
        "save_every": 1,
        "task": {"name": "arithmetic", "eval_size": 1},
        "trace": True,
        "seed": 3,
    }
    lengths = [len(str(problem.prompt)) + 1 for problem in ArithmeticTask(seed=3).train(0, 16)]
    short, long = max(lengths[:8]), max(lengths)
    assert short < long
    with pytest.raises(UserError, match=rf"has \d+ tokens .* max_prompt_length \({short}\)\. Continue the run with"):
        train(make_config(**settings, max_prompt_length=short))
    run_dir = tmp_path / "run"
    assert complete_checkpoints(run_dir)
    assert RunDir(run_dir).summary() is None
    train(resumed_config(run_dir, [f"max_prompt_length={long}"]), resume=True)
    reference = train(make_config(**settings, max_prompt_length=64, output_dir=str(tmp_path / "whole"))).run_dir
    assert_equal_runs(run_dir, reference)
    assert {agent.max_prompt_length for agent in RunDir(run_dir).config().agents} == {long}


def test_the_room_for_prompts_may_change_for_one_agent(make_config: MakeConfig) -> None:
    saved = make_config(max_steps=1)
    run = RunDir.create(saved)
    config = resumed_config(run.path, ["agents.agent1.max_prompt_length=64"])
    assert [agent.max_prompt_length for agent in config.agents] == [32, 64]
    check_same_run(config, saved)
    run.write_config(config)
    config = resumed_config(run.path, ["max_prompt_length=48"])
    assert [agent.max_prompt_length for agent in config.agents] == [48, 64]
    for place in ("1", "agent1"):
        with pytest.raises(UserError, match=rf"agents\.{place}\.learning_rate cannot be changed"):
            resumed_config(run.path, [f"agents.{place}.learning_rate=1"])
    with pytest.raises(UserError, match="was started with another agents"):
        check_same_run(make_config("llama-plus", max_steps=1), saved)


def test_an_agent_whose_id_has_dots_may_get_more_room_and_other_resources(make_config: MakeConfig) -> None:
    agents = [
        {"id": "a-1.7b", "model": "zoo:llama-plus", "max_prompt_length": 24},
        {"id": "b", "model": "zoo:neox-pair"},
    ]
    saved = make_config(agents=agents, max_steps=1, resources={"custom": {"big": 1}})
    run = RunDir.create(saved)
    overrides = ["agents.a-1.7b.max_prompt_length=40", "agents.a-1.7b.resources.num_cpus=2", "resources.num_cpus=3"]
    config = resumed_config(run.path, overrides)
    assert [(agent.max_prompt_length, agent.resources.num_cpus) for agent in config.agents] == [(40, 2), (32, 3)]
    assert config.agents[0].resources.custom == {"big": 1}
    check_same_run(config, saved)
    agents = [{"id": name, "model": "zoo:llama-plus"} for name in ("qwen3", "qwen3.5", "0.5b")]
    other = RunDir.create(make_config(agents=agents, output_dir=f"{run.path}-other"))
    for place, name in enumerate(("qwen3", "qwen3.5", "0.5b")):
        config = resumed_config(other.path, [f"agents.{name}.max_prompt_length=64"])
        assert [agent.max_prompt_length for agent in config.agents] == [64 if k == place else 32 for k in range(3)]
    with pytest.raises(UserError, match=r"agents\.a-1\.7b\.learning_rate cannot be changed"):
        resumed_config(run.path, ["agents.a-1.7b.learning_rate=1"])


def test_config_yaml_is_the_resolved_config(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    run = RunDir(train(config).run_dir)
    assert run.config() == config
    assert RunConfig.load(run.config_file) == config


def test_a_run_whose_data_was_changed_is_not_continued(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in ArithmeticTask().train(0, 12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows))
    task = {"train": str(data), "reward": "exact"}
    run_dir = train(make_config(task=task, max_steps=1, prompts_per_step=4)).run_dir
    data.write_text("\n".join([*rows[:11], json.dumps({"prompt": "1+1=", "answer": "2"})]))
    with pytest.raises(UserError, match="no longer gives the problems that the run was started with"):
        train(resumed_config(run_dir, ["max_steps=2"]), resume=True)
    data.write_text("\n".join(rows))
    assert train(resumed_config(run_dir, ["max_steps=2"]), resume=True).summary["steps"] == 2


@pytest.mark.parametrize("imitation", [{"when": "end", "restart": True}, {"when": "end"}, {"when": "step"}], ids=str)
def test_answers_kept_for_imitation_are_there_after_resuming(tmp_path: Path, imitation: dict[str, Any]) -> None:
    algorithm = {"name": "rft", "imitation": imitation}
    config = interruptible(tmp_path / "whole").model_dump(mode="json") | {"algorithm": algorithm, "max_steps": 4}
    whole = train(RunConfig.from_dict(config)).run_dir
    shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")
    (tmp_path / "again" / "summary.json").unlink()
    again = resumed_config(tmp_path / "again", [])
    train(again, resume=True)
    assert_equal_runs(tmp_path / "again", whole)
