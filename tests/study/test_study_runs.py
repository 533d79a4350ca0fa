"""A real study of tiny runs: interrupted, killed, with runs that fail, and continued."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from conftest import FAST
from hacrl.config.study import StudyConfig
from hacrl.errors import UserError
from hacrl.run import train
from hacrl.study.grid import Study
from hacrl.study.runner import (
    Places,
    Runner,
    RunProcess,
    check_unchanged,
    choose_places,
    last_step,
    run_study,
    with_earlier_threads,
)
from hacrl.training.run_dir import RunDir

ZOO = Path(sys.modules["hacrl"].__file__ or "").parent / "agents" / "zoo" / "models"


def study_data(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "agents": [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-minus"}],
        "task": {"name": "arithmetic", "eval_size": 8},
        "prompts_per_step": 4,
        "rollouts_per_update": 16,
        "num_generations": 4,
        "max_prompt_length": 32,
        "max_completion_length": 40,
        "learning_rate": 1e-4,
        "max_steps": 2,
        "eval_every": 0,
        "device": "cpu",
        "fast": FAST,
    }
    return {
        "name": "s",
        "base": base,
        "algorithms": ["gspo", "hacpo"],
        "seeds": 2,
        "output_dir": str(folder),
        **changes,
    }


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hacrl.cli", "study", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has Ctrl-C ignored, also by grandchildren.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_at(folder: Path) -> list[int]:
    """Processes whose command names something in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # gone meanwhile
            continue
        if b"hacrl.study.child" in command and str(folder).encode() in command:
            found.append(int(process.name))
    return found


def done_runs(folder: Path) -> dict[str, bytes]:
    """Everything that finished runs have logged."""
    runs = [path.parent for path in folder.glob("runs/*/*/*/summary.json")]
    return {str(path): path.read_bytes() for run in runs for path in (run / "summary.json", run / "metrics.jsonl")}


def statuses(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "study.json").read_text())["runs"]
    return {f"{row['variant']}/{row['seed']}": row["status"] for row in rows}


def test_a_study_is_interrupted_killed_and_continued(tmp_path: Path) -> None:
    folder, model = tmp_path / "study", tmp_path / "model"
    algorithms = {"gspo": None, "late": {"algorithm.name": "gspo", "agents.a.model": str(model)}, "hacpo": None}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study_data(folder, algorithms=algorithms)))

    # Ctrl-C after the first run: the children end, the study says how to continue.
    process = start(str(tmp_path / "s.yaml"), "--jobs", "1")
    wait_for(lambda: bool(done_runs(folder)) and bool(children_at(folder)), process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, children_at(folder)) == (130, [])
    assert f"continue with `hacrl study {folder}`" in err
    assert set(statuses(folder).values()) <= {"done", "waiting", "failed"}
    before = done_runs(folder)
    assert before

    # Killed with two children at work: they end themselves.
    started = set(folder.glob("runs/*/*/*/config.yaml"))
    process = start(str(folder), "--jobs", "2")
    wait_for(lambda: len(set(folder.glob("runs/*/*/*/config.yaml")) - started) > 0, process)
    assert children_at(folder)
    process.kill()
    finish(process)
    wait_for(lambda: not children_at(folder))

    # Continued: what was done is not done again; what cannot start fails, and the others go on.
    process = start(str(folder), "--jobs", "2")
    code, out, _ = finish(process)
    assert code == 1
    assert done_runs(folder).items() >= before.items()
    others = {f"{variant}/{seed}": "done" for variant in ("gspo", "hacpo") for seed in (0, 1)}
    assert statuses(folder) == others | {"late/0": "failed", "late/1": "failed"}
    assert f"Failed: main/late/seed-0, see {folder}/logs/main/late/seed-0.log" in out
    errors = [row["error"] for row in json.loads((folder / "study.json").read_text())["runs"]]
    assert sum(error is not None and str(model) in error for error in errors) == 2

    # The failed ones are tried again, the others not.
    before = done_runs(folder)
    shutil.copytree(ZOO / "llama-plus", model)
    code, out, err = finish(start(str(folder)))
    assert (code, err) == (0, "")
    assert done_runs(folder).items() > before.items()
    assert set(statuses(folder).values()) == {"done"}
    assert "4 of 6 runs are done already." in out
    assert "6 of 6 runs done" in out

    # A run of the study is the run that `hacrl train` makes of the same config.
    run = RunDir(folder / "runs" / "main" / "hacpo" / "seed-1")
    alone = train(run.config().model_copy(update={"output_dir": str(tmp_path / "alone")})).run_dir
    for line, expected in zip(run.metrics(), RunDir(alone).metrics(), strict=True):
        stable = {name for name in expected if "time" not in name and "memory" not in name}
        assert {name: line[name] for name in stable} == {name: expected[name] for name in stable}

    refused_if_changed(folder)


