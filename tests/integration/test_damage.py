"""Files of a run that a crash or a person has damaged: they are named, and nothing is taken for what it is not."""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import FAST
from hacrl.cli import main
from hacrl.config import RunConfig
from hacrl.run import train
from hacrl.training.checkpoint import damage, find_checkpoint, newest_whole, to_continue_from
from hacrl.training.run_dir import RunDir

Damage = Callable[[Path], None]
Run = Callable[..., tuple[int, str, str]]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = (flip_a_bit, cut, empty, remove)


def config(folder: Path) -> RunConfig:
    agents = [{"id": "a", "model": "zoo:llama-weak"}, {"id": "b", "model": "zoo:llama-weak"}]
    sizes = {"prompts_per_step": 2, "num_generations": 3, "max_prompt_length": 32, "max_completion_length": 8}
    times = {"max_steps": 2, "save_every": 1, "learning_rate": 1e-4, "fast": FAST}
    task = {"name": "arithmetic", "eval_size": 4}
    algorithm = {"name": "hacpo_robust", "imitation": {"when": "never"}}  # these few answers are all wrong
    return RunConfig.from_dict(
        {"agents": agents, "algorithm": algorithm, "task": task, "output_dir": str(folder), **sizes, **times}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tmp_path_factory.mktemp("finished") / "run")).run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run in the working folder, to spoil."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Path(shutil.copytree(finished, "run"))


