"""`hacrl watch`: what a run's files say about it, while it runs and afterwards."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import MakeConfig
from hacrl.errors import UserError
from hacrl.live.watch import Follower, watch
from hacrl.run import train
from hacrl.training.run_dir import RunDir


def watched(path: Path) -> str:
    console = Console(file=io.StringIO(), width=100)
    watch(console, path, once=True)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    from hacrl.config import RunConfig

    config = RunConfig.from_dict(
        {
            "agents": [{"id": "plus", "model": "zoo:llama-plus"}, {"id": "minus", "model": "zoo:llama-minus"}],
            "task": {"name": "arithmetic", "eval_size": 10},
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_completion_length": 24,
            "max_steps": 3,
            "save_every": 1,
            "output_dir": str(tmp_path_factory.mktemp("watch") / "run"),
        }
    )
    return RunDir(train(config, console=Console(file=io.StringIO())).run_dir)


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the finished run, to spoil."""
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def test_a_finished_run(finished: RunDir) -> None:
    text = watched(finished.path)
    assert f"{finished.path} is finished: 3 steps in " in text
    summary = finished.summary()
    assert summary is not None
    last = finished.metrics()[-1]
    for agent, row in summary["agents"].items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{agent} ")]
        accuracy = f"{row['start_accuracy']:.3f} → {row['final_accuracy']:.3f}"
        assert accuracy in line
        assert line.split()[1] == f"{last[f'{agent}/reward']:.3f}"
    assert "step 3/3" in text
    assert not (finished.path / "progress.json").exists()


def test_a_run_that_was_interrupted_or_not_started(run: RunDir) -> None:
    run.summary_file.unlink()
    assert f"was interrupted after step 3 of 3. Continue it with `hacrl train {run.path} --resume`" in watched(run.path)
    run.metrics_file.unlink()
    assert f"{run.path} has not started" in watched(run.path)
    run.config_file.unlink()
    with pytest.raises(UserError, match="is not a run"):
        watched(run.path)


def test_a_folder_in_the_place_of_a_file_is_named(run: RunDir) -> None:
    for path in (run.summary_file, run.metrics_file):
        path.unlink()
        path.mkdir()
        with pytest.raises(UserError, match=rf"^{path} cannot be read: Is a directory\.$"):
            watched(run.path)


def test_a_run_that_is_trained_now(run: RunDir) -> None:
    with run.locked():
        assert f"{run.path} is running: 3 of 3 steps done." in watched(run.path)
    assert "is finished" in watched(run.path)


def test_looking_is_no_reason_to_refuse_a_run(run: RunDir) -> None:
    """Somebody who looks holds the lock for an instant; whoever wants to train gets it nevertheless."""
    looks = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print(flush=True); "
    command = [sys.executable, "-c", looks + "time.sleep(0.07)", str(run.path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        with run.locked():
            assert run.is_locked()
    assert not run.is_locked()


def test_steps_that_are_done_again_count_once(run: RunDir) -> None:
    lines = run.metrics()
    for line in lines:
        line["plus/unverified"] = 1
    run.rewind(-1)
    for line in lines[:3]:
        run.append_metrics(line)
    follower = Follower(run)
    follower.read()
    assert (follower.view.step, follower.view.unverified) == (2, "rollouts without a verdict so far: plus 3")
    run.rewind(1)
    follower.read()
    assert (follower.view.step, follower.view.unverified) == (1, "rollouts without a verdict so far: plus 2")
    for line in lines[2:]:
        run.append_metrics(line)
    follower.read()
    assert (follower.view.step, follower.view.unverified) == (3, "rollouts without a verdict so far: plus 4")


def test_a_line_that_is_half_written_waits(run: RunDir) -> None:
    whole = run.metrics_file.read_bytes()
    cut = whole.index(b"\n", whole.index(b'"step": 2')) - 20
    run.metrics_file.write_bytes(whole[:cut])
    follower = Follower(run)
    follower.read()
    assert follower.view.step == 1
    with run.metrics_file.open("ab") as file:
        file.write(whole[cut:])
    follower.read()
    assert follower.view.step == 3


def test_more_steps_than_before(run: RunDir) -> None:
    follower = Follower(run)
    follower.read()
    config = run.config().model_copy(update={"max_steps": 30})
    run.write_config(config)
    os.utime(run.config_file, ns=(1, 1))
    follower.read()
    assert (follower.view.step, follower.view.config.max_steps) == (3, 30)


def test_from_the_first_step_to_the_kill(make_config: MakeConfig, tmp_path: Path) -> None:
    """A real run in another process, looked at while it goes on, killed, and looked at again."""
    config = make_config(max_steps=1_000_000, task={"name": "arithmetic", "eval_size": 4})
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    run = RunDir(config.output_dir)
    command = [sys.executable, "-m", "hacrl.cli", "train", str(tmp_path / "run.yaml")]
    environment: dict[str, Any] = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not run.progress_file.is_file() or len(run.metrics()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        follower = Follower(run)
        assert follower.read() == "running"
        assert follower.view.phase in ("sampling", "verifying", "learning", "evaluating")
        assert follower.view.step >= 1
        assert "is running" in watched(run.path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert follower.read() == "interrupted"
    assert follower.view.phase == ""
    assert "was interrupted after step" in watched(run.path)
