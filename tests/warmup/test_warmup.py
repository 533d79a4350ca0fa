"""Supervised warm-up: the loss of plain transformers, the same bits after a crash, models a run can start from."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import FAST, MakeConfig
from hacrl.agents.loading import ZOO
from hacrl.cli import main
from hacrl.config.warmup import WarmupConfig
from hacrl.errors import UserError
from hacrl.run import train
from hacrl.tasks.arithmetic import ArithmeticTask, split_of, worked_answer
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.run_dir import RunDir
from hacrl.warmup.stage import Warmup, WarmupProgress, given_config, saved_config, warm_up
from hacrl.warmup.start import keep_layers
from tiny_models import ARCHITECTURES, tiny

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def write_rows(path: Path, count: int = 8, **columns: Any) -> str:
    problems = ArithmeticTask(seed=9).train(0, count)
    rows = [{"prompt": p.prompt, "completion": worked_answer(p), **columns} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make(tmp_path: Path, *models: str, **changes: Any) -> WarmupConfig:
    data: dict[str, Any] = {
        "agents": [{"id": f"agent{k}", "model": f"zoo:{name}"} for k, name in enumerate(models or ["llama-weak"])],
        "batch_size": 8,
        "max_steps": 2,
        "max_prompt_length": 32,
        "max_completion_length": 48,
        "learning_rate": 1e-3,
        "eval_share": 0.0,
        "eval_every": 0,
        "fast": FAST,
        "output_dir": str(tmp_path / "warmup"),
    }
    if "data" not in changes and not any("data" in agent for agent in changes.get("agents", [])):
        changes["data"] = write_rows(tmp_path / "rows.jsonl")
    return WarmupConfig.from_dict({**data, **changes})


def metrics(config: WarmupConfig) -> list[dict[str, Any]]:
    return RunDir(config.output_dir).metrics()


# --- against plain transformers --------------------------------------------------------------------


def tokens_of(folder: Path, file: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of a file in the tokens of a zoo model, by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(f"<s>{row['prompt']}", add_special_tokens=False)
        rows.append((prompt, [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]))
    return rows


def plain_training(folder: Path, rows: list[tuple[list[int], list[int]]], steps: int) -> tuple[list[float], Any]:
    """The losses of full-batch AdamW on one row at a time, labels by hand, cross-entropy by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    count = sum(len(completion) for _, completion in rows)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for prompt, completion in rows:
            ids = torch.tensor([prompt + completion])
            labels = torch.tensor([[-100] * len(prompt) + completion])
            total = total + model(input_ids=ids, labels=labels).loss * len(completion) / count
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses, model


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("name", ["llama-plus", "neox-pair", "qwen3-bpe"])
def test_losses_and_weights_are_those_of_plain_transformers(
    name: str, micro_batch_size: int | None, tmp_path: Path
) -> None:
    config = make(tmp_path, name, max_steps=3, learning_rate=1e-4, micro_batch_size=micro_batch_size)
    result = warm_up(config)

    rows = tokens_of(ZOO / name, tmp_path / "rows.jsonl")
    losses, model = plain_training(ZOO / name, rows, steps=3)

    assert [line["agent0/loss"] for line in metrics(config)[1:]] == pytest.approx(losses, rel=1e-4)
    assert losses[2] < losses[0]
    assert metrics(config)[1]["agent0/tokens_trained"] == sum(len(completion) for _, completion in rows)
    trained = AutoModelForCausalLM.from_pretrained(result.models["agent0"], dtype=torch.float32).state_dict()
    start = AutoModelForCausalLM.from_pretrained(ZOO / name, dtype=torch.float32).state_dict()
    for key, weight in model.state_dict().items():
        # Adam's first steps are 1e-4 whatever the gradient: where that is noise, signs are too.
        assert float((trained[key] - weight).abs().mean()) < 2e-6, key
        assert float((trained[key] - weight).abs().mean()) <= 0.1 * float((start[key] - weight).abs().mean()), key