def refused_if_changed(folder: Path) -> None:
    """The grid of a study may grow; what was started stays."""
    again = with_earlier_threads(StudyConfig.load(folder, ["seeds=3", "baseline=hacpo"]))
    check_unchanged(Study.build(again))
    for override, fragment in {
        "settings.learning_rate=0.5": "learning_rate",
        "settings.max_steps=3": "max_steps",
        "seeds=1": "seed-1 is not in it",
    }.items():
        with pytest.raises(UserError, match=fragment):
            check_unchanged(Study.build(StudyConfig.load(folder, [override])))
    with pytest.raises(UserError, match="threads="):
        with_earlier_threads(StudyConfig.load(folder, ["threads=7"]))
    with pytest.raises(UserError, match="holds the study s, not other"):
        with_earlier_threads(StudyConfig.load(folder, ["name=other"]))


def test_runs_that_lack_memory_are_tried_again_with_fewer_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    # The one held-out answer ends at its first digit; room for all answers of a step is more than any machine has.
    too_much = {
        "max_completion_length": 2**17,
        "num_generations": 65_536,
        "sampling_batch_size": 1_000_000,
        "stop": list("0123456789"),
        "task.eval_size": 1,
    }
    data = study_data(folder, algorithms=["gspo"], seeds=3, settings=too_much)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(data))
    code, out, _ = finish(start(str(tmp_path / "s.yaml"), "--jobs", "2"))
    assert code == 1
    assert "ran out of memory as one of 2 at once" in out
    assert "from now on here there are at most 1 at once" in out
    assert [row["status"] for row in json.loads((folder / "study.json").read_text())["runs"]] == ["failed"] * 3
    attempts = [
        (folder / f"logs/main/gspo/seed-{seed}.log").read_text().count("error Out of memory") for seed in range(3)
    ]
    assert sorted(attempts) == [1, 2, 2]  # the third never had company


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="not empty and not a study"):
        with_earlier_threads(StudyConfig.from_dict(study_data(tmp_path)))


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study_data(tmp_path / "study")))
    code, out, err = finish(start(str(tmp_path / "s.yaml"), "seeds=5", "--dry-run"))
    assert (code, err) == (0, "")
    assert "10 runs, 10 to do" in out
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_threads_do_not_depend_on_how_many_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")

    def places(at_once: int | None = None, **changes: Any) -> tuple[int, int]:
        chosen = choose_places(Study.build(StudyConfig.from_dict(study_data(tmp_path, **changes))), at_once)
        return chosen.jobs, chosen.threads

    assert places(seeds=20) == (8, 1)
    assert places(seeds=20, jobs=3) == (3, 1)
    assert places(3, seeds=20, jobs=5) == (3, 1)
    assert places(seeds=2) == (4, 2)
    assert places(1, seeds=2) == (1, 2)
    assert places(seeds=20, threads=4) == (2, 4)


def test_room_is_counted_by_gpu(tmp_path: Path) -> None:
    study = Study.build(StudyConfig.from_dict(study_data(tmp_path)))
    runner = Runner(study, Places(jobs=5, threads=1, gpus=["0", "1"]), Console(file=io.StringIO()))
    assert runner.room == {0: 3, 1: 2}
    runner.room[0] = 1
    jobs = []
    while (job := runner.free_job()) is not None:
        jobs.append(job)
        runner.children.append(RunProcess(study.runs[0], 0, job, tmp_path, 0, 0.0, 0))
    assert jobs == [0, 1, 3]


