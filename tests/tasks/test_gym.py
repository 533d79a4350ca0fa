"""Tasks from the real reasoning-gym: problems by position, splits, and its scorers in child processes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.config import RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.config.task import TaskConfig
from hacrl.errors import UserError
from hacrl.tasks import Task, build_task
from hacrl.tasks.gym import CHUNK, INSTRUCTIONS, GymTask, split_of
from hacrl.tasks.gym_reward import read_answer

EASY = {"min_terms": 2, "max_terms": 2, "max_digits": 2}
VARIED = ["chain_sum", "basic_arithmetic", "spell_backward", "mini_sudoku", "propositional_logic", "gsm_symbolic"]
"""Sums, words, a grid of several lines, a task without an answer of its own, one that prepares its problems."""


@pytest.fixture(scope="module")
def chain_sum() -> Iterator[Task]:
    task, _ = build_task(TaskConfig(name="gym:chain_sum", options=EASY, eval_size=8), seed=0)
    with task.verifier:
        yield task


@pytest.mark.parametrize("generator", VARIED)
def test_problems_depend_on_seed_and_position_alone(generator: str) -> None:
    problems = GymTask(generator, seed=1).train(0, 8)
    later = GymTask(generator, seed=1)
    later.train(400, 3)  # what was asked for before does not matter
    assert [p.prompt for p in later.train(4, 4)] == [p.prompt for p in problems[4:]]
    assert len({problem.id for problem in problems}) == 8
    assert [p.prompt for p in GymTask(generator, seed=2).train(0, 8)] != [p.prompt for p in problems]


def test_problems_do_not_depend_on_the_random_numbers_of_the_process() -> None:
    """Of list_functions, a few questions in a hundred would."""
    drawn = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        drawn.append([problem.prompt for problem in GymTask("list_functions").train(0, 200)])
        assert (random.random(), np.random.random()) == (random.Random(seed).random(), first_of_numpy(seed))
    assert drawn[0] == drawn[1]


def first_of_numpy(seed: int) -> float:
    return float(np.random.RandomState(seed).random())


HASHED = ["codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]
ASK = """
import json
from hacrl.errors import UserError
from hacrl.tasks.gym import GymTask

def answer(generator):
    try:
        return [(problem.prompt, problem.answer) for problem in GymTask(generator).train(0, 2)]
    except UserError as error:
        return str(error)

print(json.dumps({generator: answer(generator) for generator in %r}))
"""


def ask(generators: list[str], hash_seed: str, folder: Path) -> dict[str, object]:
    """In a process of its own; codeio runs programs, which may write files."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", ASK % generators]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True)
    answers: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_generator_that_depends_on_the_hash_seed_needs_one(tmp_path: Path) -> None:
    unset, first, second = (ask([*HASHED, "chain_sum"], seed, tmp_path) for seed in ("random", "0", "0"))
    for generator in HASHED:
        assert unset[generator] == (
            f"The problems of gym:{generator} depend on Python's hash seed, which is another one in every process: "
            "start the command with PYTHONHASHSEED=0 in front of it."
        )
    assert unset["chain_sum"] == first["chain_sum"]
    assert all(isinstance(problems, list) for problems in first.values())
    assert first == second


def test_the_stream_goes_on_over_the_ends_of_the_packages_data_sets() -> None:
    task = GymTask("chain_sum", seed=0)
    around = task.train(CHUNK - 4, 8)
    assert len({problem.id for problem in around}) == 8
    assert around == [*GymTask("chain_sum").train(CHUNK - 4, 4), *GymTask("chain_sum").train(CHUNK, 4)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**62), position=st.integers(0, 10**6), terms=st.integers(2, 4))
def test_what_is_held_out_is_never_trained_on(seed: int, position: int, terms: int) -> None:
    """Whatever the seed, the position and the options."""
    task = GymTask("chain_sum", {"max_terms": terms, "max_digits": 1}, seed)
    assert {split_of(problem.columns["entry"]["question"]) for problem in task.train(position, 20)} == {"train"}


def test_splits_do_not_meet_and_are_the_same_for_every_seed() -> None:
    task, other = (GymTask("chain_sum", EASY, seed) for seed in (0, 1))
    sets = [task.train(0, 300), task.heldout("validation", 60), task.heldout("test", 60)]
    ids = [{problem.id for problem in problems} for problems in sets]
    assert [len(own) for own in ids] == [300, 60, 60]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]
    assert other.heldout("test", 60) == sets[2]
    assert task.heldout("test", 10) == sets[2][:10]


