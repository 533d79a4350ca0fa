"""What a report says of a run or a study, and that nothing in them can act on the page."""

import base64
import gzip
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_material import FOUR, TWO, write_config, write_lines, write_run, write_study

from conftest import MakeConfig
from hacrl.cli import main
from hacrl.errors import UserError
from hacrl.report import collect
from hacrl.report.page import embedded, write_report
from hacrl.report.rollouts import MAX_TEXT, Chunks, step_data
from hacrl.run import train

OLD = [
    {"step": 0, "a/eval_accuracy": 0.5, "b/eval_accuracy": 0.2},
    {"step": 1, "a/num_rollouts": 8, "b/num_rollouts": 4, "a/num_updates": 2, "step_time": 3.0, "a/time/sample": 1.0,
     "b/time/sample": 0.5, "a/time/learn": 1.0, "b/time/learn": 0.25, "a/reward": 0.25, "a/tokens_trained": 10},
    {"step": 2, "a/num_rollouts": 16, "b/num_rollouts": 8, "a/num_updates": 4, "step_time": 5.0,
     "a/eval_accuracy": 0.75, "a/time/sample": 2.0, "b/time/sample": 1.0, "a/reward": None,
     "a/time/eval": 0.5, "a/tokens_trained": 20},
    {"step": 3, "a/num_rollouts": 24, "b/num_rollouts": 12, "a/num_updates": 6, "step_time": 2.0,
     "a/eval_accuracy": 0.625},
]  # fmt: skip
"""Lines of a run by an earlier version, without much of what is logged today."""


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    write_config(tmp_path / "old", ("a", "b"), steps=5)
    write_lines(tmp_path / "old" / "metrics.jsonl", OLD)
    return tmp_path / "old"


# --- what is collected -----------------------------------------------------------------------------


