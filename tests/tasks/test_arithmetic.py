import re

import pytest
from transformers import AutoTokenizer

from hacrl.agents.loading import ZOO
from hacrl.errors import UserError
from hacrl.tasks.arithmetic import ArithmeticTask, arithmetic_reward, split_of, verify, worked_answer
from hacrl.tasks.problem import Problem


def test_worked_answer():
    problem = Problem(id="", prompt="47+38-19=", answer="66")
    assert worked_answer(problem) == "47+38=85;85-19=66;#66"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("47+38=85;85-19=66;#66", 1.0),
        ("nonsense#66", 1.0),
        ("#1;#66", 1.0),
        ("66", 0.0),
        ("", 0.0),
        ("#", 0.0),
        ("#66;", 0.0),
        ("#66 ", 0.0),
        ("#066", 0.0),
        ("#66#", 0.0),
        ("#66#67", 0.0),
    ],
)
def test_verify(text: str, reward: float):
    assert verify(text, "66") == reward


def test_reward_reads_the_answer_column():
    assert arithmetic_reward(["1+1=", "1+2="], ["#2", "#2"], answer=["2", "3"], num_operators=[1, 1]) == [1.0, 0.0]


def test_problems_are_right_and_within_bounds():
    problems = ArithmeticTask(seed=3).train(0, 2000)
    for problem in problems:
        answer = worked_answer(problem)
        assert verify(answer, problem.answer) == 1.0
        assert eval(str(problem.prompt).rstrip("=")) == int(problem.answer)
        assert all(0 <= int(number) <= 99 for number in re.findall(r"\d+", answer))
        assert problem.columns["answer"] == problem.answer
        assert problem.columns["num_operators"] == len(re.findall(r"[+-]", str(problem.prompt)))
        assert problem.columns["num_minus"] == str(problem.prompt).count("-")
    assert {problem.columns["num_operators"] for problem in problems} == {2, 3}


def test_options_bound_the_problems():
    task = ArithmeticTask(min_operators=3, max_operators=3, max_operand=9, max_total=199)
    for problem in task.train(0, 500):
        first, *operands = re.findall(r"\d+", str(problem.prompt))
        assert int(first) <= 199
        assert len(operands) == 3
        assert all(1 <= int(operand) <= 9 for operand in operands)


def test_minus_share_is_what_a_chain_leans_to():
    def share(minus_share: float) -> float:
        problems = ArithmeticTask(minus_share=minus_share).train(0, 2000)
        return sum(p.columns["num_minus"] for p in problems) / sum(p.columns["num_operators"] for p in problems)

    assert share(0.1) < 0.35
    assert 0.47 < share(0.5) < 0.53
    assert share(0.9) > 0.65


def test_train_is_a_function_of_seed_and_position():
    task = ArithmeticTask(seed=1)
    assert task.train(128, 64) == ArithmeticTask(seed=1).train(128, 64)
    assert task.train(0, 20)[10:] == task.train(10, 10)
    assert task.train(0, 20) != ArithmeticTask(seed=2).train(0, 20)


def test_no_problem_repeats_within_a_call():
    small = ArithmeticTask(min_operators=1, max_operators=2, max_operand=9, max_total=9)
    assert len({problem.id for problem in small.train(0, 300)}) == 300


def test_too_few_problems_is_an_error():
    with pytest.raises(UserError, match="no 1000 different"):
        ArithmeticTask(min_operators=1, max_operators=1, max_operand=3, max_total=5).train(0, 1000)


def test_splits_do_not_overlap():
    task = ArithmeticTask()
    splits = {"train": task.train(0, 5000)} | {name: task.heldout(name, 1000) for name in ("validation", "test")}
    for name, problems in splits.items():
        assert {split_of(problem.id) for problem in problems} == {name}


def test_heldout_does_not_depend_on_the_seed_and_grows_from_its_start():
    assert ArithmeticTask(seed=1).heldout("test", 50) == ArithmeticTask(seed=2).heldout("test", 50)
    assert ArithmeticTask().heldout("test", 50) == ArithmeticTask().heldout("test", 80)[:50]


def test_the_test_set_stays_what_it_is():
    """Published results refer to this very set."""
    assert [problem.id for problem in ArithmeticTask().heldout("test", 3)] == [
        "50+30+5=",
        "43-6-13=",
        "23+24+34+14=",
    ]


@pytest.mark.parametrize(
    "options",
    [{"min_operators": 0}, {"min_operators": 5}, {"max_operand": 0}, {"max_total": 1}, {"minus_share": 1.5}],
)
def test_impossible_options_are_errors(options: dict):
    with pytest.raises(UserError):
        ArithmeticTask(**options)


def test_unknown_split_is_an_error():
    with pytest.raises(UserError):
        ArithmeticTask().heldout("train", 1)


@pytest.mark.parametrize("name", ["llama-plus", "neox-pair", "qwen3-bpe"])
def test_tokenizers_give_every_text_back(name: str):
    tokenizer = AutoTokenizer.from_pretrained(ZOO / name)
    problems = ArithmeticTask(seed=5).train(0, 300)
    texts = [str(problem.prompt) for problem in problems] + [worked_answer(problem) for problem in problems]
    ids = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(ids) == texts
    assert not {index for row in ids for index in row} & set(tokenizer.all_special_ids)


def test_chat_template_is_bos_and_content():
    rendered = AutoTokenizer.from_pretrained(ZOO / "llama-plus").apply_chat_template(
        [{"role": "user", "content": "1+2="}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<s>1+2="