def test_a_generator_with_few_problems_says_so() -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 10 x 10 x 2
    task = GymTask("chain_sum", few)
    heldout = task.heldout("test", 500)
    assert 20 < len(heldout) < 60
    with pytest.raises(UserError, match=r"no 190 different training problems .* lower prompts_per_step"):
        task.train(0, 190)


def test_prompts_ask_for_the_form_that_is_scored() -> None:
    for form, instruction in INSTRUCTIONS.items():
        (problem,) = GymTask("chain_sum", form=form).train(0, 1)  # type: ignore[arg-type]
        assert problem.prompt == f"{problem.columns['entry']['question']}\n{instruction}"
    (bare,) = GymTask("chain_sum", instruction="").train(0, 1)
    assert bare.prompt == bare.columns["entry"]["question"]


@pytest.mark.parametrize(
    ("completion", "form", "answer"),
    [
        ("so <answer> 12 </answer>", "tag", "12"),
        ("<answer>1</answer> no, <answer>2\n3</answer>.", "tag", "2\n3"),
        ("12", "tag", None),
        ("<answer>12", "tag", None),
        ("first\n 12 \n", "last_line", "12"),
        ("12", "last_line", "12"),
        ("", "last_line", ""),
        (" a\nb ", "whole", "a\nb"),
    ],
)
def test_where_the_answer_stands(completion: str, form: str, answer: str | None) -> None:
    assert read_answer(completion, form) == answer


@pytest.mark.parametrize("form", ["tag", "last_line", "whole"])
def test_scores_are_the_packages_own(form: str) -> None:
    from reasoning_gym import create_dataset

    task, _ = build_task(TaskConfig.model_validate({"name": "gym:chain_sum", "answer": form, "eval_size": 6}), seed=0)
    judge = create_dataset("chain_sum", seed=5, size=1)
    with task.verifier:
        problems = task.eval_problems
        answers = [problem.answer for problem in problems[:3]] + ["+0" + problems[3].answer, "about 12", ""]
        wrap = "thus <answer>{}</answer>" if form == "tag" else "thus\n{}" if form == "last_line" else "{}"
        verdicts = task.score(problems, [wrap.format(answer) for answer in answers])
        pairs = zip(answers, problems, strict=True)
        expected = [judge.score_answer(answer, problem.columns["entry"]) for answer, problem in pairs]
        if form == "last_line":  # the empty answer: its last line is the word before
            expected[-1] = judge.score_answer("thus", problems[-1].columns["entry"])
    assert [verdict.reward for verdict in verdicts] == expected
    assert expected[:3] == [1.0, 1.0, 1.0]


def test_no_answer_in_the_right_form_is_0_and_the_answer_itself_is_1(chain_sum: Task) -> None:
    problems = chain_sum.train(0, 4)
    assert [v.reward for v in chain_sum.score(problems, [chain_sum.solution(p) for p in problems])] == [1.0] * 4
    assert [v.reward for v in chain_sum.score(problems, [p.answer for p in problems])] == [0.0] * 4


def test_a_grid_is_scored_as_a_whole() -> None:
    task, _ = build_task(TaskConfig(name="gym:mini_sudoku", eval_size=2), seed=0)
    with task.verifier:
        problems = task.eval_problems
        right = [task.solution(problem) for problem in problems]
        assert all("\n" in text for text in right)
        assert [verdict.reward for verdict in task.score(problems, right)] == [1.0, 1.0]


def test_a_scorer_that_hangs_or_fails_gives_no_reward_at_all() -> None:
    """countdown computes what the model wrote; prime_factorization cannot read words."""
    task = TaskConfig(name="gym:countdown", eval_size=2, reward_timeout=3.0, reward_workers=1)
    countdown, _ = build_task(task, seed=0)
    with countdown.verifier:
        problems = countdown.eval_problems
        hung, right = countdown.score(problems, ["<answer>9**9**9**9</answer>", countdown.solution(problems[1])])
        assert (hung.reward, hung.problem) == (None, "timeout")
        assert right.reward == 1.0
    primes, _ = build_task(TaskConfig(name="gym:prime_factorization", eval_size=1, reward_workers=1), seed=0)
    with primes.verifier:
        (verdict,) = primes.score(primes.eval_problems, ["<answer>two and three</answer>"])
        assert (verdict.reward, verdict.problem) == (None, "error")
        assert "ValueError" in verdict.detail


