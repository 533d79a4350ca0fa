"""Files of the usual benchmarks, in the formats they come in, with problems of our own."""

import json
from pathlib import Path
from typing import Any

import pytest

from hacrl.errors import UserError
from hacrl.tasks import dataset
from hacrl.tasks.benchmarks import BENCHMARKS, found_in, load_benchmarks
from hacrl.tasks.problem import Problem, digest

ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": (
        {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7 pens\n#### 1,007"},
        "Ann has 3 pens and buys 4. How many?",
        "1,007",
    ),
    "math500": (
        {"problem": "Half of one?", "solution": r"It is $\boxed{0.5}$", "answer": r"\frac{1}{2}", "level": 1},
        "Half of one?",
        r"\frac{1}{2}",
    ),
    "math": (
        {
            "problem": "A set?",
            "solution": r"First \boxed{7}, then $\boxed{\left\{1, \frac{2}{3}\right\}}$.",
            "type": "x",
        },
        "A set?",
        r"\left\{1, \frac{2}{3}\right\}",
    ),
    "amc23": ({"id": 0, "problem": "2 + 2?", "answer": 4.0, "url": "u", "question": "2 + 2?"}, "2 + 2?", "4"),
    "aime24": ({"id": 60, "problem": "5 - 2?", "solution": "It is 3.", "answer": "003"}, "5 - 2?", "003"),
    "aime25": ({"problem": "5 - 1?", "answer": 4, "id": "0"}, "5 - 1?", "4"),
    "minerva": ({"problem": "How far?", "solution": "$x=\\boxed{4.5e3}$ m", "idx": 0}, "How far?", "4.5e3"),
    "olympiad": (
        {
            "id": 9,
            "context": None,
            "question": "Which?",
            "solution": ["so"],
            "final_answer": ["$-1$, $3$"],
            "unit": None,
        },
        "Which?",
        "-1, 3",
    ),
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_table_is_complete() -> None:
    assert ROWS.keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_prompt_and_a_reference(name: str, tmp_path: Path) -> None:
    row, prompt, reference = ROWS[name]
    write(tmp_path / name / "test.jsonl", row)
    (found,) = load_benchmarks([name], tmp_path)
    (problem,) = found.problems
    assert (problem.prompt, problem.answer) == (prompt, reference)
    assert problem.columns["answer"] == reference
    assert problem.id == f"{name}-00000"


def test_worked_solutions(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", ROWS["gsm8k"][0])
    write(tmp_path / "amc23.jsonl", {**ROWS["amc23"][0], "solution": "not one that ends in the reference"})
    gsm8k, amc = load_benchmarks(["gsm8k", "amc23"], tmp_path)
    assert gsm8k.solution(gsm8k.problems[0]) == ROWS["gsm8k"][0]["answer"]
    assert amc.solution(amc.problems[0]) is None


def test_a_context_stands_before_the_question(tmp_path: Path) -> None:
    write(tmp_path / "olympiadbench" / "test.jsonl", {**ROWS["olympiad"][0], "context": "Let x be odd."})
    (found,) = load_benchmarks(["olympiad"], tmp_path)
    assert found.problems[0].prompt == "Let x be odd.\n\nWhich?"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("math500", "MATH-500/test.jsonl"),
        ("math500", "deep/er/math_500.jsonl"),
        ("math500", "math500_test.jsonl"),
        ("gsm8k", "openai/gsm8k/main/test-00000-of-00001.jsonl"),
        ("minerva", "minerva_math/test.jsonl"),
        ("olympiad", "olympiad_bench.json"),
        ("aime24", "aime_2024/data/train-00000-of-00001.jsonl"),
        ("aime25", "AIME2025.jsonl"),
    ],
)
def test_files_are_found_by_name(name: str, file: str, tmp_path: Path) -> None:
    write(tmp_path / file, ROWS[name][0])
    write(tmp_path / "math" / "train.jsonl", ROWS["math"][0])
    write(tmp_path / "unrelated.jsonl", {"a": 1})
    (found,) = load_benchmarks([name], tmp_path)
    assert found.source == str(tmp_path / file)
    assert sorted(found_in(tmp_path)) == sorted([name, "math:train"])


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    for shard in (1, 0):
        rows = [{"problem": f"problem {shard}", "answer": "1"}]
        write(tmp_path / "math" / f"test-0000{shard}-of-00002.jsonl", *rows)
    (found,) = load_benchmarks(["math"], tmp_path)
    assert [problem.prompt for problem in found.problems] == ["problem 0", "problem 1"]


