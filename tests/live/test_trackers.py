"""`report_to`: the real packages get every number of metrics.jsonl, once, also when a run is continued."""

import io
import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from conftest import MakeConfig
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.live import trackers
from hacrl.live.trackers import Metrics, flat, numbers
from hacrl.run import resumed_config, train
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.run_dir import RunDir

SMALL: dict[str, Any] = {"task": {"name": "arithmetic", "eval_size": 4}, "prompts_per_step": 2, "save_every": 1}


def run_of(config: RunConfig, resume: bool = False) -> RunDir:
    return RunDir(train(config, resume=resume, console=Console(file=io.StringIO())).run_dir)


def interrupt(run: RunDir) -> None:
    """As if the process had died before its last checkpoint was complete."""
    (complete_checkpoints(run.path)[-1] / "COMPLETE").unlink()
    run.summary_file.unlink()


def expected(run: RunDir) -> dict[int, Metrics]:
    return {line["step"]: numbers(line) for line in run.metrics()}


# --- tensorboard ---------------------------------------------------------------------------------------


def events(run: RunDir) -> EventAccumulator:
    found = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(run: RunDir) -> dict[int, Metrics]:
    found, steps = events(run), {}
    for tag in found.Tags()["scalars"]:
        for event in found.Scalars(tag):
            assert tag not in steps.setdefault(event.step, {}), f"{tag} twice in step {event.step}"
            steps[event.step][tag] = event.value
    return steps


def assert_close(found: dict[int, Metrics], run: RunDir) -> None:
    assert found.keys() == expected(run).keys()
    for step, metrics in expected(run).items():
        assert found[step] == pytest.approx(metrics, rel=1e-6), step


def text_of(run: RunDir, name: str) -> str:
    event = events(run).Tensors(f"{name}/text_summary")[-1]
    text: str = event.tensor_proto.string_val[0].decode("utf-8")
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def test_tensorboard_has_every_number(make_config: MakeConfig) -> None:
    run = run_of(make_config(**SMALL, max_steps=2, report_to="tensorboard"))
    assert_close(scalars(run), run)
    assert text_of(run, "config") == run.config().to_yaml().rstrip("\n")
    assert json.loads(text_of(run, "summary")) == run.summary()


def test_tensorboard_does_not_double_what_is_done_again(make_config: MakeConfig) -> None:
    run = run_of(make_config(**SMALL, max_steps=3, report_to=["tensorboard"]))
    before = run.metrics()[3]["time/elapsed"]
    interrupt(run)
    run = run_of(run.config(), resume=True)
    assert run.metrics()[3]["time/elapsed"] != before
    assert_close(scalars(run), run)


def test_a_tracker_that_comes_later_gets_the_steps_before_it(make_config: MakeConfig) -> None:
    run = run_of(make_config(**SMALL, max_steps=1))
    assert not run.trackers_file.exists()
    run = run_of(resumed_config(run.path, ["max_steps=2", "report_to=[tensorboard]"]), resume=True)
    assert run.config().report_to == ["tensorboard"]
    assert_close(scalars(run), run)
    run = run_of(resumed_config(run.path, ["max_steps=3", "report_to=[]"]), resume=True)
    assert run.config().report_to == []
    assert set(scalars(run)) == {0, 1, 2}


# --- wandb ---------------------------------------------------------------------------------------------


def records(file: Path) -> Iterator[Any]:
    """What `wandb sync` would send: blocks of 32 KiB with records or parts of records, after 7 bytes of its own."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if place + 7 + length > len(data):
            return  # the rest is being written
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def finished(file: Path) -> list[Any]:
    """All records: a process of wandb's own writes the file, also after the run has ended. The exit comes last."""
    deadline = time.monotonic() + 60
    while not any(kind_of(record) == "exit" for record in records(file)):
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.1)
    return list(records(file))


def kind_of(record: Any) -> str:
    kind: str = record.WhichOneof("record_type")
    return kind


def key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def wandb_history(written: list[Any]) -> dict[int, Metrics]:
    steps = {}
    for record in written:
        if kind_of(record) == "history":
            values = {key(item): json.loads(item.value_json) for item in record.history.item}
            steps[values["_step"]] = {name: value for name, value in values.items() if not name.startswith("_")}
    return steps


