"""The study on long answers: its problems, its files, and what it reads from runs."""

import json
import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import criteria
import measures
import numpy as np
import problems
import pytest
import yaml

from conftest import MakeConfig
from hacrl.config import RunConfig
from hacrl.config.study import StudyConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.run import train
from hacrl.study.grid import Study
from hacrl.tasks import build_task
from hacrl.tasks.verify import exact
from hacrl.training.run_dir import RunDir, read_jsonl

LONG = Path(problems.__file__).parent
WRONG = "No, that is wrong."
EQUATION = re.compile(r"(\d+) ([-+*]) (\d+)(?: \+ (\d+))? = (\d+)")
KINDS = list(problems.KINDS)


def numbers_of(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text)]


def is_right(kind: str, prompt: str, answer: str) -> bool:
    """Whether an answer is right, computed from the text of the problem."""
    numbers = numbers_of(prompt)
    if kind == "countdown":
        a, first, b, second, c = answer.split()
        value = eval(f"({a} {first} {b}) {second} {c}", {})
        return value == numbers[0] and sorted(numbers[1:]) == sorted(map(int, (a, b, c)))
    wanted = {"multiply": [math.prod(numbers)], "add": [sum(numbers)], "sort": sorted(numbers)}
    return answer == " ".join(map(str, wanted[kind]))


def mistakes(lines: list[str]) -> list[int]:
    """The lines with an equation that does not hold."""
    found = []
    for index, line in enumerate(lines):
        if equation := EQUATION.fullmatch(line):
            a, sign, b, carry, result = equation.groups()
            if eval(f"{a} {sign} {b} + {carry or 0}", {}) != int(result):
                found.append(index)
    return found


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_worked_answers_reach_the_right_answer_by_right_steps(kind: str, seed: int) -> None:
    for row in problems.take(40, kind, "warm", "plain", seed):
        *lines, last = row["completion"].split("\n")
        assert is_right(kind, row["prompt"], last.removeprefix("Answer: "))
        assert is_right(kind, row["prompt"], row["answer"].removeprefix("Answer: "))
        assert not mistakes(lines)
        assert WRONG not in lines


@pytest.mark.parametrize("kind", KINDS)
def test_detours_are_noticed_and_the_answer_is_right(kind: str) -> None:
    detours = 0
    for row in problems.take(40, kind, "warm", "detours"):
        *lines, last = row["completion"].split("\n")
        assert is_right(kind, row["prompt"], last.removeprefix("Answer: "))
        noticed = [index for index, line in enumerate(lines) if line == WRONG]
        assert {index - 1 for index in noticed} >= set(mistakes(lines))
        for index in noticed:  # the same step twice, with different results
            before, after = lines[index - 1], lines[index + 1]
            split = " so " if kind == "sort" else " = "
            assert before.split(split)[0] == after.split(split)[0]
            assert before != after
        detours += len(noticed)
    assert detours > 20