def test_a_task_without_answers_of_its_own_can_be_trained_but_not_copied() -> None:
    task = GymTask("propositional_logic")
    (problem,) = task.train(0, 1)
    assert problem.answer == ""
    with pytest.raises(UserError, match="no answers of its own"):
        task.solution(problem)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, "reasoning-gym has no 'chain_sun'; did you mean chain_sum?"),
        ("chain_sum", {"max_term": 3}, "gym:chain_sum has no 'max_term'; did you mean max_terms?"),
        ("chain_sum", {"seed": 3}, "seed of gym:chain_sum is set by the run itself"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "makes no problems with the options .*max_terms must be"),
        ("composite", {}, "gym:composite cannot be used: write a mixture"),
    ],
)
def test_mistakes_are_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GymTask(name, options)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("reasoning_gym")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"chain_sum needs the package reasoning-gym: run pip install 'hacrl\[gym\]'"):
        GymTask("chain_sum")


def test_a_part_is_found_by_its_id_on_the_command_line_and_a_config_survives_its_file(tmp_path: Path) -> None:
    curriculum = {"stages": [{"max_terms": 2}, {"max_terms": 3}]}
    parts = [{"name": "arithmetic"}, {"id": "sums", "name": "gym:chain_sum", "curriculum": curriculum}]
    data = {"agents": [{"id": "a", "model": "zoo:llama-weak"}], "task": {"mixture": parts}}
    changes = ["task.mixture.sums.weight=3", "task.mixture.0.minus_share=0.1", "task.mixture.sums.options.max_digits=1"]
    config = RunConfig.from_dict(apply_overrides(data, changes))
    assert [(part.label, part.weight) for part in config.task.mixture] == [("arithmetic", 1.0), ("sums", 3.0)]
    assert config.task.mixture[0].minus_share == 0.1
    assert config.task.mixture[1].options == {"max_digits": 1}
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.load(tmp_path / "run.yaml") == config


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sum"}, "task.name: expected 'arithmetic' or gym:GENERATOR, not 'chain_sum'"),
        ({"name": "arithmetic", "options": {"a": 1}}, "options is for tasks from reasoning-gym"),
        ({"name": "gym:chain_sum", "max_operators": 5}, "max_operators is for the task arithmetic"),
        ({"name": "gym:chain_sum", "max_operators": 1}, "max_operators is for the task arithmetic"),
        ({"train": "a.jsonl", "reward": "exact", "minus_share": 0.1}, "minus_share is for the task arithmetic"),
        ({"train": "a.jsonl", "reward": "exact", "subset": "main"}, "subset is for data sets of the hub"),
        ({"train": "a.parquet", "reward": "exact", "train_split": "dev"}, "train_split is for data sets of the hub"),
        ({"train": "a/b", "eval": "a.json", "reward": "exact", "eval_subset": "b"}, "eval_subset is for data sets"),
        ({"name": "arithmetic", "train_split": "dev"}, "train_split is for data sets of the hub"),
        ({"name": "gym:chain_sum", "reward": "exact"}, "has its own verifier: remove reward"),
        ({"name": "gym:chain_sum", "eval_split": "dev"}, "eval_split of gym:chain_sum is test or validation"),
        ({"name": "gym:chain_sum", "curriculum": {"stages": [{}]}}, "task.curriculum.stages: needs 2 or more"),
        ({"name": "gym:chain_sum", "curriculum": {"stage": []}}, "did you mean stages"),
        ({"mixture": [{"name": "arithmetic"}], "name": "arithmetic"}, "name belongs to a part of the mixture"),
        ({"mixture": [{"name": "arithmetic"}, {"name": "arithmetic"}]}, "an id of its own.*arithmetic, arithmetic"),
        ({"mixture": [{"name": "arithmetic", "wieght": 2}]}, "did you mean weight"),
        ({"mixture": [{"weight": 2}]}, "task.mixture.0: train is missing"),
    ],
)
def test_impossible_tasks_are_refused(task: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig.from_dict({"agents": [{"id": "a", "model": "zoo:llama-weak"}], "task": task})


@pytest.mark.parametrize(
    "task",
    [
        {"name": "arithmetic", "max_operators": 5, "eval_split": "validation"},
        {"train": "org/name", "eval": "a.jsonl", "reward": "exact", "subset": "main", "train_split": "dev"},
        {"train": "saved/folder", "reward": "exact", "train_split": "dev"},
    ],
)
def test_options_where_they_belong(task: dict[str, object]) -> None:
    TaskConfig.model_validate(task)
