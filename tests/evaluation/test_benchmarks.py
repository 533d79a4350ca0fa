"""Evaluations on benchmarks of our own: real models, real files, and what interruptions leave of them."""

import dataclasses
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
from rich.console import Console
from transformers import AutoTokenizer

from conftest import FAST, MakeConfig
from hacrl import signs
from hacrl.agents import loading
from hacrl.agents.loading import load_tokenizer, resolve_model
from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.evaluation import answers
from hacrl.evaluation.answers import Answerer
from hacrl.evaluation.benchmarks import EvaluationDir, completions_in, evaluate_benchmarks, weights_of
from hacrl.evaluation.figures import majority
from hacrl.evaluation.options import Options
from hacrl.run import train
from hacrl.tasks.problem import Problem

PROBLEMS = {"12+34-5=": 41, "70-8-9=": 53, "3+4+5=": 12, "99-98+1=": 2, "20+20+20=": 60, "5-5+5=": 5}
MODEL = "zoo:llama-plus"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_gsm8k(folder: Path, solutions: dict[str, int]) -> Path:
    """Problems as GSM8K would have them; the folder of the file."""
    rows = [{"question": prompt, "answer": f"so\n#### {answer}"} for prompt, answer in solutions.items()]
    write(folder / "data" / "gsm8k.jsonl", rows)
    return folder / "data"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six problems that the zoo understands, as GSM8K and as AIME would have them."""
    aime = [{"problem": prompt, "answer": answer} for prompt, answer in list(PROBLEMS.items())[:3]]
    write(tmp_path / "data" / "aime25.jsonl", aime)
    return write_gsm8k(tmp_path, PROBLEMS)


def evaluate(data: Path, output: Path, target: str = MODEL, **changes: Any) -> dict[str, Any]:
    overrides = ["max_completion_length=40", f"fast={str(FAST).lower()}"]
    given = {"benchmarks": ["gsm8k"], "data": data, "system_prompt": "", "overrides": overrides, **changes}
    results, folder = evaluate_benchmarks(target, Options(output=output, **given), Console(quiet=True))
    assert folder == output
    assert results == json.loads((output / "eval.json").read_text(encoding="utf-8"))
    return results


def test_greedy_answers(data: Path, tmp_path: Path) -> None:
    results = evaluate(data, tmp_path / "out")
    lines = completions_in(tmp_path / "out" / "gsm8k.jsonl")
    assert sorted(line["prompt"] for line in lines) == sorted(PROBLEMS)
    for line in lines:
        right = line["text"].rpartition("#")[2] == str(PROBLEMS[line["prompt"]])
        assert (line["reward"], line["finish_reason"], line["index"]) == (float(right), "stop", 0)
        assert line["stated"] is None  # the zoo marks its answers with one #
    row = results["agents"]["model"]["benchmarks"]["gsm8k"]
    accuracy = sum(line["reward"] for line in lines) / 6
    assert row["figures"].keys() == {"avg@1"}
    assert row["figures"]["avg@1"]["value"] == pytest.approx(accuracy)
    assert row["settings"]["temperature"] == 0
    assert (row["completions"], row["unverified"], row["cut_off"]) == (6, 0, 0)
    assert results["agents"]["model"]["mean"]["avg"]["value"] == pytest.approx(accuracy)


def test_several_completions(data: Path, tmp_path: Path) -> None:
    results = evaluate(data, tmp_path / "out", benchmarks=["gsm8k", "aime25"], k=8, batch_size=5)
    agent = results["agents"]["model"]
    for name, count in {"gsm8k": 6, "aime25": 3}.items():
        lines = completions_in(tmp_path / "out" / f"{name}.jsonl")
        groups = [lines[start : start + 8] for start in range(0, len(lines), 8)]
        assert [[line["index"] for line in group] for group in groups] == [list(range(8))] * count
        assert len({line["text"] for line in lines}) > count
        for group in groups:
            stated = [line["text"].rpartition("#")[2].lstrip("0") for line in group]
            for one, text in zip(group, stated, strict=True):
                assert (one["vote"] == 0) == (one["reward"] == 1)
                for other, others in zip(group, stated, strict=True):
                    assert text != others or one["vote"] == other["vote"]
        figures = agent["benchmarks"][name]["figures"]
        rewards = [[line["reward"] for line in group] for group in groups]
        expected = {
            "avg@8": sum(map(sum, rewards)) / (8 * count),
            "best@8": sum(map(max, rewards)) / count,
            "pass@8": sum(map(max, rewards)) / count,
            "maj@8": sum(majority([line["vote"] for line in group]) for group in groups) / count,
        }
        assert {key: figures[key]["value"] for key in expected} == pytest.approx(expected)
        assert figures["avg@8"]["low"] <= figures["avg@8"]["value"] <= figures["avg@8"]["high"]
    gsm8k, aime = (agent["benchmarks"][name]["figures"] for name in ("gsm8k", "aime25"))
    for mean, figures in {"avg@1": ("avg@1",) * 2, "avg": ("avg@8",) * 2, "paper": ("avg@1", "best@8")}.items():
        expected = (gsm8k[figures[0]]["value"] + aime[figures[1]]["value"]) / 2
        assert agent["mean"][mean]["value"] == pytest.approx(expected)


def test_beside_several_completions_there_is_the_greedy_answer(data: Path, tmp_path: Path) -> None:
    alone = evaluate(data, tmp_path / "alone")
    beside = evaluate(data, tmp_path / "beside", k=2)
    lines = completions_in(tmp_path / "beside" / "gsm8k-greedy.jsonl")
    assert lines == completions_in(tmp_path / "alone" / "gsm8k.jsonl")
    rows = [results["agents"]["model"]["benchmarks"]["gsm8k"] for results in (alone, beside)]
    assert rows[0]["figures"]["avg@1"] == rows[1]["figures"]["avg@1"]
    assert [row["completions"] for row in rows] == [6, 18]
    (tmp_path / "beside" / "gsm8k-greedy.jsonl").unlink()
    assert evaluate(data, tmp_path / "beside", k=2) == beside
    assert completions_in(tmp_path / "beside" / "gsm8k-greedy.jsonl") == lines


def test_the_usual_number_of_completions_is_that_of_the_paper(data: Path, tmp_path: Path) -> None:
    results = evaluate(data, tmp_path / "out", benchmarks=["gsm8k", "aime25"], limit=1)
    rows = results["agents"]["model"]["benchmarks"]
    assert {name: row["completions"] for name, row in rows.items()} == {"gsm8k": 1, "aime25": 31}
    assert {name: row["settings"]["temperature"] for name, row in rows.items()} == {"gsm8k": 0, "aime25": 1}


def test_other_seeds_give_other_completions(data: Path, tmp_path: Path) -> None:
    texts = []
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        evaluate(data, tmp_path / name, k=4, seed=seed)
        texts.append([line["text"] for line in completions_in(tmp_path / name / "gsm8k.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_the_agents_of_a_run(data: Path, make_config: MakeConfig) -> None:
    config = make_config("llama-plus", "neox-pair", max_steps=1, task={"name": "arithmetic", "eval_size": 2})
    run = train(config).run_dir
    results, folder = evaluate_benchmarks(str(run), Options(["gsm8k"], data=data), Console(quiet=True))
    assert folder == run / "eval" / "checkpoint-1"
    assert {path.name for path in folder.iterdir()} == {".lock", "eval.json", "agent0", "agent1"}
    for agent in ("agent0", "agent1"):
        assert results["agents"][agent]["model"] == str(run / "checkpoint-1" / "agents" / agent)
        assert len(completions_in(folder / agent / "gsm8k.jsonl")) == 6
        settings = results["agents"][agent]["benchmarks"]["gsm8k"]["settings"]
        assert (settings["system_prompt"], settings["max_completion_length"]) == (None, 40)
    with pytest.raises(UserError, match="no checkpoint of step 9"):
        evaluate_benchmarks(str(run), Options(["gsm8k"], data=data, checkpoint=9), Console(quiet=True))


def test_a_model_without_a_chat_template_gets_the_instruction_behind_the_problem(data: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "model" / "config.json").write_text((Path(resolve_model(MODEL)) / "config.json").read_text())
    config = AgentConfig(id="model", model=str(tmp_path / "model"), system_prompt="7=")
    assert load_tokenizer(config).chat_template is None
    ids = Answerer(config, as_trained=False).prompt_ids(Problem("p", "1+2=", "3"))
    assert ids == tokenizer.encode("1+2=\n7=\n")
    # A template that knows no system role, as Gemma's.
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refuses + "{% for message in messages %}{{ message.content }}{% endfor %}="
    tokenizer.save_pretrained(tmp_path / "model")
    ids = Answerer(config, as_trained=False).prompt_ids(Problem("p", "1+2=", "3"))
    assert ids == tokenizer.encode("1+2=\n7==")


# --- resuming --------------------------------------------------------------------------------------


def command(data: Path, output: Path) -> list[str]:
    sizes = ["--k", "6", "--batch-size", "2", "--max-completion-length", "40", "--system-prompt", ""]
    place = ["--benchmarks", "gsm8k", "--data", str(data), "--output", str(output), f"fast={str(FAST).lower()}"]
    return [sys.executable, "-m", "hacrl.cli", "eval", MODEL, *place, *sizes]


def test_kill_9_and_the_same_command_again(data: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(data, whole), env=environment, check=True, capture_output=True)
    process = subprocess.Popen(command(data, killed), env=environment, stdout=subprocess.DEVNULL)
    while len(completions_in(killed / "gsm8k.jsonl")) < 4:
        assert process.poll() is None, "the evaluation ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = completions_in(killed / "gsm8k.jsonl")
    assert len(before) < 36
    with (killed / "gsm8k.jsonl").open("a") as file:
        file.write('{"prompt_id": "gsm8k-00')

    done = subprocess.run(command(data, killed), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = completions_in(killed / "gsm8k.jsonl")
    assert {(line["prompt_id"], line["index"]) for line in before} <= {(x["prompt_id"], x["index"]) for x in after}
    for name in ("gsm8k.jsonl", "gsm8k-greedy.jsonl", "eval.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_half_a_batch_is_done_again_and_a_finished_benchmark_is_not(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(data, tmp_path / "out", k=4, batch_size=8)
    path = tmp_path / "out" / "gsm8k.jsonl"
    reference = path.read_bytes()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[9:]), encoding="utf-8")
    evaluate(data, tmp_path / "out", k=4, batch_size=8)
    assert path.read_bytes() == reference

    def refuse(*arguments: object) -> None:
        raise AssertionError("a finished evaluation loads no model and judges nothing")

    for module, name in ((loading, "_load"), (loading, "load_tokenizer"), (answers, "Verifier"), (answers, "Pool")):
        monkeypatch.setattr(module, name, refuse)
    evaluate(data, tmp_path / "out", k=4, batch_size=3)
    assert path.read_bytes() == reference


def test_benchmarks_may_be_added(data: Path, tmp_path: Path) -> None:
    evaluate(data, tmp_path / "out", k=2)
    results = evaluate(data, tmp_path / "out", benchmarks=["aime25", "gsm8k"], k=2)
    assert results["agents"]["model"]["benchmarks"].keys() == {"gsm8k", "aime25"}
    assert results["agents"]["model"]["mean"]["benchmarks"] == ["aime25", "gsm8k"]
    results = evaluate(data, tmp_path / "out", k=2)
    assert results["agents"]["model"]["mean"]["benchmarks"] == ["gsm8k"]


# --- refusals --------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(data, out, k=2)
    before = {path: path.read_bytes() for path in out.iterdir()}
    for changes, message in (
        ({"k": 3}, "k 2, now 3"),
        ({"k": 2, "seed": 1}, "seed 0, now 1"),
        ({"k": 2, "temperature": 0.5}, "temperature 1.0, now 0.5"),
        ({"k": 2, "limit": 5}, "problems 6, now 5"),
        ({"k": 2, "system_prompt": "7"}, "system_prompt '', now '7'"),
        ({"k": 2, "overrides": ["max_completion_length=40", "prompt_suffix='7'"]}, "prompt_suffix"),
        ({"k": 2, "target": "zoo:llama-minus"}, "weights"),
        ({"benchmarks": ["aime25"], "target": "zoo:llama-minus"}, "weights"),
        ({"benchmarks": ["aime25"], "system_prompt": "7"}, "system_prompt '', now '7'"),
    ):
        with pytest.raises(UserError, match="holds gsm8k of zoo:llama-plus with other settings") as caught:
            evaluate(data, out, **changes)
        assert message in str(caught.value)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(UserError, match="not empty and not an evaluation"):
        evaluate(data, data)
    with pytest.raises(UserError, match="is a file"):
        evaluate(data, data / "gsm8k.jsonl")
    with EvaluationDir(out).locked(), pytest.raises(UserError, match="Another process evaluates into"):
        evaluate(data, out, k=2)


def test_impossible_options(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for changes, message in (
        ({"k": 2, "temperature": 0.0}, "2 times the same completion"),
        ({"checkpoint": 3}, "--checkpoint is for a run"),
        ({"target": "zoo:llama-week"}, "did you mean llama-weak"),
        ({"overrides": ["top_q=1"]}, "did you mean top_p"),
        ({"overrides": ["model=zoo:llama-weak"]}, "the model is the command's first word"),
        ({"overrides": ["temperature=0.7"]}, "use --temperature"),
        ({"benchmarks": ["gms8k"]}, "did you mean gsm8k"),
        ({"benchmarks": []}, "No benchmark is named. There are gsm8k, math500"),
        ({"benchmarks": ["aime24"]}, "There are files of aime25"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(data, out, **changes)
    assert not out.exists()


def test_prompts_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    data = write_gsm8k(tmp_path, {"1+" * 200 + "1=": 201})
    with pytest.raises(UserError, match="shortest prompt has 403 tokens, and zoo:llama-plus has 256 positions"):
        evaluate(data, tmp_path / "out")
    # Nothing was sampled, so the folder is free for something else.
    evaluate(write_gsm8k(tmp_path, {"1+1=": 2}), tmp_path / "out")


def test_a_problem_that_does_not_fit_is_wrong_and_shortens_no_other_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sums = {"3+4+5=": 12, "1+" * 200 + "1=": 201, "1+" * 120 + "1=": 121}
    results = evaluate(write_gsm8k(tmp_path, sums), tmp_path / "out", batch_size=1)
    row = results["agents"]["model"]["benchmarks"]["gsm8k"]
    assert "1 prompts do not fit into zoo:llama-plus (256 positions): counted as wrong" in caplog.text
    assert "1 prompts leave less than 40 tokens" in caplog.text
    lines = {line["prompt"]: line for line in completions_in(tmp_path / "out" / "gsm8k.jsonl")}
    short, longest, long = (lines[question] for question in sums)
    assert (longest["reward"], longest["num_tokens"], longest["finish_reason"]) == (0.0, 0, "no_room")
    assert (row["no_room"], row["cut_off"]) == (1, sum(line["finish_reason"] == "length" for line in lines.values()))
    assert long["num_tokens"] <= 256 - 243
    assert (short["finish_reason"], row["completions"], row["figures"]["avg@1"]["problems"]) == ("stop", 3, 3)
    evaluate(write_gsm8k(tmp_path, {"3+4+5=": 12}), tmp_path / "alone")
    assert completions_in(tmp_path / "alone" / "gsm8k.jsonl")[0]["text"] == short["text"]


def test_problems_that_are_no_text(data: Path, tmp_path: Path) -> None:
    for question, message in (
        ('["1+1="]', "question is a list, expected text"),
        ('"\\ud83d 1+1="', "not valid Unicode"),
    ):
        (data / "gsm8k.jsonl").write_text(f'{{"question": {question}, "answer": "#### 2"}}\n', encoding="utf-8")
        with pytest.raises(UserError, match=message):
            evaluate(data, tmp_path / "out")


def test_a_damaged_line_is_named(data: Path, tmp_path: Path) -> None:
    evaluate(data, tmp_path / "out")
    path = tmp_path / "out" / "gsm8k.jsonl"
    path.write_text("{broken\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UserError, match=r"gsm8k.jsonl, line 1, is not a completion: .*sampled anew"):
        evaluate(data, tmp_path / "out")
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"gsm8k.jsonl, line 1, is not a completion: prompt_id is missing"):
        evaluate(data, tmp_path / "out")
    (tmp_path / "out" / "eval.json").write_text('{"agents": []}', encoding="utf-8")
    with pytest.raises(UserError, match=r"eval.json is not the results of an evaluation: agents is a list\. Delete"):
        evaluate(data, tmp_path / "out")


def test_weights_tell_models_apart() -> None:
    fingerprints = {weights_of(f"zoo:llama-{name}") for name in ("plus", "minus", "weak", "small")}
    assert len(fingerprints) == 4
    assert weights_of("org/name") == "org/name"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "config.json"])
def test_another_tokenizer_or_template_is_another_model(data: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model(MODEL), model)
    evaluate(data, tmp_path / "out", str(model))
    file = model / name
    file.write_text((file.read_text(encoding="utf-8") if file.is_file() else "") + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"other settings: tokenizer, template or weights '\w{16}', now '\w{16}'"):
        evaluate(data, tmp_path / "out", str(model))


def test_a_log_says_how_far_it_is(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(signs, "REFRESH_SECONDS", 0.0005)
    log = io.StringIO()
    options = Options(benchmarks=["gsm8k"], data=data, output=tmp_path / "out", batch_size=4, system_prompt="")
    with signs.Display(console := Console(file=log)):
        evaluate_benchmarks(MODEL, options, console)
    lines = log.getvalue().splitlines()
    assert any(line.startswith(f"model: gsm8k, 0 of 6, 0:00 › loading {MODEL}, 0:") for line in lines)
    assert any(re.search(r"gsm8k, 0 of 6, \d:\d\d › answering, \d of 4, 0:", line) for line in lines)
    rate = r"\d+\.\d % right so far, [\d,]+ tokens/s, 0:\d\d, left 0:\d\d"
    assert any(re.search(rf"^model: gsm8k, 4 of 6, {rate} › answering, \d of 2, 0:", line) for line in lines)
    assert lines[-1] == "model: gsm8k done"


def test_a_first_look_is_not_in_the_way(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = Options(benchmarks=["gsm8k"], data=data, limit=2, overrides=["max_completion_length=4"])
    console = Console(quiet=True)
    assert evaluate_benchmarks(MODEL, options, console)[1] == Path("runs/eval-llama-plus-limit-2")
    whole = dataclasses.replace(options, limit=None)
    assert evaluate_benchmarks(MODEL, whole, console)[1] == Path("runs/eval-llama-plus")