def test_an_unfinished_run_of_an_earlier_version(old_run: Path) -> None:
    with (old_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a/rew')  # being written at this moment
    data = collect.run_data(old_run)
    assert not data["finished"]
    assert (data["algorithm"], data["shares"], data["max_steps"], data["task"]) == ("hacpo", True, 5, "arithmetic")
    a, b = data["agents"]
    assert (a["start"], a["final"], a["best"], a["best_step"]) == (0.5, 0.625, 0.75, 2)
    assert (b["start"], b["final"], b["updates"], b["peak_memory_gib"]) == (0.2, 0.2, None, None)
    assert (a["rollouts"], a["tokens_trained"], a["sample_seconds"], a["learn_seconds"]) == (24, 30, 3.0, 1.0)
    assert (data["totals"]["steps"], data["totals"]["seconds"], data["totals"]["rollouts"]) == (3, 10.0, 36)
    assert data["series"]["a/reward"] == [0.25, None, None]
    assert "b/reward" not in data["series"]
    assert "a/from_b/ratio_q50" not in data["series"]


def test_an_algorithm_of_another_version_is_not_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    assert collect.run_data(run)["explanation"]["band"] is not None
    config = (run / "config.yaml").read_text()
    for section in ("{name: hacpo, gamma: 3}", "{name: hacpo9}"):
        (run / "config.yaml").write_text(config.replace("algorithm:\n  name: hacpo", f"algorithm: {section}"))
        assert set(collect.run_data(run)["explanation"].values()) == {None}


def test_accuracy_against_rollouts_of_all_agents_updates_and_time(old_run: Path) -> None:
    assert collect.run_data(old_run)["evals"]["a"] == {
        "step": [0, 2, 3],
        "rollouts": [0, 24, 36],
        "updates": [0, 4, 6],
        "seconds": [0, 8, 10],
        "accuracy": [0.5, 0.75, 0.625],
    }


def test_the_summary_counts_where_there_is_one(tmp_path: Path) -> None:
    data = collect.run_data(write_run(tmp_path / "run"))
    assert data["finished"]
    assert [agent["tokens_trained"] for agent in data["agents"]] == [4_242, 4_242]
    assert (data["totals"]["tokens_trained"], data["totals"]["peak_memory_gib"]) == (8_484, 1.25)


def test_a_damaged_line_says_where(old_run: Path) -> None:
    text = (old_run / "metrics.jsonl").read_text()
    (old_run / "metrics.jsonl").write_text(text.replace('{"step": 2', '"step": 2'))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3, is not a line of metrics"):
        collect.run_data(old_run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_named(old_run: Path, name: str) -> None:
    (old_run / name).unlink(missing_ok=True)
    (old_run / name).mkdir()
    with pytest.raises(UserError, match=rf"^{old_run / name} cannot be read: Is a directory\.$"):
        collect.run_data(old_run)


@pytest.mark.parametrize(
    ("step_time", "sampling", "learning", "other"),
    [(3.0, 1.0, 1.5, 0.4), (4.5, 1.8, 2.5, 0.1)],
    ids=["side by side: the slowest", "in turn: the sum"],
)
def test_time_by_phase(step_time: float, sampling: float, learning: float, other: float) -> None:
    line = {"a/time/sample": 1.0, "b/time/sample": 0.8, "a/time/learn": 1.0, "b/time/learn": 1.5, "time/verify": 0.1}
    seconds = collect.phase_seconds(("a", "b"), [{"step": 1, **line, "step_time": step_time}])
    assert seconds["sampling"] == pytest.approx([sampling])
    assert seconds["learning"] == pytest.approx([learning])
    assert seconds["verifying"] == [0.1]
    assert seconds["evaluating"] == [0.0]
    assert seconds["other"] == pytest.approx([other])


def test_time_by_phase_with_a_slow_verifier() -> None:
    line = {"a/time/sample": 0.31, "b/time/sample": 0.32, "a/time/learn": 0.33, "b/time/learn": 0.32}
    steps = [{"step": 1, **line, "time/verify": 1.6, "step_time": 2.29}]
    side_by_side = collect.phase_seconds(("a", "b"), steps)
    assert {phase: round(values[0], 2) for phase, values in side_by_side.items()} == {
        "sampling": 0.32,
        "verifying": 1.6,
        "learning": 0.33,
        "evaluating": 0.0,
        "other": 0.04,
    }
    # Agents in turn that learn while answers are verified.
    in_turn = collect.phase_seconds(("a", "b"), [{**steps[0], "time/verify": 0.3, "step_time": 1.4}], overlap=True)
    assert [round(in_turn[phase][0], 2) for phase in ("sampling", "learning")] == [0.63, 0.65]


@pytest.mark.parametrize(
    ("task", "shown"),
    [
        ({"name": "gym:chain_sum", "mixture": []}, "gym:chain_sum"),
        ({"train": "data/mine.jsonl", "reward": [{"name": "math"}]}, "mine.jsonl, reward math"),
        (
            {"mixture": [{"name": "gym:chain_sum"}, {"name": "arithmetic"}, {"id": "own"}, {"train": "d/mine.jsonl"}]},
            "chain_sum + arithmetic + own + mine",
        ),
        ({"mixture": [{"id": name} for name in "abcdef"]}, "a + b + c + d + 2 more"),
        (None, "unknown task"),
    ],
)
def test_the_task_in_a_few_words(task: Any, shown: str) -> None:
    assert collect.describe_task(task) == shown


def test_lost_rollouts_by_reason() -> None:
    line = {"a/unverified": 5, "a/verifier_errors": 1, "a/verifier_timeouts": 2, "a/dropped": 1, "a/dropped/special": 1,
            "b/from_a/dropped": 4, "b/from_a/dropped/too_long": 3, "b/from_a/dropped/changed": 1}  # fmt: skip
    found = {
        (row["learner"], row["source"], row["reason"]): row["count"]
        for row in collect.lost(("a", "b"), ("a", "b"), [line, line])
    }
    assert found == {
        ("", "a", "the verifier failed"): 2,
        ("", "a", "the verifier took too long"): 4,
        ("", "a", "no verdict"): 4,
        ("a", "a", "special"): 2,
        ("b", "a", "too_long"): 6,
        ("b", "a", "changed"): 2,
    }


def test_gradient_mass_by_source() -> None:
    steps = [{"a/gradient_mass": 1.0, "a/from_b/gradient_mass": 0.5}, {"a/gradient_mass": 2.0}]
    assert collect.mass("a", "a", steps) == 3
    assert collect.mass("a", "b", steps) == 0.5
    assert collect.mass("b", "a", steps) is None


def test_fewer_points_are_means_and_of_counts_the_last() -> None:
    series: dict[str, list[float | None]] = {
        "step": [1, 2, 3, 4, 5], "a/reward": [0.0, 1.0, None, 0.5, 0.25], "a/num_rollouts": [8, 16, 24, 32, 40],
    }  # fmt: skip
    assert collect.thin(series, 3) == {
        "step": [2, 4, 5], "a/reward": [0.5, 0.5, 0.25], "a/num_rollouts": [16, 32, 40],
    }  # fmt: skip
    assert collect.thin(series, 5) == series


@given(st.integers(0, 3_000), st.integers(1, 300))
def test_spread(count: int, limit: int) -> None:
    chosen = collect.spread(count, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, limit)
    if count > limit > 1:
        gaps = [b - a for a, b in pairwise(chosen)]
        assert (chosen[0], chosen[-1]) == (0, count - 1)
        assert max(gaps) - min(gaps) <= 1


def test_curves_of_a_study_over_seeds() -> None:
    def run(accuracies: list[float], status: str = "done") -> dict[str, Any]:
        evals = {"step": [0, 5], "rollouts": [0, 40], "updates": [0, 10], "seconds": [0, 2], "accuracy": accuracies}
        data = {"agents": [{"id": "a"}], "evals": {"a": evals}}
        return {"team": "main", "variant": "gspo", "status": status, "data": data}

    (curve,) = collect.study_curves([run([0.5, 0.6]), run([0.5, 0.9]), run([0.5, 0.1], "failed")])
    assert (curve["team"], curve["variant"], curve["agent"], curve["seeds"]) == ("main", "gspo", "a", 2)
    assert (curve["mean"], curve["low"], curve["high"]) == ([0.5, 0.75], [0.5, 0.6], [0.5, 0.9])
    assert (curve["rollouts"], curve["updates"], curve["seconds"]) == ([0, 40], [0, 10], [0, 2])


def test_a_study_of_an_earlier_version_which_called_teams_pairs(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", teams=("main",), seeds=2, steps=2)
    now, _ = collect.study_data(study)
    text = (study / "study.json").read_text()
    assert text.count('"team"') > 10
    (study / "study.json").write_text(text.replace('"team"', '"pair"').replace('"teams"', '"pairs"'))
    then, _ = collect.study_data(study)
    assert then == now
    assert (now["teams"], {run["team"] for run in now["runs"]}) == (["main"], {"main"})


def test_a_run_outside_of_the_study_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", teams=("main",), seeds=1, steps=1)
    data = json.loads((study / "study.json").read_text())
    data["runs"][0]["dir"] = "../elsewhere"
    (study / "study.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="outside of the study's folder"):
        collect.study_data(study)


# --- rollouts --------------------------------------------------------------------------------------


def test_a_step_of_rollouts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1?"}]
    common = {"prompt": chat, "prompt_id": "p", "finish_reason": "stop", "num_tokens": 4, "logp_sum": -2.0}
    used = {"advantage": 0.5, "ratio": 0.93, "lower": 0.8, "upper": 1.0, "kept": True, "weight": 0.4}
    lines = [
        {**common, "source": "a", "index": 0, "text": "2", "reward": 1.0,
         "learners": {"a": {"advantage": 0.0}, "b": used, "c": {"dropped": "too_long"}}},
        {**common, "source": "b", "index": 0, "text": "x" * (MAX_TEXT + 7), "reward": None,
         "problem": "timeout", "detail": "10 s"},
    ]  # fmt: skip
    write_lines(tmp_path / "step.jsonl", lines)
    data = step_data(tmp_path / "step.jsonl")
    assert data["prompts"] == [["user: 1+1?", 0]]
    assert data["sources"] == ["a", "b"]
    first, second = data["rollouts"]
    uses = {"a": [0, None, None, None, None, None], "b": [0.5, 0.93, 0.8, 1, True, 0.4], "c": "too_long"}
    assert first == [0, 0, 0, "2", 0, 1.0, "stop", 4, -0.5, None, uses]
    assert second == [0, 1, 0, "x" * MAX_TEXT, 7, None, "stop", 4, -0.5, "timeout: 10 s", {}]


def test_chunks_hold_what_is_in_the_files(tmp_path: Path) -> None:
    chunks = Chunks(write_run(tmp_path / "run", steps=2))
    packed = json.loads(gzip.decompress(base64.b64decode(chunks.chunk(2))))
    assert packed == step_data(tmp_path / "run" / "rollouts" / "step-000002.jsonl")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7, 1.0])
def test_as_many_steps_as_fit_evenly_spread(tmp_path: Path, share: float) -> None:
    chunks = Chunks(write_run(tmp_path / "run", steps=20))
    budget = share * sum(len(chunks.chunk(step)) for step in chunks.steps)
    chosen = chunks.within(budget)
    assert sum(len(chunks.chunk(step)) for step in chosen) <= budget
    assert len(chosen) >= int(20 * share * 0.9) - 1
    if len(chosen) > 1:
        assert (chosen[0], chosen[-1]) == (1, 20)


# --- the file --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The scripts of a page, its policy, and every attribute that could load something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self.loads: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attrs = dict(attributes)
        self._script = attrs if tag == "script" else None
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"] or ""
        self.loads += [f"{tag} {name}" for name in attrs if name in ("src", "srcset", "data", "action")]
        self.loads += [
            f"{tag} {attrs['href']}" for name in attrs if name == "href" and not str(attrs[name]).startswith("#")
        ]

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
            self._script = None

    def data(self) -> Any:
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        return json.loads(text)


def test_scripts_run_by_hash_alone_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run")))
    running = [text for attributes, text in page.scripts if "type" not in attributes]
    assert len(running) == 2
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    directives = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"].split() == [f"'sha256-{value}'" for value in hashes]
    assert page.loads == []


HOSTILE = '</script><script>hacked()</script><!-- <script> &amp; "\u2028\u2029 \u202e \x1b[31m'


@given(
    st.recursive(
        st.text() | st.floats(allow_nan=False, allow_infinity=False), lambda inner: st.dictionaries(st.text(), inner)
    )
)
def test_embedded_data_is_data(data: Any) -> None:
    text = embedded({"hostile": HOSTILE, "data": data})
    assert json.loads(text) == {"hostile": HOSTILE, "data": data}
    assert not re.search("[<>&\u2028\u2029]", text)


def test_hostile_names_and_errors_do_not_end_the_data(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", teams=(HOSTILE.replace("/", ""),), seeds=1, steps=1, failed=HOSTILE)
    page = Page(write_report(study))
    assert len([1 for attributes, _ in page.scripts if "type" not in attributes]) == 2
    assert page.data()["study"]["runs"][-1]["error"] == HOSTILE


def test_size(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", FOUR, steps=30, prompts=8)
    whole = write_report(run, tmp_path / "whole.html")
    assert Page(whole).data()["rollouts"] == [{"steps": list(range(1, 31)), "of": 30}]
    limit = whole.stat().st_size / 1e6 - 0.1
    smaller = write_report(run, tmp_path / "smaller.html", max_mb=limit)
    listing = Page(smaller).data()["rollouts"][0]
    assert smaller.stat().st_size <= limit * 1e6
    assert listing["of"] == 30
    assert 2 < len(listing["steps"]) < 30
    assert {1, 30} <= set(listing["steps"])
    with pytest.raises(UserError, match=r"--max-mb 0\.5 is too small: without any rollouts the report has"):
        write_report(run, tmp_path / "none.html", max_mb=0.5)
    assert not (tmp_path / "none.html").exists()


def test_room_is_shared_by_the_runs_of_a_study(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", teams=("main",), seeds=1, steps=12)
    whole = write_report(study).stat().st_size / 1e6
    write_report(study, max_mb=whole - 0.008)
    listing = Page(study / "report.html").data()["rollouts"]
    assert [run["of"] for run in listing] == [12, 12, 12]
    assert all(0 < len(run["steps"]) <= 12 for run in listing)
    assert any(len(run["steps"]) < 12 for run in listing)


def test_only_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    assert write_report(run) == run / "report.html"
    write_report(run)
    (run / "report.html").write_text("my notes")
    with pytest.raises(UserError, match="exists and is not a report of ours"):
        write_report(run)
    assert (run / "report.html").read_text() == "my notes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "empty is neither a run (it has no config.yaml) nor a study (it has no study.json)"),
        (["run", "--output", "nowhere/report.html"], "there is no folder nowhere"),
        (["run", "--output", "empty"], "empty is a folder"),
        (["spoilt"], "study.json is not valid JSON"),
    ],
)
def test_what_cannot_be_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "study.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["hacrl", "report", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match=re.escape("pip install 'hacrl[report]'")):
        write_report(write_run(tmp_path / "run", steps=1))


def test_the_report_of_a_real_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the trainer writes is what the report looks for."""
    run = train(make_config(max_steps=2)).run_dir
    monkeypatch.setattr(sys, "argv", ["hacrl", "report", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "open it in a browser" in capsys.readouterr().out
    data = Page(run / "report.html").data()["run"]
    wanted = {f"agent0/{name}" for name in collect.AGENT_SERIES if name != "grad_cosine"}
    wanted |= {
        f"agent0/from_agent1/{name}"
        for name in ("ratio_q05", "ratio_q50", "ratio_q95", "kept", "omega", "gradient_mass")
    }
    assert wanted <= set(data["series"])
    assert data["series"]["step"] == [1, 2]
    assert data["mass"]["agent0"]["agent1"] is not None
    lines = [line for step in (1, 2) for line in step_data(run / "rollouts" / f"step-{step:06d}.jsonl")["rollouts"]]
    assert len(lines) == 64


def test_two_agents_are_the_material(tmp_path: Path) -> None:
    """The folders made up for these tests have every curve that a report can show."""
    series = collect.run_data(write_run(tmp_path / "run"))["series"]
    north, south = TWO
    assert {f"{north}/{name}" for name in collect.AGENT_SERIES} <= set(series)
    assert {f"{north}/from_{south}/{name}" for name in collect.PAIR_SERIES} <= set(series)