def test_wandb_offline_has_every_number(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_of(make_config(**SMALL, max_steps=2, report_to=["wandb"], output_dir=str(tmp_path / "a #1? [run]")))
    (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
    written = finished(file)
    assert wandb_history(written) == {step: pytest.approx(metrics) for step, metrics in expected(run).items()}
    (started,) = [record.run for record in written if kind_of(record) == "run"]
    name = json.loads(run.trackers_file.read_text(encoding="utf-8"))["wandb"]
    assert (started.run_id, started.project, started.display_name) == (name, "hacrl", "a #1? [run]")
    config = {key(item): json.loads(item.value_json) for item in started.config.update}
    assert config.items() >= run.config().model_dump(mode="json").items()
    summary: dict[str, Any] = {}
    for record in written:
        if kind_of(record) == "summary":
            summary |= {key(item): json.loads(item.value_json) for item in record.summary.update}
    found = run.summary()
    assert found is not None
    assert {name: value for name, value in summary.items() if name.startswith("summary/")} == flat(found, "summary")

    interrupt(run)
    run_of(run.config(), resume=True)
    first, second = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert first.name == second.name == f"run-{name}.wandb"
    assert list(wandb_history(finished(second))) == [2]


def test_wandb_without_a_key_is_told_before_anything_is_loaded(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(report_to=["wandb"], agents=[{"id": "a", "model": "./no/such/model"}])
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    command = [sys.executable, "-m", "hacrl.cli", "train", str(tmp_path / "run.yaml")]
    environment = {**kept, "HOME": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error report_to: wandb is not ready: " in done.stderr
    assert "Log in with `wandb login`, or set WANDB_MODE=offline." in done.stderr
    assert not Path(config.output_dir).exists()


# --- trackio -------------------------------------------------------------------------------------------

TRACKIO = """
import sys
from hacrl.run import resumed_config, train
from hacrl.config import RunConfig
source, resume = sys.argv[1], len(sys.argv) > 2
train(resumed_config(source, []) if resume else RunConfig.load(source), resume=resume)
"""


def test_trackio_has_every_number_once(make_config: MakeConfig, tmp_path: Path) -> None:
    """In processes of their own: where it stores is decided when it is imported."""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    config = make_config(**SMALL, max_steps=3, report_to=["trackio"])
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    run = RunDir(config.output_dir)

    def stored() -> list[tuple[int, Metrics]]:
        name = json.loads(run.trackers_file.read_text(encoding="utf-8"))["trackio"]
        with sqlite3.connect(tmp_path / "store" / "hacrl.db") as database:
            rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
        assert {row[0] for row in rows} == {name}
        return [(step, json.loads(metrics)) for _, step, metrics in rows]

    def check() -> None:
        *steps, (last, end) = stored()
        assert steps == [(step, pytest.approx(metrics)) for step, metrics in expected(run).items()]
        summary = run.summary()
        assert summary is not None
        assert (last, end) == (3, pytest.approx(flat(summary, "summary")))

    subprocess.run([sys.executable, "-c", TRACKIO, str(tmp_path / "run.yaml")], env=environment, check=True)
    check()
    interrupt(run)
    subprocess.run([sys.executable, "-c", TRACKIO, str(run.path), "resume"], env=environment, check=True)
    check()


# --- what can go wrong ---------------------------------------------------------------------------------


def test_an_unknown_tracker(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"report_to: unknown tracker 'wandbb'; did you mean wandb\?"):
        make_config(report_to=["tensorboard", "wandbb"])
    with pytest.raises(UserError, match="report_to: expected a list of tensorboard, wandb, trackio, not 3"):
        make_config(report_to=3)
    assert make_config(report_to=["wandb", "wandb"]).report_to == ["wandb"]
    assert make_config(report_to=list(trackers.TRACKERS)).report_to == list(trackers.TRACKERS)


def test_a_package_that_is_missing_is_told_before_anything_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = make_config(report_to=["tensorboard"], agents=[{"id": "a", "model": "./no/such/model"}])
    with pytest.raises(UserError, match=r"tensorboard needs the package tensorboard: run pip install 'hacrl\[track\]'"):
        train(config)
    assert not Path(config.output_dir).exists()


class Breaks:
    """A tool whose connection is lost in the second step."""

    def __init__(self, config: RunConfig, folder: Path, name: str, first: int | None) -> None:
        self.needs_history = False

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= 2:
            raise ConnectionError("the network\nis gone.")

    def close(self, step: int, summary: dict[str, Any] | None) -> None:
        pass


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Breaks)
    with caplog.at_level(logging.WARNING, "hacrl"):
        run = run_of(make_config(**SMALL, max_steps=4, report_to=["tensorboard"]))
    warning = "report_to: tensorboard failed and gets nothing more: ConnectionError: the network is gone. metrics.jsonl"
    assert [record.getMessage()[: len(warning)] for record in caplog.records] == [warning]
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    assert run.summary() is not None


def test_a_tracker_that_does_not_start_ends_the_run_in_one_sentence(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any) -> Breaks:
        raise PermissionError("no key")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", refuses)
    config = make_config(**SMALL, max_steps=1, report_to=["tensorboard"])
    with pytest.raises(UserError, match=r"did not start: PermissionError: no key. Go on .* 'report_to=\[\]'"):
        train(config)
    assert run_of(make_config(**SMALL, max_steps=1)).summary() is not None


def test_flat_summary() -> None:
    tree = {"algorithm": "hacpo", "steps": 3, "best_step": None, "agents": {"a": {"model": "m", "final_accuracy": 0.5}}}
    assert flat(tree, "summary") == {"summary/steps": 3, "summary/agents/a/final_accuracy": 0.5}
