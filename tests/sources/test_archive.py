"""Stored rollouts as a source: joined by prompt, judged again, and learned from."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict

from conftest import MakeConfig
from hacrl.config import RunConfig
from hacrl.config.sources import SourceConfig
from hacrl.errors import UserError
from hacrl.rollouts.lines import read_rollouts
from hacrl.run import check_same_run, resumed_config, train
from hacrl.sources.archive import Archive
from hacrl.tasks.problem import Problem
from hacrl.training.run_dir import RunDir
from hacrl.training.trainer import Trainer

PROBLEMS = [Problem(f"p{n}", f"What is {n} + 1?", str(n + 1)) for n in range(4)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def make_archive(tmp_path: Path) -> Callable[..., Archive]:
    def make(rows: list[dict[str, Any]], needs_logps: bool = False, **settings: Any) -> Archive:
        stored = write_rows(tmp_path / "stored.jsonl", rows)
        archive = Archive(SourceConfig(id="past", rollouts=stored, **settings), 1, 0, max_length=16)
        archive.remarks = archive.prepare(PROBLEMS, needs_logps, tmp_path / "run" / "sources")  # type: ignore[attr-defined]
        return archive

    return make


def answers(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": PROBLEMS[0].prompt, "completion": f"answer {n}", **columns} for n in range(count)]


def test_each_stored_answer_is_given_once_before_any_is_given_again(make_archive: Callable[..., Archive]) -> None:
    archive, seen = make_archive(answers(5), num_generations=2), Counter[str]()
    for step in range(1, 6):
        given = archive.give(PROBLEMS, step, 0)
        assert len({rollout.text for rollout in given.rollouts}) == 2
        seen.update(rollout.text for rollout in given.rollouts)
        assert archive.metrics(given.figures)["joined"] == 1 / 4  # the other problems have no answers
        if step < 3:
            assert set(seen.values()) == {1}
    assert seen == {f"answer {n}": 2 for n in range(5)}


def test_a_prompt_is_found_whatever_its_form_and_its_system_message(make_archive: Callable[..., Archive]) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is  2 + 1?\n"}]
    archive = make_archive([{"prompt": chat, "completion": "3"}, {"question": "What is 9 + 1?", "completion": "10"}])
    (rollout,) = archive.give(PROBLEMS, 1, 0).rollouts
    assert (rollout.text, rollout.prompt_id, rollout.prompt_index, rollout.logps) == ("3", "p2", 2, None)


def test_log_probabilities_are_used_where_their_number_of_tokens_is_known(make_archive: Callable[..., Archive]) -> None:
    rows = answers(1, logp_sum=-6.0, num_tokens=4) + answers(1, logp_sum=-6.0)
    archive = make_archive(rows)
    known, unknown = sorted(archive.give(PROBLEMS, 1, 0).rollouts, key=lambda rollout: rollout.logps is None)
    assert (known.logp_sum, known.num_tokens, unknown.logp_sum) == (-6.0, 4, None)
    assert "1 stored rollouts have no log-probabilities" in archive.remarks[1]  # type: ignore[attr-defined]


def test_data_sets_are_read_whatever_their_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parquet file, a folder of save_to_disk, and a data set of the hub with conversations and no rewards."""
    rows = [{"prompt": PROBLEMS[0].prompt, "completion": "1", "reward": 1.0, "logp_sum": -2.0, "num_tokens": 2}]
    turns = [("user", PROBLEMS[0].prompt), ("assistant", "1")]
    conversation = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    DatasetDict(best=Dataset.from_list(rows)).save_to_disk(str(tmp_path / "folder"))
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, split: str) -> Dataset:
        asked.append((name, subset, split))
        return Dataset.from_list(conversation)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    forms = [
        {"rollouts": str(tmp_path / "rows.parquet")},
        {"rollouts": str(tmp_path / "folder"), "split": "best"},
        {"rollouts": "some/teacher-answers", "split": "good", "subset": "small"},
    ]
    found = []
    for form in forms:
        archive = Archive(SourceConfig(id="past", trust_rewards=True, **form), 1, 0, max_length=16)  # type: ignore[arg-type]
        archive.prepare(PROBLEMS, False, tmp_path / "run" / "sources")
        (rollout,) = archive.give(PROBLEMS, 1, 0).rollouts
        found.append((rollout.text, rollout.reward, rollout.logp_sum))
    assert found == [("1", 1.0, -2.0), ("1", 1.0, -2.0), ("1", None, None)]
    assert asked == [("some/teacher-answers", "small", "good")]