@pytest.fixture
def hacrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Run:
    """The command in this process: its exit code, what it prints, and its warnings and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hacrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        warnings = "".join(f"{message}\n" for message in caplog.messages)
        caplog.clear()
        assert "Traceback" not in captured.err
        return int(ended.value.code or 0), captured.out, warnings + captured.err

    return call


def interrupt(run: Path) -> None:
    (run / "summary.json").unlink()


def assert_done_like(run: Path, finished: Path) -> None:
    for path in finished.rglob("checkpoint-2/**/*.safetensors"):
        assert (run / path.relative_to(finished)).read_bytes() == path.read_bytes()
    lines, expected = (
        [{k: v for k, v in line.items() if "time" not in k} for line in RunDir(folder).metrics()]
        for folder in (run, finished)
    )
    assert lines == expected


# --- checkpoints ---------------------------------------------------------------------------------------


def test_any_damage_to_any_file_of_a_checkpoint_is_named(run: Path) -> None:
    newest = run / "checkpoint-2"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {"COMPLETE", "trainer.json", "a.pt", "b.pt", "model.safetensors"} <= {path.name for path in files}
    assert newest_whole(run) == (newest, {})
    for path in files:
        name, before = path.relative_to(newest).as_posix(), path.read_bytes()
        for spoil in DAMAGES:
            spoil(path)
            whole, damaged = newest_whole(run)
            assert whole == run / "checkpoint-1"
            assert list(damaged) == [newest]
            (fault,) = damaged.values()
            said = {flip_a_bit: "has changed", cut: "bytes instead of", empty: "has 0 bytes", remove: "is missing"}
            words = "is damaged itself" if name == "COMPLETE" and spoil != remove else said[spoil]
            assert fault.startswith(f"{name} {words}" if spoil != cut or name == "COMPLETE" else f"{name} has ")
            assert words in fault
            path.write_bytes(before)
    assert damage(newest) is None


@pytest.mark.parametrize("name", ["state/a.pt", "trainer.json", "agents/b/model.safetensors", "COMPLETE"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint_to_the_same_bits(
    run: Path, finished: Path, hacrl: Run, name: str
) -> None:
    interrupt(run)
    spoil = {"state/a.pt": cut, "trainer.json": empty, "COMPLETE": remove}.get(name, flip_a_bit)
    spoil(run / "checkpoint-2" / name)
    code, _, err = hacrl("train", "run", "--resume")
    assert code == 0
    assert f"run/checkpoint-2 is damaged: {name} " in err
    assert "Going on from checkpoint-1; the damaged one is now checkpoint-2.damaged." in err
    assert "zoo:llama-weak" not in err
    assert_done_like(run, finished)
    assert (run / "checkpoint-2.damaged").is_dir()
    assert newest_whole(run) == (run / "checkpoint-2", {})


def test_a_run_without_any_whole_checkpoint_does_not_start_again_by_itself(run: Path, hacrl: Run) -> None:
    interrupt(run)
    cut(run / "checkpoint-1" / "state" / "a.pt")
    remove(run / "checkpoint-2" / "trainer.json")
    metrics = (run / "metrics.jsonl").read_bytes()
    code, _, err = hacrl("train", "run", "--resume")
    assert code == 2
    assert "is damaged: in checkpoint-2 trainer.json is missing; in checkpoint-1 state/a.pt has" in err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    code, out, _ = hacrl("train", "run", "--resume")
    assert (code, "starts from the beginning" in out) == (0, True)


def test_eval_and_export_check_the_models_they_use(run: Path, hacrl: Run) -> None:
    flip_a_bit(run / "checkpoint-2" / "state" / "a.pt")  # which they do not use
    assert find_checkpoint(run, None) == run / "checkpoint-2"
    flip_a_bit(run / "checkpoint-2" / "agents" / "a" / "model.safetensors")
    fault = "run/checkpoint-2 is damaged: agents/a/model.safetensors has changed"
    for command in (["eval", "run"], ["export", "run", "models"]):
        code, _, err = hacrl(*command, "--checkpoint", "2")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{fault}: its checksum does not match. There are checkpoints of the steps 1, 2." in err
        code, _, err = hacrl(*command)
        assert (code, err.count("\n")) == (0, 1)
        assert f"{fault}: its checksum does not match. Using checkpoint-1 instead." in err
    code, _, err = hacrl("eval", "run/checkpoint-2/agents/a")
    assert (code, fault in err) == (2, True)
    assert hacrl("eval", "run/checkpoint-2/agents/b")[0] == 0


def test_a_checkpoint_of_an_earlier_version_is_used_and_said_to_be_unchecked(run: Path, hacrl: Run) -> None:
    interrupt(run)
    for step in (1, 2):
        (run / f"checkpoint-{step}" / "COMPLETE").write_text(f"{step}\n")
    code, _, err = hacrl("train", "run", "--resume")
    assert (code, err) == (
        0,
        "run/checkpoint-2 was saved by an earlier version, without checksums: its files cannot be checked.\n",
    )
    for name, content, words in (
        ("state/a.pt", b"", "state/a.pt cannot be used"),
        ("state/a.pt", b"\x80\x04N.", "state/a.pt cannot be used"),
        ("agents/a/model.safetensors", b"\0" * 9, "agents/a could not be loaded"),
        ("trainer.json", b"{}", "trainer.json is not the state of a trainer: step is missing"),
        ("trainer.json", b"\xff\xfe{", "trainer.json is not UTF-8 text"),
    ):
        before = (run / "checkpoint-2" / name).read_bytes()
        (run / "checkpoint-2" / name).write_bytes(content)
        (run / "summary.json").unlink(missing_ok=True)
        code, _, err = hacrl("train", "run", "--resume")
        assert (code, words in err, "zoo:" in err) == (2, True, False), err
        (run / "checkpoint-2" / name).write_bytes(before)


def test_what_prune_leaves_half_deleted_is_no_damaged_checkpoint(run: Path) -> None:
    (run / "checkpoint-1").rename(run / ".checkpoint-1.partial")
    (run / ".checkpoint-1.partial" / "COMPLETE").unlink()
    assert to_continue_from(run) == run / "checkpoint-2"
    assert not (run / ".checkpoint-1.partial").exists()


# --- logs ----------------------------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "garbage": b"\x00\xff\x13 not json \x80\n",
    "utf-16": '{"step": 1}\n'.encode("utf-16"),
    "latin-1": '{"step": 1, "caf\xe9": 1}\n'.encode("latin-1"),
    "list": b"[]\n",
    "object": b"{}\n",
    "words": b'{"step": "x", "steps": "x", "phase": 1, "source": 3}\n',
    "not a number": b'{"step": NaN, "steps": NaN, "seconds": 1e999, "source": Infinity}\n',
    "deep": b"[" * 100_000 + b"\n",
    "huge": b'{"step": ' + b"9" * 400 + b"}\n",
    "huger": b'{"step": ' + b"9" * 9_000 + b"}\n",
    "wrong inside": b'{"step": 1, "a/reward": {}, "steps": 2, "seconds": 1, "agents": {"a": 3}, "source": "a", '
    b'"prompt": [1], "text": ""}\n',
}
COMMANDS = {
    "metrics.jsonl": (["watch", "run", "--once"], ["report", "run"], ["train", "run", "--resume", "max_steps=3"]),
    "rollouts/step-000002.jsonl": (["rollouts", "run"], ["rollouts", "run", "--json"], ["report", "run"]),
    "summary.json": (["watch", "run", "--once"], ["report", "run"], ["train", "run", "--resume", "max_steps=3"]),
    "progress.json": (["watch", "run", "--once"],),
    "config.yaml": (["watch", "run", "--once"], ["report", "run"], ["train", "run", "--resume"], ["eval", "run"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_file_is_named_by_every_command_that_reads_it(run: Path, hacrl: Run, name: str) -> None:
    (run / "report.html").unlink(missing_ok=True)
    for kind, content in GARBAGE.items():
        if name == "config.yaml" and kind == "deep":
            continue  # the YAML reader's own
        (run / name).write_bytes(content)
        for command in COMMANDS[name]:
            if command[0] == "train" and name == "metrics.jsonl" and kind not in ("garbage", "object", "deep"):
                continue  # the models are loaded before it is read, which takes time
            code, out, err = hacrl(*command)
            if name == "progress.json":
                assert (code, err) == (0, "")
                assert "progress.json is damaged" in out
            elif kind == "empty" and name.endswith(".jsonl") and command[0] in ("watch", "report"):
                assert (code, err) == (0, "")  # a file without lines is nothing unusual
            else:
                assert (code, err.startswith(f"error run/{name}")) == (2, True), (kind, command, err)
                assert err.count("\n") == 1 or name == "config.yaml"
                assert ("line 1, is not" in err) == (name.endswith(".jsonl") and kind != "empty")


def test_a_file_in_the_place_of_a_folder_is_named(run: Path, hacrl: Run) -> None:
    shutil.rmtree(run / "rollouts")
    (run / "rollouts").write_text("not a folder")
    code, _, err = hacrl("train", str(run), "--resume", "max_steps=3")
    assert code == 2
    assert "run/rollouts cannot be used: File exists." in err


def test_metrics_are_read_up_to_the_checkpoint_that_a_run_goes_on_from(run: Path, hacrl: Run) -> None:
    """What stands behind them may be half a line, or what a crash left of a disk's block."""
    whole = (run / "metrics.jsonl").read_bytes()
    interrupt(run)
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 3, "a/rew' + b"\0" * 4096 + b"\n\0\n")
    assert hacrl("train", "run", "--resume")[::2] == (0, "")
    assert (run / "metrics.jsonl").read_bytes() == whole
    interrupt(run)
    (run / "metrics.jsonl").write_bytes(b"")
    code, _, err = hacrl("train", "run", "--resume")
    assert (code, err) == (0, "run/metrics.jsonl has no line of step 2: the curves of this run have a gap there.\n")


