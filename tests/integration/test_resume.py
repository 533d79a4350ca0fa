"""A run that was killed continues as if nothing had happened, to the bit."""

import json
import os
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
from hacrl.training.checkpoint import complete_checkpoints, step_of
from hacrl.training.run import resumed_config, train
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
        del own["seconds"], own["times"]
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


@pytest.mark.parametrize("kill_after", ["step-000001", "step-000002", "step-000004"])
def test_kill_9_and_resume_equals_an_uninterrupted_run(reference: Path, tmp_path: Path, kill_after: str) -> None:
    """Killed before the first checkpoint, between two, and after the second."""
    (tmp_path / "run.yaml").write_text(interruptible(tmp_path / "killed").to_yaml())
    command = [sys.executable, "-m", "hacrl.cli", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, str(tmp_path / "run.yaml")], env=environment, stdout=subprocess.DEVNULL)
    while not (killed / "rollouts" / f"{kill_after}.jsonl").is_file():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert RunDir(killed).summary() is None

    done = subprocess.run([*command, str(killed), "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_equal_runs(killed, reference)

    assert train(RunDir.open(killed).config(), resume=True).already_finished
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


def test_config_yaml_is_the_resolved_config(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    run = RunDir(train(config).run_dir)
    assert run.config() == config
    assert RunConfig.load(run.config_file) == config