@pytest.mark.parametrize(
    "columns",
    [
        {"logp_sum": 5.0, "num_tokens": 4},
        {"logp_sum": -6.0, "num_tokens": 10**12},
        {"logp_sum": -6.0, "num_tokens": 0},
        {"logp_sum": float("nan"), "num_tokens": 4},
        {"logp_sum": "-6", "num_tokens": "4"},
    ],
    ids=str,
)
def test_impossible_numbers_of_a_row_are_not_believed(
    make_archive: Callable[..., Archive], columns: dict[str, Any]
) -> None:
    (rollout,) = make_archive(answers(1, **columns)).give(PROBLEMS, 1, 0).rollouts
    assert rollout.logps is None
    assert 1 <= rollout.num_tokens <= 4


def test_columns_of_a_data_set_are_not_taken_for_those_of_a_run(make_archive: Callable[..., Archive]) -> None:
    rows = answers(1, opened="2024-01-01", lead={"name": "Ada"}, reward=1e300)
    (rollout,) = make_archive(rows, trust_rewards=True).give(PROBLEMS, 1, 0).rollouts
    assert (rollout.opened, rollout.lead, rollout.reward) == ("", "", None)


def test_empty_and_far_too_long_answers_are_left_out_and_counted(make_archive: Callable[..., Archive]) -> None:
    rows = [*answers(2), {"prompt": PROBLEMS[1].prompt, "completion": "x" * (64 * 16 + 1)}]
    archive = make_archive(rows)
    assert "2 stored rollouts of 1 prompts; 1 others" in archive.remarks[0]  # type: ignore[attr-defined]


def test_answers_without_log_probabilities_are_refused_where_they_are_needed(
    make_archive: Callable[..., Archive],
) -> None:
    with pytest.raises(UserError, match=r"sources\.past: the stored rollouts have no log-probabilities, and the algo"):
        make_archive(answers(1), needs_logps=True)


def test_rollouts_of_other_problems_are_an_error(make_archive: Callable[..., Archive]) -> None:
    with pytest.raises(UserError, match=r"none of the 4 problems that were compared is among the 1 prompts"):
        make_archive([{"prompt": "What is 9 + 1?", "completion": "10"}])


# --- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two agents."""
    settings: dict[str, Any] = {
        "agents": [{"id": "small", "model": "zoo:llama-small"}, {"id": "large", "model": "zoo:llama-large"}],
        "task": {"name": "arithmetic", "eval_size": 4},
        "algorithm": {"name": "gspo"},
        "learning_rate": 0.0,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_prompt_length": 32,
        "max_completion_length": 40,
        "max_steps": 4,
        "eval_every": 0,
        "save_final": False,
        "output_dir": str(tmp_path_factory.mktemp("earlier") / "run"),
    }
    return train(RunConfig.from_dict(settings)).run_dir


def with_past(make_config: MakeConfig, earlier: Path, **changes: Any) -> RunConfig:
    source = {"id": "past", "rollouts": str(earlier), "agents": ["large"], "num_generations": 3}
    settings = {"algorithm": {"name": "hacpo_robust"}, "sources": [source], **changes}
    return make_config("llama-plus", **settings)