def test_the_training_split_is_read_only_when_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "math" / "train.jsonl", ROWS["math"][0])
    with pytest.raises(UserError) as caught:
        load_benchmarks(["math"], tmp_path)
    for part in ("looked for math.jsonl", "math/**/test.jsonl", f"There is {path}", "ask for math:train"):
        assert part in str(caught.value)
    (found,) = load_benchmarks(["math:train"], tmp_path)
    assert found.problems[0].id == "math:train-00000"


def test_rows_without_a_reference_are_left_out_and_named(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": None}, {"problem": "b", "answer": "2"}, {"problem": "c", "answer": " "}]
    path = write(tmp_path / "math.jsonl", *rows)
    (found,) = load_benchmarks(["math"], tmp_path)
    assert [problem.prompt for problem in found.problems] == ["b"]
    assert found.without_reference == [f"{path}, line 1", f"{path}, line 3"]


def test_the_digest_tells_other_problems_apart(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}", "answer": f"{n}"} for n in range(4)]
    write(tmp_path / "one" / "math.jsonl", *rows)
    write(tmp_path / "two" / "math.jsonl", *rows[:3], {"problem": "3", "answer": "4"})
    first, other = (load_benchmarks(["math"], tmp_path / name)[0] for name in ("one", "two"))
    limited = [load_benchmarks(["math"], tmp_path / name, limit=3)[0] for name in ("one", "two")]
    assert first.digest != other.digest
    assert limited[0].digest == limited[1].digest != first.digest


def test_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a" / "math.jsonl", ROWS["math"][0])
    write(tmp_path / "b" / "math.jsonl", ROWS["math"][0])
    write(tmp_path / "amc23.jsonl", {"text": "?", "answer": "1"})
    write(tmp_path / "gsm8k.jsonl", {"question": "?", "answer": None})
    for names, message in {
        ("maths",): "did you mean math",
        ("math", "math"): "named twice",
        ("math",): "Several files fit math",
        ("amc23",): "has no problem: it has the columns text, answer",
        ("gsm8k",): "has no problem with a reference answer",
        ("aime25",): "aime2025/**/test.jsonl",
    }.items():
        with pytest.raises(UserError, match=message.replace("*", r"\*")):
            load_benchmarks(list(names), tmp_path)
    with pytest.raises(UserError, match="There is no folder"):
        load_benchmarks(["math"], tmp_path / "missing")
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="has no file of gsm8k"):
        found_in(tmp_path / "c")


def test_a_subset_lies_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As openai/gsm8k is laid out on the hub."""
    for subset, answer in {"main": "1", "socratic": "2"}.items():
        write(tmp_path / "gsm8k" / subset / "test.jsonl", {"question": "?", "answer": f"#### {answer}"})
    for data in (tmp_path, tmp_path / "gsm8k", tmp_path / "gsm8k" / "main"):
        (found,) = load_benchmarks(["gsm8k"], data)
        assert [problem.answer for problem in found.problems] == ["1"]


def test_the_digest_stays_as_it_is_written_in_folders_of_evaluations() -> None:
    problems = [Problem("a", "1+1=?", "2"), Problem("b", [{"role": "user", "content": "√4"}], "2")]
    assert digest(problems) == "2eed95461218dc97"
    assert digest(problems[:1]) != digest(problems)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("Couldn't reach the hub.")

    monkeypatch.setattr(dataset, "_read_hub", refuse)
    with pytest.raises(UserError, match="gsm8k cannot be read from the hub: give its files with --data DIR"):
        load_benchmarks(["gsm8k"], None)
