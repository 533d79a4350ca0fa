"""Verdicts and votes on answers to benchmarks, and the check of the verifier."""

import json
from pathlib import Path

import pytest

from hacrl.evaluation import answers
from hacrl.evaluation.answers import Judge
from hacrl.evaluation.check import check_verifier
from hacrl.tasks.benchmarks import load_benchmarks
from hacrl.tasks.problem import Problem


def test_hostile_completions_are_counted_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "VERIFY_SECONDS", 3.0)
    problem = Problem("p", "12+34-5=", "41")
    texts = [
        "9**9**9**9",
        r"\boxed{41}",
        r"\boxed{40}",
        r"It is $\boxed{\frac{80}{2}}$",
        "\x00\u2028\ud800 no answer",
        "\\boxed{" * 50_000,
        "[bold]41[/bold]\n#### 41",
    ]
    with Judge() as judge:
        verdicts = judge.score([problem] * len(texts), texts)
        lines = [{"text": text, "reward": own.reward} for text, own in zip(texts, verdicts, strict=True)]
        (votes,) = judge.votes([lines])
    assert [line["reward"] for line in lines][:5] == [None, 1.0, 0.0, 0.0, 0.0]
    assert verdicts[0].problem == "timeout"
    assert lines[5]["reward"] in (0.0, None)
    assert votes == [None, 0, 1, 1, None, None, 0]


def test_the_check_of_the_verifier(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "answer": "1/2", "solution": r"It is $\boxed{\frac12}$."},
        {"problem": "b", "answer": "0.5", "solution": r"It is $\boxed{\frac13}$."},
        {"problem": "c", "answer": "t(0,4]"},
        {"problem": "d", "answer": None},
    ]
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (check,) = check_verifier(load_benchmarks(["math500"], tmp_path))
    assert (check.references, check.solutions, len(check.without_reference)) == (3, 2, 1)
    assert check.not_right == []
    assert check.spelling_only == ["math500-00002: t(0,4]"]
    assert check.solutions_not_right == ["math500-00001: 0.5"]
    assert [line[:13] for line in check.shuffled_unverified] == ["math500-00002"]
    # Whether the equal ones meet depends on the shuffle, which is always the same.
    assert all("1/2 and 0.5" in line or "0.5 and 1/2" in line for line in check.shuffled_right)
    assert check.shuffled_right
