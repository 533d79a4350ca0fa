import json
import sys
from collections import Counter
from decimal import Decimal
from itertools import chain

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.errors import UserError
from hacrl.tasks.benchmarks import load_benchmarks
from hacrl.tasks.dataset import Epochs, load_examples, load_problems, overlap
from hacrl.tasks.problem import Problem

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def load(source, split="train", subset=None):
    return load_problems(str(source), split=split, subset=subset, name="train")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("column", ["prompt", "problem", "question"])
def test_prompt_columns(tmp_path, column):
    [problem] = load(write(tmp_path / "a.jsonl", {column: "1+1?", "answer": "2"}))
    assert problem.prompt == "1+1?"


@pytest.mark.parametrize(
    "columns",
    [
        {"answer": "2"},
        {"solution": "2"},
        {"ground_truth": "2"},
        {"reward_model": {"style": "rule", "ground_truth": "2"}},
        {"reward_model": '{"ground_truth": 2}'},
        {"answer": None, "solution": "", "ground_truth": 2},
        {"answer": "1+1 is <<1+1=2>>2.\n#### 2"},
        {"answer": "2", "reward_model": "Skywork-RM"},
        {"answer": "work it out ####", "solution": "#### 2"},
        {"answer": 2.0},
    ],
)
def test_answer_columns(tmp_path, columns):
    [problem] = load(write(tmp_path / "a.jsonl", {"prompt": "1+1?", **columns}))
    assert problem.answer == "2"
    assert problem.columns == {"prompt": "1+1?", **columns, "answer": "2"}


@pytest.mark.parametrize(
    ("answer", "text"), [(0, "0"), (-3.0, "-3"), (0.1, "0.1"), (12345678901234567890, "12345678901234567890")]
)
def test_numbers_are_written_exactly(tmp_path, answer, text):
    [problem] = load(write(tmp_path / "a.jsonl", {"prompt": "?", "answer": answer}))
    assert problem.answer == text


def test_ids_are_unique(tmp_path):
    rows = [{"prompt": "?", "answer": "1", **extra} for extra in ({}, {"id": 7}, {"id": "7"}, {"id": "000000"})]
    problems = load(write(tmp_path / "a.jsonl", *rows))
    assert [problem.id for problem in problems] == [
        "train-000000",
        "train-7",
        "train-7-000002",
        "train-000000-000003",
    ]


def test_json_array_blank_lines_and_line_separators_in_text(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]))
    assert [problem.prompt for problem in load(tmp_path / "a.json")] == ["a", "b"]
    (tmp_path / "bom.json").write_text('\ufeff [{"prompt": "a", "answer": 1}]', encoding="utf-8")
    assert [problem.prompt for problem in load(tmp_path / "bom.json")] == ["a"]
    (tmp_path / "b.jsonl").write_text('\ufeff{"prompt": "a\u2028b", "answer": 1}\r\n\n', encoding="utf-8")
    assert [problem.prompt for problem in load(tmp_path / "b.jsonl")] == ["a\u2028b"]