def test_a_run_learns_from_the_rollouts_of_an_earlier_one(make_config: MakeConfig, earlier: Path) -> None:
    """Its rollouts come with the log-probabilities, and the rewards, that the earlier run has written down."""
    run = RunDir(train(with_past(make_config, earlier, trace=True)).run_dir)
    written = {
        (str(line["prompt"]), line["text"]): line
        for step in range(1, 5)
        for line in read_rollouts(earlier / "rollouts" / f"step-{step:06d}.jsonl")
        if line["source"] == "large"
    }
    for step in (1, 2):
        lines = [line for line in read_rollouts(run.step_file("rollouts", step)) if line["source"] == "past"]
        assert len(lines) == 12
        for line in lines:
            stored = written[str(line["prompt"]), line["text"]]
            assert line["reward"] == stored["reward"]
            assert line["logp_sum"] == pytest.approx(stored["logp_sum"], rel=1e-12)
            assert line["num_tokens"] == stored["num_tokens"]
        metrics = run.metrics()[step]
        assert metrics["past/joined"] == 1
        assert metrics["agent0/from_past/omega"] == 1
        # 4 prompts x (4 own + 3 stored) rollouts are about two updates of 16.
        assert metrics["agent0/updates"] == 2
        used = [line for line in lines if line["learners"]["agent0"].get("ratio") is not None]
        assert used, "nothing stored has taught"
    summary = run.summary()
    assert summary is not None
    assert summary["sources"]["past"]["rollouts"] == 24


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_with_stored_rollouts_is_continued_to_the_bit(
    make_config: MakeConfig, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    settings = {"max_steps": 4, "save_every": 1, "overlap": overlap}
    whole = train(with_past(make_config, earlier, **settings)).run_dir
    cut = with_past(make_config, earlier, **settings, output_dir=str(tmp_path / "cut"))
    plain_step = Trainer.train_step

    def fail_in_step_3(trainer: Trainer) -> dict[str, Any]:
        if trainer.step == 3:
            raise KeyboardInterrupt
        return plain_step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", fail_in_step_3)
        with pytest.raises(KeyboardInterrupt):
            train(cut)
    train(resumed_config(cut.output_dir, []), resume=True)
    found, expected = (
        [{name: value for name, value in line.items() if "time" not in name} for line in RunDir(path).metrics()]
        for path in (Path(cut.output_dir), whole)
    )
    assert found == expected
    for step in range(1, 5):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (Path(cut.output_dir) / name).read_bytes() == (whole / name).read_bytes()


def test_stored_rollouts_that_have_changed_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    problems = RunConfig.from_dict(make_config("llama-plus").to_dict())
    first = train(problems.model_copy(update={"output_dir": str(tmp_path / "first")})).run_dir
    rows = [
        {"prompt": line["prompt"], "completion": line["text"]}
        for line in read_rollouts(first / "rollouts/step-000001.jsonl")
    ]
    source = {"id": "past", "rollouts": write_rows(tmp_path / "stored.jsonl", rows)}
    config = make_config("llama-plus", algorithm={"name": "hacpo_robust"}, sources=[source], save_every=1)
    train(config)
    write_rows(tmp_path / "stored.jsonl", rows[:-1])
    with pytest.raises(UserError, match=r"no longer holds the rollouts that the run was started with"):
        train(resumed_config(config.output_dir, ["max_steps=3"]), resume=True)


@pytest.mark.parametrize("trust", [False, True])
def test_rewards_are_taken_only_from_those_who_are_trusted(
    make_config: MakeConfig, earlier: Path, tmp_path: Path, trust: bool
) -> None:
    lines = read_rollouts(earlier / "rollouts/step-000001.jsonl")
    rows = [{"prompt": line["prompt"], "completion": line["text"], "reward": 0.25} for line in lines]
    source = {"id": "past", "rollouts": write_rows(tmp_path / "stored.jsonl", rows), "trust_rewards": trust}
    run = train(make_config("llama-plus", algorithm={"name": "hacpo_robust"}, sources=[source], max_steps=1)).run_dir
    found = {line["reward"] for line in read_rollouts(run / "rollouts/step-000001.jsonl") if line["source"] == "past"}
    assert found == {0.25} if trust else found <= {0.0, 1.0}


def test_a_trusted_reward_that_the_algorithm_cannot_use_is_one_sentence(
    make_config: MakeConfig, earlier: Path, tmp_path: Path
) -> None:
    lines = read_rollouts(earlier / "rollouts/step-000001.jsonl")
    columns = {"reward": -1.0, "logp_sum": -1.0, "num_tokens": 4}
    rows = [{"prompt": line["prompt"], "completion": line["text"], **columns} for line in lines]
    source = {"id": "past", "rollouts": write_rows(tmp_path / "stored.jsonl", rows), "trust_rewards": True}
    with pytest.raises(UserError, match=r"past.*a reward of -1 is below reward_min .*set algorithm.reward_min"):
        train(make_config("llama-plus", sources=[source], max_steps=1))


def test_hard_prompts_are_those_that_no_agent_solves(make_config: MakeConfig, earlier: Path) -> None:
    source = {"id": "past", "rollouts": str(earlier), "when": "hard", "num_generations": 3}
    config = with_past(make_config, earlier, sources=[source], max_steps=3)
    run = RunDir(train(config).run_dir)
    asked = 0
    for step in range(1, 4):
        lines = read_rollouts(run.step_file("rollouts", step))
        solved = {line["prompt_id"] for line in lines if line["source"] == "agent0" and line["reward"] == 1}
        given = {line["prompt_id"] for line in lines if line["source"] == "past"}
        everything = {line["prompt_id"] for line in lines}
        assert given == everything - solved
        metrics = run.metrics()[step]
        assert metrics["past/prompts"] == len(given)
        # Updates follow what came: 16 rollouts of its own, and three for each hard prompt.
        assert metrics["agent0/updates"] == min(max(round((16 + 3 * len(given)) / 16), 1), 4)
        asked += len(given)
    assert 0 < asked < 12, "the test needs prompts of both kinds"


@pytest.mark.parametrize("name", ["hacpo_robust", "swarm", "success_gated", "luffy"])
def test_without_log_probabilities_s_is_one(make_config: MakeConfig, earlier: Path, tmp_path: Path, name: str) -> None:
    lines = read_rollouts(earlier / "rollouts/step-000001.jsonl")
    rows = [{"prompt": line["prompt"], "completion": line["text"]} for line in lines]
    source = {"id": "past", "rollouts": write_rows(tmp_path / "stored.jsonl", rows), "num_generations": 8}
    config = make_config(
        "llama-plus", algorithm={"name": name}, sources=[source], max_steps=1, num_iterations=2, trace=True
    )
    run = RunDir(train(config).run_dir)
    metrics = run.metrics()[1]
    assert metrics["past/without_logps"] == metrics["past/rollouts"] == 32
    used = [json.loads(text) for text in run.step_file("trace", 1).read_text().splitlines()]
    foreign = [line for line in used if line["source"] == "past"]
    assert {line["log_ratio"] for line in foreign} == {0.0}
    assert len({line["update"] for line in foreign}) > 1, "s stays 1 when the learner has moved"
    assert metrics["agent0/from_past/gradient_mass"] > 0


def test_weight_one_has_the_gradient_of_the_mean_log_probability() -> None:
    """The term of a rollout without log-probabilities against the formula A * grad(logp) / len, written out."""
    from hacrl.algorithms import RobustHACPO
    from hacrl.learners.minibatch import Minibatch

    torch.manual_seed(0)
    logp_NT = (-torch.rand(3, 5, dtype=torch.float64)).requires_grad_()
    length = [5, 3, 2]
    mask_NT = torch.arange(5) < torch.tensor(length)[:, None]
    advantage_N = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    ones_N, nan_N = torch.ones(3, dtype=torch.float64), torch.full((3,), torch.nan, dtype=torch.float64)
    batch = Minibatch(
        prompts=[[1]] * 3, completions=[[1] * n for n in length], prompt_N=torch.zeros(3, dtype=torch.long),
        row_N=torch.arange(3), source_N=torch.ones(3, dtype=torch.long), own_N=torch.zeros(3, dtype=torch.bool),
        advantage_N=advantage_N, omega_N=ones_N, bytes_N=ones_N, teaches_N=torch.ones(3, dtype=torch.bool),
        old_logp_N=nan_N, old_length_N=ones_N * 7, old_logp_NT=torch.full((3, 5), torch.nan, dtype=torch.float64),
        recorded_NT=torch.zeros(3, 5), ahead_NT=None, token_advantage_NT=None, mean_weight_N=ones_N,
        length_factor_N=ones_N,
    )  # fmt: skip
    terms = RobustHACPO().terms(batch.sequences(logp_NT, mask_NT), 1)
    terms.objective_N.sum().backward()
    expected = torch.where(mask_NT, (advantage_N / torch.tensor(length))[:, None], 0.0)
    torch.testing.assert_close(logp_NT.grad, expected)
    assert terms.log_ratio_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize("stop", [None, [";"]])
def test_what_a_stop_string_ended_has_no_end_of_turn(tmp_path: Path, stop: list[str] | None) -> None:
    """Neither in the rollouts of a run's agents nor in those of its teacher behind an address."""
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    endpoint = {"url": "http://host/v1", "model": "big", **({"stop": stop} if stop else {})}
    agent = {"id": "small", "model": "zoo:llama-small", **({"stop": stop} if stop else {})}
    config = {"agents": [agent], "sources": [{"id": "teacher", "endpoint": endpoint}]}
    (run / "config.yaml").write_text(json.dumps(config))
    lines = [{"source": name, "prompt": PROBLEMS[0].prompt, "text": name} for name in ("small", "teacher")]
    write_rows(run / "rollouts" / "step-000001.jsonl", lines)
    archive = Archive(SourceConfig(id="past", rollouts=str(run)), 1, 0, max_length=16)
    archive.prepare(PROBLEMS, False, tmp_path / "new" / "sources")
    given = archive.give(PROBLEMS, 1, 0).rollouts
    assert {(rollout.text, rollout.ended) for rollout in given} == {("small", not stop), ("teacher", not stop)}


# --- what is refused -------------------------------------------------------------------------------

STORED = {"id": "past", "rollouts": "somewhere"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sources": [{"id": "past"}]}, "give either endpoint .* or rollouts"),
    ({"sources": [{**STORED, "max_requests": 3}]}, "max_requests is a setting of endpoints: remove it"),
    (
        {"sources": [{"id": "t", "endpoint": {"url": "http://a/v1", "model": "m"}, "trust_rewards": True}]},
        "trust_rewards is",
    ),
    ({"sources": [{**STORED, "id": "agent0"}]}, "need different ids"),
    ({"sources": [STORED], "algorithm": {"name": "gspo"}}, "sources: gspo uses an agent's own rollouts only"),
    ({"sources": [STORED], "algorithm": {"name": "opd"}}, "sources: opd uses an agent's own rollouts only"),
    ({"sources": [STORED], "algorithm": {"name": "ftis"}}, "sources: ftis compares tokens"),
    ({"sources": [{**STORED, "url": 1}]}, "unknown key 'url'"),
    ({"sources": [{"id": "t", "endpoint": {"url": "host:8000", "model": "m"}}]}, "endpoint.url"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(make_config: MakeConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config("llama-plus", **changes)


def test_one_agent_with_a_source_may_sample_once(make_config: MakeConfig) -> None:
    assert make_config("llama-plus", num_generations=1, sources=[STORED]).names == ["agent0", "past"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agents": ["nobody"]}, r"sources\.past\.agents: the run .* has no agent nobody; it has small, large"),
        ({"rollouts": "runs/nothing/here"}, "There is no data set runs/nothing/here for sources.past.rollouts"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    make_config: MakeConfig, earlier: Path, change: dict[str, Any], message: str
) -> None:
    source = {"id": "past", "rollouts": str(earlier), **change}
    with pytest.raises(UserError, match=message):
        train(with_past(make_config, earlier, sources=[source]))


def test_hacpo_uses_stored_log_probabilities_and_leaves_out_rollouts_without(
    make_config: MakeConfig, earlier: Path, tmp_path: Path
) -> None:
    lines = read_rollouts(earlier / "rollouts/step-000001.jsonl")
    rows = [{"prompt": line["prompt"], "completion": line["text"]} for line in lines]
    for row, line in zip(rows[::2], lines[::2], strict=True):
        row |= {"logp_sum": line["logp_sum"], "num_tokens": line["num_tokens"]}  # type: ignore[dict-item]
    source = {"id": "past", "rollouts": write_rows(tmp_path / "stored.jsonl", rows), "num_generations": 8}
    run = RunDir(train(make_config("llama-plus", sources=[source], max_steps=1)).run_dir)
    metrics = run.metrics()[1]
    assert (metrics["past/rollouts"], metrics["past/left_out"], metrics["past/without_logps"]) == (16, 16, 0)
    assert 0 < metrics["agent0/from_past/ratio_mean"] != 1


def test_a_teacher_that_has_moved_may_be_named_anew(make_config: MakeConfig, earlier: Path) -> None:
    teacher = {"id": "a.teacher", "endpoint": {"url": "http://first/v1", "model": "m"}, "budget": {"requests": 1}}
    config = make_config("llama-plus", algorithm={"name": "hacpo_robust"}, sources=[STORED, teacher])
    RunDir.create(config)
    changes = ["sources.a.teacher.endpoint.url=http://second/v1", "sources.a.teacher.budget.requests=9"]
    moved = resumed_config(config.output_dir, changes)
    assert moved.sources[1].endpoint is not None
    assert (moved.sources[1].endpoint.url, moved.sources[1].budget.requests) == ("http://second/v1", 9)
    check_same_run(moved, config)
    with pytest.raises(UserError, match=r"sources\.a\.teacher\.endpoint\.model cannot be changed"):
        resumed_config(config.output_dir, ["sources.a.teacher.endpoint.model=other"])


def test_agents_in_processes_of_ray_learn_the_same(make_config: MakeConfig, earlier: Path, tmp_path: Path) -> None:
    here = train(with_past(make_config, earlier, execution="ray", output_dir=str(tmp_path / "ray"))).run_dir
    there = train(with_past(make_config, earlier, output_dir=str(tmp_path / "local"))).run_dir
    found, expected = (
        [{name: value for name, value in line.items() if "time" not in name} for line in RunDir(path).metrics()]
        for path in (here, there)
    )
    assert found == expected