@pytest.mark.parametrize("kind", KINDS)
def test_noisy_answers_are_wrong_and_do_not_say_so(kind: str) -> None:
    for row in problems.take(40, kind, "warm", "noisy"):
        *lines, last = row["completion"].split("\n")
        assert not is_right(kind, row["prompt"], last.removeprefix("Answer: "))
        assert is_right(kind, row["prompt"], row["answer"].removeprefix("Answer: "))
        assert WRONG not in lines
        assert kind == "sort" or len(mistakes(lines)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_problem_is_in_two_splits_whatever_the_seed(kind: str) -> None:
    found: dict[str, set[str]] = {}
    for split in problems.SPLITS:
        for seed, style in ((0, "plain"), (1, "plain"), (0, "noisy")):
            for row in problems.take(60, kind, split, style, seed):
                numbers = numbers_of(row["prompt"])
                target = numbers[:1] if kind == "countdown" else []
                found.setdefault(split, set()).add(str((target, sorted(numbers[len(target) :]))))
    for one, other in combinations(found.values(), 2):
        assert not one & other


@pytest.mark.parametrize("kind", KINDS)
def test_rows_depend_on_the_seed_alone_and_are_all_different(kind: str) -> None:
    rows = problems.take(50, kind, "train", seed=3)
    assert rows == problems.take(50, kind, "train", seed=3)
    assert rows != problems.take(50, kind, "train", seed=4)
    assert len({row["prompt"] for row in rows}) == 50
    assert "completion" not in rows[0]


@pytest.mark.parametrize("style", problems.STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_length_that_the_study_asks_for(kind: str, style: str) -> None:
    lengths = [len(problems.TOKEN.findall(row["completion"])) for row in problems.take(40, kind, "warm", style)]
    assert all(150 <= length < 600 for length in lengths)
    assert max(lengths) > 1.3 * min(lengths)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("25 - 7 = 18\nAnswer: 25 - 7 * 3", 1.0),
        ("Answer: 25 - 7 * 3\n", 1.0),
        ("Answer: 25 - 7 * 3\nThat is it.", 0.0),
        ("25 - 7 * 3", 0.0),
        ("Answer: 7 - 25 * 3", 0.0),
        ("Answer: 25 - 7 + 3", 0.0),
        ("Answer: 27 * 2 + 0", 0.0),
        ("Answer: 25 - 7 * 3 + 0", 0.0),
        ("Answer: ٢٥ - 7 * 3", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_is_verified_strictly(answer: str, reward: float) -> None:
    assert problems.left_to_right(["?"], [answer], [[25, 7, 3]], [54]) == [reward]


@pytest.mark.parametrize("kind", ["multiply", "add", "sort"])
@pytest.mark.parametrize("style", problems.STYLES)
def test_the_last_line_decides(kind: str, style: str) -> None:
    rows = problems.take(10, kind, "warm", style)
    rewards = exact([row["completion"] for row in rows], [row["answer"] for row in rows])
    assert rewards == [float(style != "noisy")] * 10


def test_a_run_reads_the_files_and_verifies_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(LONG.parents[1])
    problems.write(Path("runs/long/data"), seed=0, scale=0.002)
    settings = yaml.safe_load((LONG / "base.yaml").read_text(encoding="utf-8"))
    config = RunConfig.from_dict({**settings, "agents": [{"id": "a", "model": "zoo:llama-plus"}]})
    task, _ = build_task(config.task, 0)
    with task.verifier:
        held_out = task.eval_problems
        assert {problem.part for problem in held_out} == set(KINDS)
        for texts, reward in (([p.answer for p in held_out], 1.0), (["Answer: 1"] * len(held_out), 0.0)):
            assert [verdict.reward for verdict in task.score(held_out, texts)] == [reward] * len(held_out)


# --- the YAML files --------------------------------------------------------------------------------


def agents_in(place: Any) -> set[str]:
    """The last part of every model's path, anywhere in a YAML file."""
    if isinstance(place, dict):
        own = {Path(place["model"]).name} if "model" in place else set()
        return own.union(*map(agents_in, place.values()))
    return set().union(*map(agents_in, place)) if isinstance(place, list) else set()


def test_warm_ups_are_valid_and_read_files_that_are_written() -> None:
    written = {f"runs/long/data/{name}.jsonl" for name, *_ in problems.files()}
    seeds = []
    for path in sorted((LONG / "warm").glob("*.yaml")):
        config = WarmupConfig.load(path)
        (agent,) = config.agents
        assert agent.id == path.stem
        assert config.output_dir == f"runs/long/warm/{agent.id}"
        assert agent.target_accuracy is not None
        assert 0.2 <= agent.target_accuracy <= 0.6
        assert config.task is not None
        read = {data.file for data in agent.data} | {
            file for part in config.task.mixture for file in (part.train, part.eval)
        }
        assert read <= written
        assert not any("-test" in str(file) for file in read)
        seeds.append(config.seed)
    assert len(set(seeds)) == len(seeds) == 7


@pytest.mark.parametrize("name", ["overlap", "gspo", "search", "part2"])
def test_studies_are_valid_and_use_agents_that_are_warmed_up(name: str) -> None:
    path = LONG / f"{name}.yaml"
    study = Study.build(StudyConfig.load(path))
    assert study.runs
    made = {warm.stem for warm in (LONG / "warm").glob("*.yaml")}
    used = {Path(str(agent.model)).name for run in study.runs for agent in run.config.agents}
    assert used <= made
    evals = {str(part.eval) for run in study.runs for part in run.config.task.mixture}
    assert all(file.endswith("-test.jsonl" if name == "part2" else "-validation.jsonl") for file in evals)


def test_teams_are_of_agents_that_are_warmed_up() -> None:
    made = {warm.stem for warm in (LONG / "warm").glob("*.yaml")}
    teams = [agents_in(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in (LONG / "teams").glob("*.yaml")]
    assert len(teams) >= 3
    assert set().union(*teams) <= made


# --- criteria and measures, on runs of the zoo -----------------------------------------------------


@pytest.fixture
def still_run(make_config: MakeConfig) -> RunDir:
    config = make_config(trace=True, learning_rate=0.0, eval_samples=1, max_steps=2)
    return RunDir(train(config).run_dir)


def test_agents_and_overlap_are_read_from_a_run_that_does_not_learn(still_run: RunDir) -> None:
    rows = criteria.agents([still_run])
    lines = [line for step in (1, 2) for line in read_jsonl(still_run.step_file("rollouts", step))]
    own = [line for line in lines if line["source"] == "agent0"]
    start = still_run.metrics()[0]
    assert rows["agent0"]["answers"] == len(own) == 32
    assert rows["agent0"]["greedy"] == f"{100 * start['agent0/eval_accuracy']:.1f}"
    assert rows["agent0"]["sampled"] == f"{100 * start['agent0/eval_sampled']:.1f}"
    ended = [line["num_tokens"] for line in own if line["finish_reason"] == "stop"]
    assert rows["agent0"]["tokens"] == f"{np.mean(ended):.0f}"
    assert "length" in rows["agent0"]["missed"]

    sources = {(line["step"], line["source"], line["prompt_id"], line["index"]): line for line in lines}
    found = criteria.ratios([still_run])
    assert found.keys() == {("agent0", "agent1"), ("agent1", "agent0")}
    for (learner, source), s in found.items():
        expected = []
        for step in (1, 2):
            for use in read_jsonl(still_run.step_file("trace", step)):
                if (use["learner"], use["source"]) == (learner, source):
                    made = sources[step, source, use["prompt_id"], use["index"]]
                    gap = use["logp_sum"] / use["num_tokens"] - made["logp_sum"] / made["num_tokens"]
                    expected.append(math.exp(gap))
        assert len(s) == 32
        assert s == pytest.approx(expected, rel=1e-4)


def test_only_agents_that_do_not_learn_count_for_the_overlap(make_config: MakeConfig) -> None:
    run = RunDir(train(make_config(trace=True)).run_dir)
    assert criteria.ratios([run]) == {}
    assert criteria.agents([run])["agent0"]["answers"] == 16  # the first step's


@pytest.mark.parametrize(
    ("s", "kind", "missed"),
    [(0.99, "too close", "overlap"), (0.9, "close", "-"), (0.8, "between", "overlap"), (0.5, "far", "-")],
)
def test_teams_are_judged_by_their_mean_s(s: float, kind: str, missed: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("agents: [{id: a, model: m}, {id: b, model: n}]", encoding="utf-8")
    rows = criteria.teams({("a", "b"): [s - 0.01], ("b", "a"): [s + 0.01], ("a", "c"): [0.9]}, tmp_path)
    assert rows == {
        "mine": {"agents": "a, b", "mean s": f"{s:.3f}", "least": f"{s - 0.01:.3f}", "kind": kind, "missed": missed}
    }


def test_gains_are_read_from_a_run_of_gspo(make_config: MakeConfig) -> None:
    config = make_config("llama-plus", algorithm={"name": "gspo"}, max_steps=8, eval_every=4)
    run = RunDir(train(config).run_dir)
    ((name, row),) = criteria.gains([run]).items()
    lines = run.metrics()
    greedy = [lines[step]["agent0/eval_accuracy"] for step in (0, 4, 8)]
    assert name == "run: agent0"
    assert row["greedy"] == " ".join(f"{100 * value:.1f}" for value in greedy)
    assert row["gain"] == f"{100 * (greedy[-1] - greedy[0]):+.1f}"
    assert "steps" in row["missed"]
    assert ("gain" in row["missed"]) == (greedy[-1] - greedy[0] < 0.1)


def test_the_slope_is_that_of_least_squares() -> None:
    assert criteria.slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx((2.0, 0.0))
    y = np.random.default_rng(0).normal(size=20)
    (rise, _), covariance = np.polyfit(range(20), y, 1, cov=True)
    assert criteria.slope(y.tolist()) == pytest.approx((rise, math.sqrt(covariance[0, 0])))


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a run nor a study"):
        criteria.runs_in(tmp_path)


def test_pass_at_k_and_costs_are_read_from_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=2, eval_every=1, output_dir=str(tmp_path / "runs/team/hacpo/seed-0"))
    run = train(config).run_dir
    told = {"team": "team", "variant": "hacpo", "dir": "runs/team/hacpo/seed-0", "status": "done", "gpu_seconds": 12.0}
    (tmp_path / "study.json").write_text(json.dumps({"runs": [{**told, "seed": 0}]}), encoding="utf-8")
    rows = dict(measures.diversity(run, k=4, count=10, start=True))
    assert list(rows) == [f"team/hacpo/seed-0: agent{k}, {when}" for k in (0, 1) for when in ("start", "end")]
    for row in rows.values():
        assert row["avg@4"] == row["pass@1"]
        assert float(row["pass@1"]) <= float(row["pass@2"]) <= float(row["pass@4"])
        assert float(row["entropy"]) > 0

    points = dict(measures.curve(run))
    lines = RunDir(run).metrics()
    assert list(points) == [f"team/hacpo/seed-0, {step}" for step in (0, 1, 2)]
    assert [row["rollouts"] for row in points.values()] == ["0", "32", "64"]
    for row, line in zip(points.values(), lines, strict=True):
        mean = (line["agent0/eval_accuracy"] + line["agent1/eval_accuracy"]) / 2
        assert row["accuracy"] == f"{100 * mean:.1f}"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    *_, last = points.values()
    assert last["trained"] == f"{summary['tokens_trained']:,}"
    assert last["tokens sampled"] == f"{summary['tokens']:,}"
    assert last["GPU-seconds"] == "12"


def test_distinct_right_answers_are_counted_by_problem() -> None:
    texts = ["a", "a", "b", "x", "c", "d", "e", "e"]
    correct = np.array([[1, 1, 1, 0], [1, np.nan, 0, 0]])
    assert measures.distinct(texts, correct) == pytest.approx(2 / 3)  # the second problem has one right answer only
    assert math.isnan(measures.distinct(texts[:4], np.zeros((1, 4))))