def test_parquet(tmp_path):
    rows = [{"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "price": Decimal("1.50"), "tags": ["a"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    [problem] = load(tmp_path / "a.parquet")
    assert problem.prompt == CHAT
    assert problem.columns == {**rows[0], "answer": "2"}


def test_saved_datasets(tmp_path):
    data = datasets.Dataset.from_list([{"question": "1+1?", "answer": 2.0}])
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    assert load(tmp_path / "one")[0].answer == "2"
    assert load(tmp_path / "splits", split="test")[0].answer == "2"
    with pytest.raises(UserError, match="no split 'dev': it has train, test"):
        load(tmp_path / "splits", split="dev")


def test_examples_of_a_split(tmp_path):
    splits = {name: datasets.Dataset.from_list([{"prompt": name, "completion": "1"}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert [example.prompt for example in load_examples(str(tmp_path / "splits"))] == ["train"]
    assert [example.prompt for example in load_examples(str(tmp_path / "splits"), split="test")] == ["test"]


def test_what_the_hub_is_asked_for(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options))
        return datasets.Dataset.from_list([{"question": "1+1?", "answer": "#### 2", "prompt": "a", "completion": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("openai/gsm8k", split="test", subset="main")[0].answer == "2"
    assert load_examples("org/worked", split="dev", subset="small")[0].completion == "b"
    load_benchmarks(["gsm8k", "math500"], None)
    assert asked == [
        ("openai/gsm8k", "main", {"split": "test"}),
        ("org/worked", "small", {"split": "dev"}),
        ("openai/gsm8k", "main", {"split": "test"}),
        ("HuggingFaceH4/MATH-500", None, {"split": "test"}),
    ]


def test_hub_id_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"There is no file no-org/no-data, .* split 'train' and subset 'main'"):
        load("no-org/no-data", subset="main")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path / "a.parquet", "org/name"):
        with pytest.raises(UserError, match=r"pip install 'hacrl\[data\]'"):
            load(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": \n', "line 2 is not valid JSON"),
        ("[1, 2", "is not valid JSON"),
        ('"text"\n', "line 1: expected an object with a prompt and an answer, got str"),
        (
            '\n{"text": "a", "answer": 1}\n',
            "line 2 has no prompt: it has the columns text, answer. Put the prompt in one of prompt, problem, question",
        ),
        (
            '{"prompt": "a", "label": 1, "answer": " "}\n',
            "line 1 has no answer: it has the columns prompt, label, answer. "
            "Put the answer in one of answer, solution, ground_truth, reward_model.ground_truth",
        ),
        ('{"prompt": "a", "answer": NaN}', "line 1 has no answer"),
        ('{"prompt": "a", "answer": "work it out #### "}', "line 1 has no answer"),
        ('{"prompt": "a", "reward_model": {"ground_truth": "####"}}', "line 1 has no answer"),
        ('{"prompt": "a", "answer": ["1"]}', "line 1: the answer is a list, expected text or a number"),
        ('{"prompt": "a", "reward_model": "rule"}', "line 1, reward_model is not valid JSON"),
        ('\n{"prompt": }', "line 2 is not valid JSON: column 12: Expecting value."),
        ('[{"prompt": "a"},\n {"prompt" 3}]', "is not valid JSON: line 2, column 12: Expecting ':' delimiter."),
        ('{"prompt": "a", "answer": 1, "prompt": "b"}', "line 1, column 30: the key 'prompt' is there twice."),
        ('{"prompt": "a", "x": {"\\u0079": 1, "y": 2}}', "line 1, column 36: the key 'y' is there twice."),
        ('[{"answer": 1,\n"answer": 2}]', ", line 2, column 1: the key 'answer' is there twice."),
        ('{"prompt": "a", "x": ' + "[" * 150 + "]" * 150 + "}", "line 1, column 121: nested deeper than 100 levels."),
        ('{"prompt": ' + "[" * 20_000, "line 1, column 111: nested deeper than 100 levels."),
        ("[" * 20_000, ", column 101: nested deeper than 100 levels."),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "line 1 is not valid JSON: a number has too many digits."),
        ('{"prompt": 3, "answer": 1}', "line 1: prompt is neither text nor a list of chat messages"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "line 1: prompt is neither text nor a list of chat"),
    ],
)
def test_broken_files(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_brackets_in_texts_are_no_nesting(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "[{" * 5000, "answer": "1", "x": [[1]] * 200}))
    assert load(path)[0].prompt == "[{" * 5000


def test_other_sources_that_cannot_be_read(tmp_path):
    write(tmp_path / "train.jsonl", {})
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.parquet").write_text("text")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    for name, message in {
        "trian.jsonl": f"did you mean {tmp_path / 'train.jsonl'}?",
        "nothing.jsonl": "give a file, or org/name for the hub",
        "nothing/like/it.jsonl": "There is no data set",
        "a.csv": r"expected a .jsonl, .json or .parquet file",
        "b.parquet": "not a parquet file",
        "latin.jsonl": "line 1 is not valid JSON",
        "": "name one of the files in it",
    }.items():
        with pytest.raises(UserError) as caught:
            load(tmp_path / name)
        assert message in str(caught.value)
    with pytest.raises(UserError, match=r"There is no data set data/train\.jsonl"):
        load("data/train.jsonl")


def test_overlap_ignores_white_space_and_system_prompts():
    train = [Problem("a", "1+1?", "2"), Problem("b", "2+2?", "4")]
    evaluation = [Problem("c", CHAT, "2"), Problem("d", " 2+2? \n", "4"), Problem("e", "3+3?", "6")]
    assert overlap(train, evaluation) == 2


def problems(count):
    return [Problem(f"p-{index}", f"{index}?", str(index)) for index in range(count)]


@given(size=st.integers(1, 30), position=st.integers(0, 200), data=st.data())
def test_stream_is_a_function_of_position_without_repeats(size, position, data):
    count = data.draw(st.integers(0, size))
    first = Epochs(problems(size), seed=3).take(position, count)
    used = Epochs(problems(size), seed=3)
    used.take(0, size)
    assert used.take(position, count) == first
    assert len({problem.id for problem in first}) == count


def test_stream_epochs_cover_all_problems_in_new_orders():
    stream = Epochs(problems(20), seed=0)
    epochs = [[problem.id for problem in stream.take(20 * epoch, 20)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(problem.id for problem in problems(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [problem.id for problem in Epochs(problems(20), seed=1).take(0, 20)] != epochs[0]
    assert [problem.id for start in (0, 5, 10, 15) for problem in stream.take(start, 5)] == epochs[0]


@pytest.mark.parametrize(("size", "count"), [(10, 8), (10, 3), (11, 10), (7, 7), (100, 32)])
def test_steps_over_the_ends_of_epochs_see_all_problems_equally_often(size, count):
    stream = Epochs(problems(size), seed=0)
    steps = [[problem.id for problem in stream.take(count * step, count)] for step in range(2 * size)]
    assert all(len(set(step)) == count for step in steps)
    assert set(Counter(chain.from_iterable(steps)).values()) == {2 * count}
    # What comes before the first epoch's end, or begins with an epoch, is a shuffle as it is.
    epoch = [problem.id for problem in stream.take(0, size)]
    assert list(chain.from_iterable(steps))[: size - size % count] == epoch[: size - size % count]


def test_stream_of_too_few_problems():
    with pytest.raises(UserError, match="3 problems, fewer than the 4 of one step: set prompts_per_step to 3"):
        Epochs(problems(3), seed=0).take(0, 4)