@pytest.mark.parametrize("conversation", [False, True])
def test_prompts_go_through_the_chat_template_and_the_end_of_turn_is_learned(
    tmp_path: Path, conversation: bool
) -> None:
    folder = tmp_path / "chatty"
    shutil.copytree(ZOO / "llama-plus", folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    messages, answer = [{"role": "user", "content": "1+2="}], [{"role": "assistant", "content": "#3"}]
    row = {"messages": messages + answer} if conversation else {"prompt": messages, "completion": answer}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = str(tmp_path / "rows.jsonl")
    config = make(tmp_path, agents=[{"id": "a", "model": str(folder)}], data=data, system_prompt="7", max_steps=1)
    warm_up(config)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "7"}, *messages]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    completion = [*tokenizer.convert_tokens_to_ids(["#", "3"]), tokenizer.eos_token_id]
    losses, _ = plain_training(folder, [(prompt, completion)], steps=1)
    assert metrics(config)[1]["a/loss"] == pytest.approx(losses[0], rel=1e-4)
    assert metrics(config)[1]["a/tokens_trained"] == 3 * 8  # one row, taken eight times


def test_the_heldout_loss_is_of_rows_that_are_never_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of all rows to train on and the held-out rows together have the loss of the whole file."""
    data = write_rows(tmp_path / "rows.jsonl", count=60)
    options = {"data": data, "eval_share": 0.3, "max_steps": 1, "learning_rate": 0.0}
    warm_up(make(tmp_path, **options))
    said = re.search(r"rows to train on (\d+), held out (\d+)", capsys.readouterr().out)
    assert said
    to_train, heldout = int(said[1]), int(said[2])
    assert to_train + heldout == 60
    assert 5 < heldout < 30
    config = make(tmp_path, **options, batch_size=to_train, output_dir=str(tmp_path / "all"))
    result = warm_up(config)

    rows = tokens_of(ZOO / "llama-weak", tmp_path / "rows.jsonl")
    (whole,), _ = plain_training(ZOO / "llama-weak", rows, steps=1)
    tokens, line = sum(len(completion) for _, completion in rows), metrics(config)[1]
    trained = line["agent0/tokens_trained"]
    both = line["agent0/loss"] * trained + line["agent0/eval_loss"] * (tokens - trained)
    assert both / tokens == pytest.approx(whole, rel=1e-4)
    assert result.summary["agents"]["agent0"]["start_loss"] == line["agent0/eval_loss"]


# --- rows ------------------------------------------------------------------------------------------


def test_an_epoch_has_every_row_once_and_files_have_their_shares(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{n}=", "completion": "#{n}"}}\n' for n in range(10, 16)))
    (tmp_path / "b.jsonl").write_text("".join(f'{{"prompt": "{n}=", "completion": "#{n}"}}\n' for n in range(20, 23)))
    files = [{"file": str(tmp_path / "a.jsonl"), "weight": 2}, str(tmp_path / "b.jsonl")]
    config = make(tmp_path, data=files, batch_size=9, max_steps=3)
    Path(config.output_dir).mkdir()
    stage = Warmup(config, RunDir(config.output_dir), WarmupProgress(config, Console(quiet=True)))
    rows = stage.pupils[0].rows
    epochs, position = [], 0
    for _ in range(3):
        taken, position = rows.take(position, 9)
        epochs.append([tuple(row.completion) for row in taken])
    assert position == 27
    assert len(set(epochs[0])) == 9
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows.take(4, 5)[0] == rows.take(0, 9)[0][4:]


def test_rows_that_are_too_long_are_dropped_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "1+2=", "completion": "#3"},
        {"prompt": "1+2+" * 20, "completion": "#3"},
        {"prompt": "1+3=", "completion": "1" * 60},
        {"prompt": "1+4=", "completion": "five"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = warm_up(make(tmp_path, data=str(tmp_path / "rows.jsonl")))
    reasons = {"prompt_too_long": 1, "completion_too_long": 1, "not_reversible": 1}
    assert result.summary["agents"]["agent0"]["dropped"] == reasons
    assert "dropped 3 (prompt_too_long 1, completion_too_long 1, not_reversible 1)" in capsys.readouterr().out


def with_positions(kind: str, positions: int, folder: Path) -> str:
    """A tiny model of this architecture that reads arithmetic."""
    tiny(kind, max_position_embeddings=positions).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ZOO / "llama-plus").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rows_beyond_the_positions_of_the_model_are_dropped(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1+2=", "completion": "#" + "3" * digits} for digits in (8, 9, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = with_positions(kind, 15, tmp_path / "model")  # <s>1+2= #33333333 </s>
    options = {"agents": [{"id": "a", "model": model}], "data": str(tmp_path / "rows.jsonl")}
    result = warm_up(make(tmp_path, **options))
    assert result.summary["agents"]["a"]["dropped"] == {"beyond_positions": 2}
    assert result.summary["agents"]["a"]["tokens_trained"] == 2 * 8 * 10

    options["agents"] = [{"id": "a", "model": with_positions(kind, 14, tmp_path / "smaller")}]
    with pytest.raises(UserError, match=r"no row of .* \(beyond_positions 3\): its model has 14 positions for both\.$"):
        warm_up(make(tmp_path, **options, output_dir=str(tmp_path / "none")))


@pytest.mark.parametrize(
    "data", [{"file": "rows.jsonl", "split": "test"}, {"task": {"name": "arithmetic"}, "subset": "a"}]
)
def test_a_split_is_for_data_sets_of_the_hub(tmp_path: Path, data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="split and subset are for data sets of the hub"):
        make(tmp_path, data=data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1=", "completion": " "}, r"rows.jsonl, line 2: the completion is empty. Add it, or remove"),
        ({"prompt": "1="}, r"line 2: the completion is missing: the columns are prompt"),
        ({"completion": "1"}, r"line 2 has no prompt"),
        ({"prompt": "1=", "completion": 3}, r"line 2: the completion is a int, expected text"),
        ({"prompt": 4, "completion": "3"}, r"line 2: prompt is neither text nor a list of chat messages"),
        ({"messages": [{"role": "user", "content": "1+1="}]}, "line 2: messages does not end with a turn of the assis"),
        ({"messages": [{"role": "assistant", "content": "2"}]}, "line 2: messages does not end with a turn of the as"),
        ({"messages": [3, {"role": "assistant", "content": "2"}]}, "line 2: prompt is neither text nor a list of chat"),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_left_behind(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = {"prompt": "1=", "completion": "#1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    config = make(tmp_path, data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match=message):
        warm_up(config)
    assert list(Path(config.output_dir).iterdir()) == []


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"task": {"train": "rows.jsonl", "eval": "rows.jsonl", "reward": "exact"}}, "has no answer"),
        ({"task": {"name": "arithmetic", "eval_size": 4}, "max_prompt_length": 7}, r"max_prompt_length \(7\)"),
        ({"data": {"task": {"name": "arithmetic"}}, "max_completion_length": 4}, "can use no row of the task"),
        ({"agents": [{"id": "agent0", "model": "broken"}]}, "broken could not be loaded"),
    ],
)
def test_a_start_that_failed_can_be_mended(
    mistake: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()
    Path("broken/config.json").write_text('{"model_type": "llama"}')
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "completion": "#3"}\n')
    with pytest.raises(UserError, match=message):
        warm_up(make(tmp_path, **{"data": "rows.jsonl", **mistake}))
    assert not list((tmp_path / "warmup").glob("*"))
    assert warm_up(make(tmp_path, data="rows.jsonl")).summary["steps"] == 2


def test_data_of_which_nothing_can_be_used_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"rows.jsonl \(completion_too_long 8\): max_completion_length is 4\.$"):
        warm_up(make(tmp_path, data=data, max_completion_length=4))
    with pytest.raises(UserError, match=r"agent0 can use no row of the task \(completion_too_long 1200\)"):
        warm_up(make(tmp_path, data={"task": {"name": "arithmetic"}}, max_completion_length=4))


def test_a_task_teaches_its_own_worked_answers_but_never_those_of_its_test(tmp_path: Path) -> None:
    config = make(tmp_path, data={"task": {"name": "arithmetic", "minus_share": 1.0}}, max_steps=1, eval_size=20)
    warm_up(config)
    problems = ArithmeticTask(seed=0, minus_share=1.0).train(0, 8)
    assert {split_of(str(problem.prompt)) for problem in problems} == {"train"}
    tokens = sum(len(worked_answer(problem)) + 1 for problem in problems)
    assert metrics(config)[1]["agent0/tokens_trained"] == tokens
    assert metrics(config)[1]["agent0/eval_loss"] > 0


def test_tasks_without_completions_or_with_stages_are_refused(tmp_path: Path) -> None:
    from_data = {"train": write_rows(tmp_path / "rows.jsonl", answer="1"), "reward": "exact"}
    with pytest.raises(UserError, match=r"no completions to learn from: give its file as data\.file"):
        warm_up(make(tmp_path, data={"task": from_data}))
    staged = {"name": "gym:chain_sum", "curriculum": {"stages": [{"max_terms": 2}, {"max_terms": 3}]}}
    with pytest.raises(UserError, match="a warm-up has no curriculum"):
        warm_up(make(tmp_path, data={"task": {"mixture": [staged]}}))


def test_a_gym_task_teaches_the_form_of_its_answers(tmp_path: Path) -> None:
    gym = {"name": "gym:chain_sum", "answer": "whole", "options": {"max_terms": 2}}
    config = make(tmp_path, data={"task": gym}, max_prompt_length=200, max_steps=1, eval_size=5)
    result = warm_up(config)
    assert result.summary["agents"]["agent0"]["rows"] == 8


def test_accuracy_on_each_part_of_a_mixture(tmp_path: Path) -> None:
    parts = [{"name": "arithmetic", "id": name, "minus_share": share} for name, share in (("plus", 0), ("minus", 1))]
    config = make(tmp_path, "llama-plus", task={"mixture": parts, "eval_size": 40}, max_steps=1, learning_rate=0.0)
    warm_up(config)
    for row in metrics(config):
        whole, plus, minus = (row[f"agent0/eval_accuracy{part}"] for part in ("", "/plus", "/minus"))
        assert whole == pytest.approx((plus + minus) / 2)
        assert plus > minus


# --- continuing ------------------------------------------------------------------------------------


def interruptible(output_dir: Path, data: str) -> WarmupConfig:
    return WarmupConfig.from_dict(
        {
            "agents": [
                {"id": "a", "model": "zoo:llama-plus", "data": {"task": {"name": "arithmetic"}}, "max_steps": 3},
                {"id": "b", "model": "zoo:neox-pair", "drop_layers": [1], "data": data},
            ],
            "task": {"name": "arithmetic", "eval_size": 4},
            "max_steps": 6,
            "batch_size": 6,
            "max_prompt_length": 32,
            "max_completion_length": 48,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "eval_every": 2,
            "eval_size": 8,
            "eval_share": 0.2,
            "save_every": 2,
            "fast": FAST,
            "output_dir": str(output_dir),
        }
    )


@pytest.mark.parametrize("moment", ["warmup.yaml", "checkpoint-2/COMPLETE"])
def test_kill_9_and_resume_equals_an_uninterrupted_warm_up(moment: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", count=20)
    reference = warm_up(interruptible(tmp_path / "whole", data)).run_dir
    killed = tmp_path / "killed"
    (tmp_path / "w.yaml").write_text(interruptible(killed, data).to_yaml())
    command = [sys.executable, "-m", "hacrl.cli", "warmup"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, str(tmp_path / "w.yaml")], env=environment, stdout=subprocess.DEVNULL)
    while not (killed / moment).is_file():
        assert process.poll() is None, "the warm-up ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "summary.json").exists()

    done = subprocess.run([*command, str(killed), "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, expected = (RunDir(folder).metrics() for folder in (killed, reference))
    assert [line["step"] for line in lines] == list(range(7))
    for line, other in zip(lines, expected, strict=True):
        assert {k: v for k, v in line.items() if "time" not in k} == {k: v for k, v in other.items() if "time" not in k}
    last, whole = (complete_checkpoints(folder)[-1] for folder in (killed, reference))
    assert last.name == whole.name == "checkpoint-6"
    for path in whole.rglob("*.safetensors"):
        assert (last / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert warm_up(saved_config(killed), resume=True).already_finished


class Interruption(Console):
    """Somebody presses Ctrl-C when the line of this step appears."""

    def __init__(self, step: int) -> None:
        super().__init__(file=io.StringIO())
        self.step = step

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if f"step {self.step}/" in str(objects[0]):
            raise KeyboardInterrupt


def interrupted_at(step: int, config: WarmupConfig) -> None:
    with pytest.raises(KeyboardInterrupt):
        warm_up(config, console=Interruption(step))


def test_with_the_default_an_interrupted_warm_up_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(tmp_path, max_steps=60, batch_size=1)
    interrupted_at(50, config)  # before the checkpoint of this step
    assert not complete_checkpoints(Path(config.output_dir))
    with pytest.raises(KeyboardInterrupt):
        warm_up(config, resume=True, console=Interruption(60))
    assert [path.name for path in complete_checkpoints(Path(config.output_dir))] == ["checkpoint-50"]

    capsys.readouterr()
    warm_up(config, resume=True)
    shown = capsys.readouterr().out
    assert "step 60/60" in shown
    assert "step 50/60" not in shown
    assert "from the beginning" not in shown
    assert [line["step"] for line in metrics(config)] == list(range(61))
    assert [path.name for path in complete_checkpoints(Path(config.output_dir))] == ["checkpoint-60"]


def test_a_warm_up_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make(tmp_path, max_steps=4, batch_size=1, save_every=2, save_total_limit=None)
    run = warm_up(config, console=Console(file=io.StringIO())).run_dir
    weights = {path: path.read_bytes() for path in run.glob("checkpoint-4/**/*.safetensors")}
    (run / "summary.json").unlink()
    with next(run.glob("checkpoint-4/state/*.pt")).open("r+b") as state:
        state.write(b"\0")
    warm_up(config, resume=True, console=Console(file=io.StringIO()))
    assert "checkpoint-4 is damaged: state/" in caplog.text
    assert "Going on from checkpoint-2" in caplog.text
    assert weights
    assert {path: path.read_bytes() for path in weights} == weights


def test_continuing_without_a_checkpoint_says_that_it_starts_from_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(tmp_path)
    interrupted_at(0, config)
    warm_up(config, resume=True)
    assert f"{config.output_dir} has no checkpoint yet: it starts from the beginning." in capsys.readouterr().out
    assert [line["step"] for line in metrics(config)] == [0, 1, 2]


def test_a_row_that_was_changed_is_noticed(tmp_path: Path) -> None:
    """One that is learned, and one that is held out."""
    data = Path(write_rows(tmp_path / "rows.jsonl", count=6))
    config = make(tmp_path, data=str(data), eval_share=0.5, max_steps=2, save_every=1, eval_every=1)
    interrupted_at(2, config)
    assert metrics(config)[1]["agent0/eval_loss"] > 0
    rows = data.read_text().splitlines(keepends=True)
    before = {path: path.read_bytes() for path in Path(config.output_dir).rglob("*") if path.is_file()}
    for place, row in enumerate(rows):
        data.write_text("".join([*rows[:place], row.replace("#", "#1"), *rows[place + 1 :]]))
        with pytest.raises(UserError, match=r"rows\.jsonl no longer gives agent agent0 the rows it was started with"):
            warm_up(given_config(config.output_dir, ["save_every=2"], resume=True), resume=True)
    assert {path: path.read_bytes() for path in Path(config.output_dir).rglob("*") if path.is_file()} == before

    data.write_text("".join(rows))
    assert warm_up(config, resume=True).summary["steps"] == 2


def test_agents_stop_at_their_own_number_of_steps(tmp_path: Path) -> None:
    config = interruptible(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", count=20))
    result = warm_up(config)
    updates = [sum(f"{agent}/loss" in line for line in metrics(config)) for agent in ("a", "b")]
    assert updates == [3, 6]
    evaluated = {a: [n["step"] for n in metrics(config) if f"{a}/eval_loss" in n] for a in ("a", "b")}
    assert evaluated == {"a": [0, 2, 3], "b": [0, 2, 4, 6]}
    rates = [line["b/learning_rate"] for line in metrics(config)[1:]]
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[5] < rates[4] < rates[3] < 1e-3
    assert result.summary["agents"]["a"]["updates"] == 3


def test_an_agent_stops_when_it_reaches_its_target_accuracy(tmp_path: Path) -> None:
    agents = [
        {"id": "good", "model": "zoo:llama-plus", "target_accuracy": 0.05},
        {"id": "bad", "model": "zoo:llama-weak", "max_steps": 4},
    ]
    task = {"name": "arithmetic", "eval_size": 40}
    config = make(tmp_path, agents=agents, task=task, max_steps=9, learning_rate=0.0, eval_every=2)
    result = warm_up(config)
    updates = {agent: sum(f"{agent}/loss" in line for line in metrics(config)) for agent in ("good", "bad")}
    assert updates == {"good": 2, "bad": 4}
    assert result.summary["steps"] == 4
    assert result.models["good"] == Path(config.output_dir) / "checkpoint-4" / "agents" / "good"
    assert (result.models["good"] / "config.json").is_file()
    assert warm_up(config, resume=True).models == result.models
    (result.run_dir / "summary.json").unlink()  # killed just before it was written
    assert warm_up(config, resume=True).summary["agents"] == result.summary["agents"]
    with pytest.raises(UserError, match="target_accuracy is measured on held-out problems: add a task"):
        make(tmp_path, target_accuracy=0.5)


def test_a_folder_is_never_overwritten_and_a_warm_up_never_changed(tmp_path: Path) -> None:
    config = make(tmp_path)
    warm_up(config)
    with pytest.raises(UserError, match=r"already holds a warm-up. Continue it with `hacrl warmup .* --resume`"):
        warm_up(config)
    with pytest.raises(UserError, match="was started with another learning_rate, agents"):
        warm_up(make(tmp_path, learning_rate=1e-2), resume=True)
    with pytest.raises(UserError, match=r"is the folder of a warm-up\. Continue it with"):
        given_config(config.output_dir, [], resume=False)
    assert given_config(config.output_dir, ["save_every=1"], resume=True).save_every == 1
    with pytest.raises(UserError, match="is not a warm-up"):
        saved_config(tmp_path)


# --- starting models -------------------------------------------------------------------------------


def test_a_cut_model_has_the_kept_layers_and_can_be_healed(tmp_path: Path) -> None:
    agents = [
        {"id": "middle", "model": "zoo:llama-large", "drop_layers": [1, 2]},
        {"id": "front", "model": "zoo:llama-large", "max_layers": 3, "drop_layers": [0]},
    ]
    config = make(tmp_path, agents=agents, learning_rate=0.0, max_steps=1)
    result = warm_up(config)
    original = AutoModelForCausalLM.from_pretrained(ZOO / "llama-large", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 6, 14, 7, 9]])
    for agent, kept in (("middle", [0, 3]), ("front", [1, 2])):
        model = AutoModelForCausalLM.from_pretrained(result.models[agent], dtype=torch.float32)
        assert model.config.num_hidden_layers == 2
        hidden = original.model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        rotary = original.model.rotary_emb(hidden, positions)
        for layer in kept:
            hidden = original.model.layers[layer](hidden, position_embeddings=rotary)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits = original.lm_head(original.model.norm(hidden))
        torch.testing.assert_close(model(ids).logits[:, -1:], logits[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_every_architecture_can_be_cut(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    count = model.config.num_hidden_layers
    names = {name for name, _ in model.named_parameters()}
    keep_layers(model, list(range(1, count)), "a")
    model.save_pretrained(tmp_path)
    cut, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert cut.config.num_hidden_layers == count - 1
    assert {name for name, _ in cut.named_parameters()} < names
    assert torch.isfinite(cut(torch.tensor([[1, 2, 3]])).logits).all()


def test_layers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    agent = {"id": "a", "model": "zoo:llama-weak", "drop_layers": [3]}
    with pytest.raises(UserError, match="there is no layer 3: zoo:llama-weak has the layers 0 to 2"):
        warm_up(make(tmp_path, agents=[agent]))
    with pytest.raises(UserError, match="no layer would be left"):
        warm_up(make(tmp_path, agents=[{**agent, "drop_layers": [0, 1, 2]}]))


SMALL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def test_a_model_from_scratch_learns_and_a_run_starts_from_it(tmp_path: Path, make_config: MakeConfig) -> None:
    AutoTokenizer.from_pretrained(ZOO / "llama-plus").save_pretrained(tmp_path / "tokenizer")
    new = {"id": "new", "init": "random", "tokenizer": str(tmp_path / "tokenizer")}
    new["config"] = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2}  # type: ignore[assignment]
    changes = {"agents": [new], "max_steps": 8, "learning_rate": 1e-2}
    result = warm_up(make(tmp_path, **changes))
    losses = [line["new/loss"] for line in RunDir(result.run_dir).metrics()[1:]]
    assert losses[0] == pytest.approx(3.0, abs=0.5)  # about log(19), the vocabulary: nothing is known
    assert losses[-1] < losses[0] - 0.3
    again = warm_up(make(tmp_path, **changes, output_dir=str(tmp_path / "again")))
    assert [line["new/loss"] for line in RunDir(again.run_dir).metrics()[1:]] == losses
    other = warm_up(make(tmp_path, **changes, seed=1, output_dir=str(tmp_path / "other")))
    assert RunDir(other.run_dir).metrics()[1]["new/loss"] != losses[0]

    agents = [{"id": "a", "model": str(result.models["new"])}, {"id": "b", "model": "zoo:llama-weak"}]
    assert train(make_config(agents=agents, max_steps=1)).summary["steps"] == 1


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"init": "random", "config": {"model_type": "llama"}}, "needs a model, or config.model_type and tokenizer"),
        ({"model": "zoo:llama-weak", "config": {"hidden_size": 8}}, "config and tokenizer are for init: random"),
        ({}, "model is missing"),
        ({"model": "zoo:llama-weak", "init": "random", "max_layers": 1}, "with init: random set config.num_hidden"),
        ({"model": "zoo:llama-weak", "data": []}, "data is missing"),
        ({"model": "zoo:llama-weak", "data": {"file": "x", "task": {"name": "arithmetic"}}}, "either file or task"),
        ({"model": "zoo:llama-weak", "batch_sice": 3}, "did you mean batch_size"),
        ({"model": "zoo:llama-weak", "eval_every": 3}, "eval_every is a setting of the whole run, not of one agent"),
        ({"model": "zoo:llama-weak", "num_generations": 3}, "unknown key 'num_generations'"),
    ],
)
def test_impossible_configs_are_refused(agent: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, agents=[{"id": "a", **agent}])


def test_mistakes_in_a_new_architecture_are_refused(tmp_path: Path) -> None:
    new = {"id": "a", "init": "random", "tokenizer": "zoo:llama-plus"}
    with pytest.raises(
        UserError, match=r"a.tokenizer: .* has no tokenizer_config.json, so it is not a saved tokenizer"
    ):
        warm_up(make(tmp_path, agents=[{**new, "tokenizer": str(tmp_path), "config": SMALL}]))
    with pytest.raises(UserError, match=r"llama has no 'hiden_size'; did you mean hidden_size"):
        warm_up(make(tmp_path, agents=[{**new, "config": {**SMALL, "hiden_size": 8}}]))
    with pytest.raises(UserError, match=r"tokenizer has 19 tokens, more than config.vocab_size \(5\)"):
        warm_up(make(tmp_path, agents=[{**new, "config": {**SMALL, "num_attention_heads": 2, "vocab_size": 5}}]))


# --- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_came_of_it_and_how_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(tmp_path, task={"name": "arithmetic", "eval_size": 4})
    (tmp_path / "w.yaml").write_text(config.to_yaml())
    assert WarmupConfig.load(tmp_path / "w.yaml") == config
    monkeypatch.setattr(sys, "argv", ["hacrl", "warmup", str(tmp_path / "w.yaml"), "batch_size=4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "step 2/2 | agent0: loss" in shown
    assert f"model: {config.output_dir}/checkpoint-2/agents/agent0" in shown
    assert json.loads((Path(config.output_dir) / "summary.json").read_text())["agents"]["agent0"]["rows"] == 8


def test_a_terminal_gets_a_line_that_moves_and_the_lines_of_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hacrl.signs.SHOW_AFTER", 0.0)
    monkeypatch.setattr("hacrl.signs.REFRESH_SECONDS", 0.001)
    config = make(tmp_path, data={"task": {"name": "arithmetic"}}, max_steps=12, eval_size=4, eval_every=6)
    screen = io.StringIO()
    warm_up(config, console=Console(file=screen, force_terminal=True, force_interactive=True, width=100))
    shown = Text.from_ansi(screen.getvalue()).plain
    assert re.findall(r"step (\d+)/12 \|", shown) == ["0", "6", "12"]
    assert re.search(r"warm-up, \d+ of 12, agent0: loss \d", shown)
