"""Rows and reward functions that are given from Python: how they are named, and how functions run."""

import datetime
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from hacrl.config.given import GivenReward
from hacrl.config.task import TaskConfig
from hacrl.errors import UserError
from hacrl.tasks import build_task
from hacrl.tasks.verify import Verdict, Verifier

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": "4"}]


def scored(function: Callable[..., Any], *completions: str, **columns: Any) -> list[Verdict]:
    """The verdicts of a function that runs as `hacrl.train` runs it."""
    with Verifier([(GivenReward(function), 1.0)], call_timeout=2.0, memory_gib=0.5) as verifier:
        return verifier.score(["?"] * len(completions), completions, columns)


def rewards(function: Callable[..., Any], *completions: str, **columns: Any) -> list[float | None]:
    return [verdict.reward for verdict in scored(function, *completions, **columns)]


class Counting:
    """A reward function that is an object with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(completions)


def test_functions_of_all_kinds() -> None:
    limit, seen = 2, []

    def closure(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        seen.append(completions)
        return [float(len(text) <= limit and text == right) for text, right in zip(completions, answer, strict=True)]

    def twice(factor: float, completions: list[str], **columns: Any) -> list[float]:
        return [factor * len(text) for text in completions]

    assert rewards(closure, "ab", "abc", answer=["ab", "abc"]) == [1.0, 0.0]
    assert seen == [], "the function ran in this process"
    assert rewards(lambda completions, **columns: [0.5, None], "a", "b") == [0.5, None]
    assert rewards(functools.partial(twice, 2.0), "abc") == [6.0]
    counting = Counting()
    with Verifier([(GivenReward(counting), 1.0)]) as verifier:
        assert [verifier.score(["?"], ["a"], {})[0].reward for _ in range(3)] == [1.0, 2.0, 3.0]
    assert counting.calls == 0


def test_the_child_is_light() -> None:
    def modules(completions: list[str], **columns: Any) -> list[float]:
        return [float(name in sys.modules) for name in completions]

    names = ["hacrl", "torch", "transformers", "numpy", "cloudpickle"]
    assert rewards(modules, *names) == [0.0, 0.0, 0.0, 0.0, 1.0]


class Traced:
    """Writes down which process rebuilds it from a pickle."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float(os.getpid())]


def test_only_the_child_opens_the_pickle(tmp_path: Path) -> None:
    (reward,) = rewards(Traced(tmp_path / "opened"), "a")
    assert (tmp_path / "opened").read_text().split() == [str(int(reward or 0))]
    assert reward != os.getpid()


def test_limits_hold_for_functions() -> None:
    def by_text(completions: list[str], **columns: Any) -> list[float]:
        match completions[0]:
            case "hang":
                subprocess.run(["sleep", "1000"])
            case "exit":
                os._exit(3)
            case "memory":
                block = b"x" * (2 << 30)
                time.sleep(1000)
                return [float(len(block))]
        return [1.0]

    hung = Verdict(None, "timeout", "by_text took longer than 2 s", {"by_text": None})
    assert scored(by_text, "hang") == [hung]
    died = Verdict(None, "error", "by_text ended its process (exit code 3)", {"by_text": None})
    assert scored(by_text, "exit") == [died]
    with pytest.raises(UserError, match=r"Reward function by_text used more than the 0\.5 GiB"):
        scored(by_text, "memory")


def test_a_function_with_a_mistake() -> None:
    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [1 / len(completions[0])]

    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(UserError) as caught:
        scored(fails, "")
    assert str(caught.value) == (
        f"Reward function fails raised ZeroDivisionError: division by zero ({__file__}:{line})."
    )

    async def later(completions: list[str], **columns: Any) -> list[float]:
        return [1.0]

    with pytest.raises(UserError, match="Reward function later is async"):
        scored(later, "a")


