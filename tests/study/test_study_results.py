"""study.json and the tables, from summaries that are written here."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hacrl.config.study import StudyConfig
from hacrl.errors import UserError
from hacrl.study.grid import Study
from hacrl.study.results import collect, comparison, print_grid, print_results, read_gpu_seconds, write_results

FINAL = {
    # Seed by seed: agents a and b.
    "gspo": [(0.50, 0.60), (0.52, 0.62), (0.54, 0.58)],
    "hacpo": [(0.60, 0.66), (0.58, 0.62), (0.62, 0.70)],
}


def make(folder: Path, seeds: int = 3, **changes: Any) -> Study:
    base = {
        "agents": [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-minus"}],
        "task": {"name": "arithmetic"},
        "max_steps": 4,
    }
    data = {"name": "s", "base": base, "algorithms": ["gspo", "hacpo"], "seeds": seeds, "output_dir": str(folder)}
    return Study.build(StudyConfig.from_dict({**data, **changes}))


def finish(study: Study, **skipped: int) -> None:
    """Summaries of all runs, without the first so many seeds of some variants."""
    for run in study.runs:
        if run.seed >= skipped.get(run.variant, 0):
            run.folder.path.mkdir(parents=True)
            (run.folder.path / "summary.json").write_text(json.dumps(summary(run.variant, run.seed)))


def summary(variant: str, seed: int) -> dict[str, Any]:
    agents = {}
    for agent, final in zip("ab", FINAL[variant][seed], strict=True):
        agents[agent] = {
            "model": "zoo:x",
            "start_accuracy": 0.4,
            "final_accuracy": final,
            "start_sampled": 0.3,
            "final_sampled": final - (0.25 if variant == "hacpo" else 0.1),
            "rollouts": 100,
            "tokens": 1000 + 100 * seed,
            "tokens_trained": 2000,
            "tokens_forward": 0,
            "updates": 8 if variant == "hacpo" else 4,
            "sample_seconds": 2.0,
            "learn_seconds": 3.0,
            "peak_memory_gib": None,
        }
    whole = {
        "rollouts": 200,
        "tokens": 2000 + 200 * seed,
        "tokens_trained": 4000,
        "tokens_forward": 0,
        "updates": 16,
        "seconds": 7.5,
    }
    return {"algorithm": variant, "steps": 4, **whole, "peak_memory_gib": 0.5 + seed, "best_step": 4, "agents": agents}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study whose runs are all done."""
    study = make(tmp_path)
    finish(study)
    return study


def row(rows: list[dict[str, Any]], **fields: str) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    return found


def test_rounding_is_no_win(tmp_path: Path) -> None:
    found = comparison(make(tmp_path), [0.1 + 0.2 - 0.3, 0.3 - 0.2 - 0.1, 0.01])
    assert (found["wins"], found["losses"], found["p"]) == (1, 0, 1.0)


def test_numbers_by_hand(study: Study) -> None:
    found = collect(study, {}, {})
    agent = row(found["agents"], agent="a", variant="gspo")
    assert agent["values"] == {"0": 0.50, "1": 0.52, "2": 0.54}
    assert (agent["start"], agent["mean"]) == pytest.approx((0.4, 0.52))
    half = 4.302653 * 0.02 / 3**0.5  # Student's t for three values
    assert (agent["low"], agent["high"]) == pytest.approx((0.52 - half, 0.52 + half))
    assert agent["accounting"]["tokens"] == 1100
    assert agent["accounting"]["peak_memory_gib"] is None
    whole = row(found["accounting"], variant="hacpo")
    assert whole == {
        "team": "main",
        "variant": "hacpo",
        "rollouts": 200,
        "tokens": 2200,
        "tokens_trained": 4000,
        "tokens_forward": 0,
        "updates": 16,
        "seconds": 7.5,
        "gpu_seconds": None,
        "peak_memory_gib": 1.5,
    }
    a, b, both = (row(found["comparisons"], agent=name) for name in ("a", "b", "all"))
    assert a["difference"] == pytest.approx((0.10 + 0.06 + 0.08) / 3)
    assert (a["wins"], a["losses"], a["p"], a["seeds"]) == (3, 0, 0.25, 3)
    assert a["effect"] == pytest.approx(0.08 / 0.02 * 0.5641896)
    assert (b["wins"], b["losses"]) == (2, 0)
    assert b["p"] == 0.5  # one difference is 0: of its flips, each counts twice
    assert both["difference"] == pytest.approx((a["difference"] + b["difference"]) / 2)
    assert [a["p_holm"], b["p_holm"], both["p_holm"]] == [0.75, 0.75, 0.75]
    assert a["note"] is None
    assert (a["baseline"], a["variant"]) == ("gspo", "hacpo")


