"""Runs in which a teacher behind an address takes part."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeConfig
from hacrl.run import train
from hacrl.training.run_dir import RunDir
from teacher_server import Fields, Response, Teacher, asked, chat, worked

KEY = "sk-very-secret-0123456789"


def by_seed(fields: Fields) -> Fields:
    """The right answer to most requests, wrong or unusable ones to others; always the same to one request."""
    answers = [chat(worked(asked(fields))), chat(worked(asked(fields))), chat("#1", logp=-1.0), chat("")]
    return answers[fields.get("seed", 0) % 4]


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    teacher = Teacher(by_seed)
    yield teacher
    teacher.close()


def source(teacher: Teacher, **changes: Any) -> dict[str, Any]:
    endpoint = {"url": teacher.url, "model": "big", "api_key_env": "TEACHER_KEY"}
    return {"id": "teacher", "endpoint": endpoint, "max_requests": 1, **changes}


def without_times(run: Path) -> list[dict[str, Any]]:
    return [{name: v for name, v in line.items() if "time" not in name} for line in RunDir(run).metrics()]


def rollouts(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / "rollouts").glob("*"))]


@pytest.mark.parametrize(("save_every", "when"), [(0, "always"), (1, "hard")])
def test_a_killed_run_goes_on_with_the_answers_that_it_has(
    teacher: Teacher,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    save_every: int,
    when: str,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"sources": [source(teacher, when=when)], "save_every": save_every}
    whole = train(make_config(**settings)).run_dir
    last = [fields["seed"] for fields in teacher.sampled][-2]
    expected = Counter(json.dumps(fields, sort_keys=True) for fields in teacher.requests)
    teacher.requests.clear()

    def dies(fields: Fields) -> Fields | Response:
        if fields["seed"] == last:
            os.kill(process.pid, signal.SIGKILL)
        return by_seed(fields)

    teacher.reply, killed = dies, tmp_path / "killed"
    config = tmp_path / "run.yaml"
    config.write_text(make_config(**settings, output_dir=str(killed)).to_yaml())
    command = [sys.executable, "-m", "hacrl.cli", "train"]
    process = subprocess.Popen([*command, str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL
    teacher.reply = by_seed
    done = subprocess.run([*command, str(killed), "--resume"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert without_times(killed) == without_times(whole)
    assert rollouts(killed) == rollouts(whole)
    assert RunDir(killed).summary()["sources"] == RunDir(whole).summary()["sources"]
    sent = Counter(json.dumps(fields, sort_keys=True) for fields in teacher.requests)
    (twice,) = (sent - expected).elements()  # the request that was under way
    assert json.loads(twice)["seed"] == last
    assert not expected - sent
    assert {headers["authorization"] for headers in teacher.headers} == {f"Bearer {KEY}"}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in data for data in (*files, said, done.stdout))


def test_the_answers_of_a_teacher_teach(
    teacher: Teacher, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    run = train(make_config("llama-plus", sources=[source(teacher, max_requests=8)])).run_dir
    lines = [json.loads(line) for own in rollouts(run) for line in own.splitlines()]
    taught = [line for line in lines if line["source"] == "teacher"]
    answered = Counter(fields.get("seed", 0) % 4 for fields in teacher.sampled)
    assert len(teacher.sampled) == 16
    assert len(taught) == 16 - answered[3]
    assert sum(line["reward"] for line in taught) == answered[0] + answered[1]
    assert all(set(line["learners"]) == {"agent0"} for line in taught)
    metrics = without_times(run)
    assert sum(line["teacher/failed/empty"] for line in metrics if "teacher/failed/empty" in line) == answered[3]
    assert all(line["teacher/without_logps"] == 0 for line in metrics if "teacher/rollouts" in line)


def test_a_teacher_that_fails_later_leaves_the_run_alone(
    teacher: Teacher, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher.reply = lambda fields: Response(b"", 404)
    run = train(make_config("llama-plus", sources=[source(teacher)])).run_dir
    last = RunDir(run).metrics()[-1]
    assert (last["teacher/rollouts"], last["teacher/failed"], last["teacher/failed/status_404"]) == (0, 8, 8)
    assert last["agent0/num_updates"] == 2


def test_with_ray_the_run_is_the_same(
    teacher: Teacher, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    local = train(make_config("llama-plus", sources=[source(teacher)])).run_dir
    changes = {"execution": "ray", "output_dir": str(tmp_path / "ray"), "resources": {"num_cpus": 1}}
    ray = train(make_config("llama-plus", sources=[source(teacher)], **changes)).run_dir
    assert rollouts(ray) == rollouts(local)