def test_a_function_that_cannot_be_pickled() -> None:
    lock = threading.Lock()

    def locked(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [1.0]

    with pytest.raises(UserError, match=r"locked cannot be sent .*'_thread.lock'.*inside the function, or name"):
        scored(locked, "a")
    with pytest.raises(UserError, match=r"Reward function lambda cannot get the columns .*'_thread.lock'"):
        scored(lambda completions, **columns: [1.0], "a", extra=[lock])


def test_a_function_of_a_module_that_the_child_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passing.py").write_text("def one(completions, **columns):\n    return [1.0] * len(completions)\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        from passing import one  # type: ignore[import-not-found]

        assert rewards(one, "a") == [1.0]
    with pytest.raises(UserError, match=r"one cannot be rebuilt .*No module named 'passing'\): define it in the note"):
        rewards(one, "a")


# --- rows ------------------------------------------------------------------------------------------


def test_rows_of_all_kinds_are_the_same_problems(tmp_path: Path) -> None:
    texts = [{**row, "answer": str(row["answer"])} for row in ROWS]
    given = [ROWS, tuple(ROWS), Dataset.from_list(texts)]
    tasks = [TaskConfig(train=rows, eval=rows, reward="exact") for rows in given]
    built = [build_task(config, 0)[0] for config in tasks]
    asked = [[(problem.prompt, problem.answer) for problem in task.eval_problems] for task in built]
    assert asked == [[("1+1=", "2"), ("2+2=", "4")]] * 3
    for task in built:
        task.verifier.close()
    (tmp_path / "rows.json").write_text("[]")
    assert TaskConfig(train=tmp_path / "rows.json", reward="exact").train == str(tmp_path / "rows.json")


def test_the_digest_is_that_of_the_rows() -> None:
    def digest(*rows: dict[str, Any]) -> str:
        return str(TaskConfig(train=list(rows), reward="exact").train)

    first = digest(*ROWS)
    assert first.startswith("given from Python: 2 rows, digest ")
    assert digest(*map(dict, ROWS)) == first
    assert digest(*reversed(ROWS)) != first
    assert digest(*({**row, "more": 1} for row in ROWS)) != first
    assert digest({"answer": 2, "prompt": "1+1="}, ROWS[1]) == first
    days = [{**ROWS[0], "day": datetime.date(2025, 1, day)} for day in (1, 2)]
    assert digest(days[0]) != digest(days[1])
    assert digest({**ROWS[0], "what": Counting()}) == digest({**ROWS[0], "what": Counting()})
    long, other = np.zeros(5_000), np.zeros(5_000)
    other[2_500] = 1  # where numpy prints three dots
    assert digest({**ROWS[0], "what": long}) != digest({**ROWS[0], "what": other})


def test_rewards_of_all_forms() -> None:
    def short(completions: list[str], **columns: Any) -> list[float]:
        return [1.0]

    listed = TaskConfig(train=ROWS, reward=["math", short, (short, 0.5), ("exact", 2), {"name": short, "weight": 3}])
    function = GivenReward(short)
    expected = [("math", 1.0), (function, 1.0), (function, 0.5), ("exact", 2.0), (function, 3.0)]
    assert [(reward.name, reward.weight) for reward in listed.reward] == expected
    weighted = (short, 0.5), (short, np.float32(0.5)), {"name": short, "weight": 0.5}
    for one, weight in ((short, 1.0), *((one, 0.5) for one in weighted)):
        (reward,) = TaskConfig(train=ROWS, reward=one).reward
        assert (reward.name, reward.weight) == (function, weight)
    assert listed.model_dump(mode="json")["reward"][1]["name"] == "given from Python: short"
    with pytest.raises(UserError, match="Two reward functions are called short"):
        build_task(TaskConfig(train=ROWS, reward=[short, short]), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 5}, "expected a file, a hub id, a datasets.Dataset or a list of dicts, not int"),
        ({"train": []}, "there are no rows"),
        ({"train": ["1+1="]}, "row 0 is a str, expected a dict with a prompt and an answer"),
        ({"train": [*ROWS, {1: 2}]}, "row 2 has a column whose name is not a text"),
        ({"train": Dataset.from_list(ROWS[:0])}, "there are no rows"),
        ({"eval": IterableDataset.from_generator(lambda: ROWS)}, r"give Dataset.from_list\(list\(data\)\)"),
        ({"train": {"prompt": ["1"]}}, r"a dict of columns is given as Dataset.from_dict\(data\)"),
        ({"train": iter(ROWS)}, "or a list of dicts, not list_iterator"),
        ({"train": (row for row in ROWS)}, r"rows of a generator are given as a list: list\(rows\)"),
        ({"train": None}, "^train is missing: a file, a hub id or, from Python, rows; or give name: "),
        ({"reward": []}, "reward is missing: exact, math, module:function or, from Python, a function"),
        ({"reward": 3}, r"reward: expected exact, math, module:function, \{name, weight\} or, from Python, .*, not 3"),
        ({"reward": ("exact", "math")}, "a tuple is .reward, weight., and the weight a number; several .* a list"),
        ({"reward": [("exact", True)]}, "a tuple is .reward, weight."),
        ({"reward": [len, 0.5]}, "reward: entry 1: expected exact, .* not 0.5"),
        ({"reward": {"name": "exact", "wieght": 0.5}}, "reward.0.wieght: unknown key 'wieght' .* mean weight"),
    ],
)
def test_what_is_no_task(changes: dict[str, Any], message: str) -> None:
    from hacrl.config import checked

    with pytest.raises(UserError, match=message) as caught:
        checked(TaskConfig, {"train": ROWS, "reward": "exact", **changes})
    assert "\n" not in str(caught.value)


def test_the_json_schema_of_a_task_knows_texts_only() -> None:
    schema = TaskConfig.model_json_schema()
    assert schema["properties"]["train"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert schema["$defs"]["RewardConfig"]["properties"]["name"]["type"] == "string"
    assert not [name for name in schema["$defs"] if name.startswith("Given")]


def test_answers_may_be_numbers_of_numpy() -> None:
    answers = [np.int64(12), np.float32(0.5), np.float64(3.0), np.str_("x")]
    rows = [{"prompt": str(n), "answer": answer, "curve": np.arange(3)} for n, answer in enumerate(answers)]
    task, _ = build_task(TaskConfig(train=rows, reward="exact"), 0)
    assert sorted(problem.answer for problem in task.listed) == ["0.5", "12", "3", "x"]
    with pytest.raises(UserError, match=r"task.train, row 0: the answer is a ndarray, expected text or a number"):
        build_task(TaskConfig(train=[{"prompt": "?", "answer": np.arange(2)}], reward="exact"), 0)


def test_rows_without_a_prompt() -> None:
    config = TaskConfig(train=[{"text": "1+1=", "answer": "2"}], reward="exact")
    with pytest.raises(UserError, match=r"task.train, row 0 has no prompt: it has the columns text, answer. Put the"):
        build_task(config, 0)


def test_rows_in_a_mixture() -> None:
    part = {"train": ROWS, "reward": [len]}
    with pytest.raises(ValueError, match="id is missing: a part whose rows are given from Python needs one"):
        TaskConfig(mixture=[part])
    config = TaskConfig(mixture=[{**part, "id": "own"}, {"name": "arithmetic"}])
    assert config.given() == ["mixture.own.train", "mixture.own.reward"]
    assert config.given(gone=True) == []
    with pytest.raises(UserError, match=r"not hold what was given from Python \(task.mixture.own.train, task.mixture"):
        build_task(TaskConfig(**config.model_dump(mode="json")), 0)