def test_the_format_of_study_json(tmp_path: Path) -> None:
    study = make(tmp_path, title="T")
    finish(study, hacpo=2)
    write_results(study, collect(study, {"main/hacpo/seed-0": "running"}, {"main/hacpo/seed-1": "boom"}))
    found = json.loads((tmp_path / "study.json").read_text())
    assert {name: found[name] for name in ("name", "title", "metric", "interval", "baseline")} == {
        "name": "s",
        "title": "T",
        "metric": "final_accuracy",
        "interval": "t",
        "baseline": "gspo",
    }
    assert (found["teams"], found["variants"], found["seeds"]) == (["main"], ["gspo", "hacpo"], [0, 1, 2])
    runs = {(run["variant"], run["seed"]): run for run in found["runs"]}
    assert [runs["hacpo", seed]["status"] for seed in range(3)] == ["running", "failed", "done"]
    assert [runs["hacpo", seed]["error"] for seed in range(3)] == [None, "boom", None]
    assert runs["hacpo", 2]["dir"] == "runs/main/hacpo/seed-2"
    assert runs["hacpo", 2]["summary"] == summary("hacpo", 2)
    assert runs["hacpo", 0]["summary"] is None
    one = row(found["comparisons"], agent="a")
    assert one["note"].startswith("one seed only")
    assert (one["seeds"], one["p"], one["p_holm"], one["low"], one["effect"]) == (1, None, None, None, None)
    assert one["difference"] == pytest.approx(0.08)


def test_gpu_seconds_are_kept_and_shown_where_there_are_any(study: Study) -> None:
    assert "GPU-seconds" not in printed(collect(study, {}, {}))
    write_results(study, collect(study, {}, {}, {"main/hacpo/seed-0": 1200.0, "main/hacpo/seed-2": 1300.0}))
    earlier = read_gpu_seconds(study)
    assert earlier == {"main/hacpo/seed-0": 1200.0, "main/hacpo/seed-2": 1300.0}
    found = collect(study, {}, {}, earlier)
    assert row(found["accounting"], variant="hacpo")["gpu_seconds"] == 1250
    assert row(found["accounting"], variant="gspo")["gpu_seconds"] is None
    assert "GPU-seconds" in printed(found)
    assert "1,250" in printed(found)


OLD = '{"runs": [{"pair": []}]}'
"""With the name that earlier versions had for a team."""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": {}}', '{"runs": [1]}', '{"runs": [{"team": []}]}', OLD])
def test_a_damaged_study_json_is_named(tmp_path: Path, text: str) -> None:
    study = make(tmp_path)
    (study.folder / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"study\.json is .*: `hacrl study` writes it again"):
        read_gpu_seconds(study)


def test_nothing_done_yet(tmp_path: Path) -> None:
    found = collect(make(tmp_path), {}, {})
    assert {run["status"] for run in found["runs"]} == {"waiting"}
    assert {comparison["difference"] for comparison in found["comparisons"]} == {None}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "–" in printed(found)


def test_a_run_that_stopped_early_is_not_done(study: Study) -> None:
    file = study.runs[0].folder.summary_file
    file.write_text(json.dumps({**json.loads(file.read_text()), "steps": 3}))
    assert collect(study, {}, {})["runs"][0]["status"] == "waiting"


def test_two_seeds_are_called_two_seeds(tmp_path: Path) -> None:
    study = make(tmp_path, seeds=2)
    finish(study)
    found = collect(study, {}, {})
    assert row(found["comparisons"], agent="a")["note"].startswith("two seeds only: ")
    assert row(found["comparisons"], agent="a")["p"] == 0.5
    text = printed(found)
    assert "two seeds only" in text
    assert "p cannot be below 0.5" in text


def test_another_baseline_turns_the_signs(tmp_path: Path) -> None:
    study = make(tmp_path)
    finish(study)
    turned = make(tmp_path, baseline="hacpo")
    one, other = (collect(each, {}, {})["comparisons"] for each in (study, turned))
    for name in ("difference", "effect"):
        assert [row[name] for row in one] == pytest.approx([-row[name] for row in other])
    assert [row["p"] for row in one] == [row["p"] for row in other]
    assert [(row["low"], row["high"]) for row in one] == [pytest.approx((-row["high"], -row["low"])) for row in other]


def test_sampled_answers_on_request(tmp_path: Path) -> None:
    study = make(tmp_path, metric="final_sampled", settings={"eval_samples": 4})
    finish(study)
    found = collect(study, {}, {})
    assert found["metric"] == "final_sampled"
    of_a = row(found["agents"], agent="a", variant="hacpo")
    assert (of_a["start"], of_a["mean"]) == (0.3, pytest.approx(0.35))
    assert row(found["comparisons"], agent="a", variant="hacpo", team="main")["difference"] == pytest.approx(-0.07)