def test_runs_on_one_gpu_share_its_time(tmp_path: Path) -> None:
    def spent(seeds: int) -> tuple[dict[str, float], float]:
        study, began = Study.build(StudyConfig.from_dict(study_data(tmp_path, seeds=seeds))), time.monotonic()
        results = run_study(study, Places(jobs=2, threads=1, gpus=["0"]), Console(file=io.StringIO()))
        wall = time.monotonic() - began
        return {f"{row['variant']}-{row['seed']}": row["gpu_seconds"] for row in results["runs"]}, wall

    first, wall = spent(1)
    assert set(first) == {"gspo-0", "hacpo-0"}
    assert 0 < min(first.values()) <= sum(first.values()) <= wall
    both, wall = spent(2)
    assert {name: both[name] for name in first} == first
    assert 0 < both["gspo-1"] + both["hacpo-1"] <= wall


def test_the_time_left_counts_what_was_done_since_the_study_was_called(tmp_path: Path) -> None:
    study = Study.build(StudyConfig.from_dict(study_data(tmp_path, algorithms=["gspo"], settings={"max_steps": 4})))
    runner = Runner(study, Places(jobs=1, threads=1, gpus=[]), Console(file=io.StringIO()))
    continued = runner.waiting.pop(0)
    (tmp_path / "log").touch()
    runner.children = [RunProcess(continued, 0, 0, tmp_path / "log", 0, time.monotonic() - 10, first_step=4)]
    continued.folder.path.mkdir(parents=True)
    continued.folder.append_metrics({"step": 3})
    assert runner.last_steps() == {continued.name: 3}  # its newest checkpoint
    agents = {agent.id: {"start_accuracy": 0.5, "final_accuracy": 0.5} for agent in continued.config.agents}
    done = {"steps": 4, "seconds": 10.0, "rollouts": 1, "tokens": 1, "tokens_trained": 1, "updates": 1}
    continued.folder.write_summary({**done, "agents": agents})
    runner.end(runner.children[0], 0)
    assert runner.time_left({}) == pytest.approx(40, rel=0.01)  # one of four steps took 10 s


def test_the_last_step_of_a_run_at_work(tmp_path: Path) -> None:
    run = Study.build(StudyConfig.from_dict(study_data(tmp_path))).runs[0]
    assert last_step(run) == 0
    run.folder.path.mkdir(parents=True)
    run.folder.metrics_file.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "cut o')
    assert last_step(run) == 1


def test_runs_are_spread_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def places(device: str, **environment: str) -> tuple[int, list[str]]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment.get("visible", ""))
        data = study_data(tmp_path, settings={"device": device})
        chosen = choose_places(Study.build(StudyConfig.from_dict(data)), None)
        return chosen.jobs, chosen.gpus

    assert places("auto") == (8, ["0", "1"])
    assert places("cuda", visible="3,5") == (8, ["3", "5"])
    assert places("cpu")[1] == []
    assert places("cuda", visible="3,9,5") == (8, ["3", "9"])  # of three names torch sees two: there is no GPU 5
    assert places("cuda:1") == (1, [])  # the study says itself who goes where


@pytest.mark.parametrize(
    "settings",
    [{"execution": "ray"}, {"fsdp": 2}, {"agents.a.fsdp": 2}, {"agents.b.device": "cuda:3"}],
    ids=["ray", "fsdp", "fsdp of one agent", "cuda:3"],
)
def test_runs_that_take_several_gpus_see_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    data = study_data(tmp_path, settings={"device": "cuda", **settings})
    study = Study.build(StudyConfig.from_dict(data))
    alone, asked = choose_places(study, None), choose_places(study, 2)
    assert (alone.jobs, alone.gpus) == (1, [])
    assert (asked.jobs, asked.gpus) == (2, [])


def test_runs_on_a_cluster_do_not_count_on_the_cores_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")

    def jobs(at_once: int | None = None, **settings: Any) -> int:
        data = study_data(tmp_path, seeds=20, settings={"device": "cuda", "execution": "ray", **settings})
        return choose_places(Study.build(StudyConfig.from_dict(data)), at_once).jobs

    assert jobs() == 8
    assert jobs(**{"ray.address": "auto"}) == 1
    assert jobs(3, **{"ray.address": "auto"}) == 3