# --- a full disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "save_every"), [(10, 1), (2_800, 0), (3_700, 0), (30_000, 1), (300_000, 1)], ids=str)
def test_wherever_the_disk_is_full_a_run_goes_on_or_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path, hacrl: Run, limit: int, save_every: int
) -> None:
    """No file can grow beyond the limit: the config, the rollouts, a line of metrics, or a checkpoint is cut off."""
    monkeypatch.chdir(tmp_path)
    settings = config(Path("run")).model_copy(update={"save_every": save_every})
    Path("run.yaml").write_text(settings.to_yaml())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, _, err = hacrl("train", "run.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, err.count("\n"), "The disk is full" in err) == (2, 1, True)
    assert "'run/" in err  # the file is named
    again = ["run", "--resume"] if Path("run/config.yaml").exists() else ["run.yaml"]
    assert (again == ["run.yaml"]) == (limit == 10)
    assert hacrl("train", *again)[::2] == (0, "")
    assert_done_like(Path("run"), finished)


def test_a_disk_that_is_full_right_after_the_config_leaves_nothing(tmp_path: Path) -> None:
    """In the first evaluation, which is long enough here to fill the disk meanwhile."""
    run = tmp_path / "run"
    slow = config(run).model_dump(mode="json") | {"task": {"name": "arithmetic", "eval_size": 40}, "max_steps": 1}
    (tmp_path / "run.yaml").write_text(RunConfig.from_dict(slow).to_yaml())
    command = [sys.executable, "-m", "hacrl.cli", "train", str(tmp_path / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (run / "config.yaml").is_file():
        assert process.poll() is None
        time.sleep(0.001)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
    _, err = process.communicate()
    assert (process.returncode, err.count("\n")) == (2, 1)
    assert f"The disk is full ([Errno 27] File too large: '{run}/metrics.jsonl')" in err
    assert not run.exists() or not list(run.iterdir())


def test_a_start_that_was_killed_before_its_config_was_written_is_no_run(run: Path, hacrl: Run) -> None:
    Path("fresh").mkdir()
    for name in (".lock", ".config.yaml.partial"):
        Path("fresh", name).touch()
    Path("run.yaml").write_text(config(Path("fresh")).to_yaml())
    assert hacrl("train", "run.yaml", "max_steps=1")[0] == 0