def test_bootstrap_intervals_on_request(tmp_path: Path) -> None:
    study = make(tmp_path, interval="bootstrap")
    finish(study)
    agent = row(collect(study, {}, {})["agents"], agent="a", variant="gspo")
    assert 0.50 <= agent["low"] < 0.52 < agent["high"] <= 0.54


def test_over_all_pairs(tmp_path: Path) -> None:
    """The mean over the agents of all teams, of the seeds that are done in all of them."""
    study = make(tmp_path, teams={"one": {}, "two": {}})
    finish(study)
    (study.groups["two", "gspo"][0].folder.path / "summary.json").unlink()
    found = collect(study, {}, {})
    overall = row(found["comparisons"], team="all", agent="all")
    assert overall["seeds"] == 2
    by_seed = [(0.58 + 0.62 - 0.52 - 0.62) / 2, (0.62 + 0.70 - 0.54 - 0.58) / 2]
    assert overall["difference"] == pytest.approx(sum(by_seed) / 2)
    assert "mean over the agents of all teams" in printed(found)


def test_summaries_of_older_runs(study: Study) -> None:
    """Without tokens of the run, time and memory of agents."""
    for run in study.runs:
        old = summary(run.variant, run.seed)
        for name in ("tokens", "tokens_trained", "updates", "peak_memory_gib"):
            del old[name]
        for agent in old["agents"].values():
            for name in ("sample_seconds", "learn_seconds", "peak_memory_gib"):
                del agent[name]
        run.folder.summary_file.write_text(json.dumps(old))
    found = collect(study, {}, {})
    whole = row(found["accounting"], variant="hacpo")
    assert (whole["tokens"], whole["updates"], whole["peak_memory_gib"]) == (2200, 16, None)
    assert row(found["agents"], agent="a", variant="hacpo")["accounting"]["learn_seconds"] is None
    printed(found)


def printed(found: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    print_results(console, found)
    return console.export_text()


def test_the_tables_say_what_was_found_and_what_it_cost(study: Study) -> None:
    text = printed(collect(study, {}, {}))
    assert "0.520 [0.470, 0.570]" in text
    assert "+8.0 [+3.0, +13.0]" in text
    assert "3 of 3" in text
    assert "With 3 seeds p cannot be below 0.25" in text
    (line,) = [line for line in text.splitlines() if "hacpo" in line and "the run" in line]
    assert [cell.strip() for cell in line.split("│")][4:-1] == ["200", "2,200", "4,000", "16", "8", "1.50"]
    assert "tokens forward" not in text


def test_tokens_of_forward_passes_have_a_column_where_they_were_counted(study: Study) -> None:
    for run in study.runs:
        told = summary(run.variant, run.seed)
        told["tokens_forward"] = 500 if run.variant == "hacpo" else 0
        told["agents"]["a"]["tokens_forward"] = told["tokens_forward"]
        run.folder.summary_file.write_text(json.dumps(told))
    text = printed(collect(study, {}, {}))
    _, _, costs = text.partition("What it cost")
    lines = [[cell.strip() for cell in line.split("│")] for line in costs.splitlines() if "hacpo" in line]
    assert [line[7] for line in lines] == ["500", "0", "500"]
    assert "tokens forward" in costs
    assert "rollouts counts as learning" in " ".join(text.split())


def test_the_plan_tells_rollouts_from_updates(tmp_path: Path) -> None:
    study = make(tmp_path, algorithms=["gspo", "gspo_x2"])
    console = Console(width=200, file=io.StringIO(), record=True)
    print_grid(console, study, 2, 1)
    text = console.export_text()
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    first, doubled = (next(line for line in lines if name in line) for name in ("gspo", "gspo_x2"))
    # 4 steps x 32 prompts x 8 completions x 2 agents; 128 in an update.
    assert first[4:-1] == ["3", "0", "2,048", "1,024", "8"]
    assert doubled[4:-1] == ["3", "0", "4,096", "2,048", "16"]
    assert "6 runs, 6 to do; 2 at once" in text


def test_the_plan_marks_hacpo_for_three_agents_as_our_decision(tmp_path: Path) -> None:
    study = make(tmp_path, algorithms=["hacpo", "gspo"], base={}, teams=["team", "state"])
    console = Console(width=200, file=io.StringIO(), record=True)
    print_grid(console, study, 2, 1)
    told = [line for line in console.export_text().splitlines() if "Decision:" in line]
    assert [line.partition(":")[0] for line in told] == ["team, hacpo"]


def test_every_field_of_study_json_is_documented(study: Study) -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    found = collect(study, {}, {})
    lists = {name for name in ("runs", "agents", "accounting", "comparisons") if found[name]}
    fields = set(found) | {field for name in lists for field in found[name][0]}
    documented = page[page.index("| field of study.json") :]
    assert {field for field in fields if f"`{field}`" not in documented} <= {"team", "agent", "variant"}
