"""A study's YAML becomes the runs it stands for, or is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl.config import RunConfig
from hacrl.config.study import StudyConfig, study_names
from hacrl.errors import UserError
from hacrl.study.grid import Run, Study

BASE: dict[str, Any] = {
    "agents": [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-minus", "num_generations": 6}],
    "task": {"name": "arithmetic", "eval_size": 20},
    "prompts_per_step": 8,
    "rollouts_per_update": 32,
    "num_generations": 4,
    "max_steps": 5,
    "save_every": 2,
}


def build(**changes: Any) -> Study:
    data = {"name": "s", "base": BASE, "algorithms": ["gspo", "hacpo"], "seeds": 2, **changes}
    return Study.build(StudyConfig.from_dict(data))


def only(study: Study, pair: str, variant: str) -> RunConfig:
    return study.groups[pair, variant][0].config


def names(runs: list[Run]) -> list[str]:
    return [run.name for run in runs]


def test_the_grid_is_complete_and_ordered_by_seed() -> None:
    study = build(teams={"one": {}, "two": {"learning_rate": 0.5}}, options={"plain": {}, "hot": {"temperature": 2.0}})
    variants = ["gspo", "gspo+hot", "hacpo", "hacpo+hot"]
    assert study.variants == variants
    cells = [f"{pair}/{variant}" for pair in ("one", "two") for variant in variants]
    assert names(study.runs) == [f"{cell}/seed-{seed}" for seed in (0, 1) for cell in cells]
    assert only(study, "two", "gspo+hot").agents[0].temperature == 2.0
    assert only(study, "two", "hacpo").agents[1].learning_rate == 0.5
    assert only(study, "one", "hacpo").temperature == 1.0
    assert study.runs[-1].config.seed == 1
    assert study.runs[-1].config.output_dir == "runs/study-s/runs/two/hacpo+hot/seed-1"


def test_x2_doubles_everybodys_rollouts_and_so_the_updates() -> None:
    study = build(algorithms=["gspo", "gspo_x2", "hacpo", "hacpo_x3"])
    plain, doubled = study.groups["main", "gspo"][0], study.groups["main", "gspo_x2"][0]
    assert [agent.num_generations for agent in plain.config.agents] == [4, 6]
    assert [agent.num_generations for agent in doubled.config.agents] == [8, 12]
    assert doubled.config.algorithm.name == "gspo"
    assert plain.updates == {"a": 5 * 1, "b": 5 * 2}  # 8 prompts x 4 / 32, and x 6: 1.5, rounded
    assert doubled.updates == {"a": 5 * 2, "b": 5 * 3}
    assert plain.rollouts_used == {"a": 160, "b": 240}
    together = study.groups["main", "hacpo"][0]
    assert together.rollouts_used == {"a": 400, "b": 400}
    assert [agent.num_generations for agent in only(study, "main", "hacpo_x3").agents] == [12, 18]


def test_x2_of_the_default_number_of_completions() -> None:
    base = {key: value for key, value in BASE.items() if key != "num_generations"}
    study = build(base={**base, "agents": BASE["agents"][:1]}, algorithms=["gspo_x2"])
    assert only(study, "main", "gspo_x2").agents[0].num_generations == 16


def test_what_is_over_what() -> None:
    study = build(
        base={**BASE, "algorithm": {"name": "hacpo", "alpha": 3.0}, "temperature": 0.5},
        teams={"p": {"task": {"max_operators": 2}}},
        settings={"temperature": 0.6, "top_k": 3},
        algorithms={"gspo": None, "hacpo": {"top_k": 4}, "mine": {"algorithm": {"name": "hacpo", "delta": 0.3}}},
        options={"o": {"agents.b.learning_rate": 0.25}},
    )
    mine = only(study, "p", "mine+o")
    assert (mine.task.min_operators, mine.task.max_operators, mine.task.eval_size) == (2, 2, 20)
    assert (mine.temperature, mine.top_k, mine.agents[1].learning_rate) == (0.6, 3, 0.25)
    options = mine.model_dump()["algorithm"]
    assert (options["alpha"], options["delta"]) == (3.0, 0.3)
    assert only(study, "p", "hacpo+o").top_k == 4
    assert only(study, "p", "hacpo+o").model_dump()["algorithm"]["alpha"] == 3.0
    assert only(study, "p", "gspo+o").algorithm == RunConfig.load("state", ["algorithm.name=gspo"]).algorithm


def test_settings_of_the_algorithm_hold_for_each_of_them() -> None:
    study = build(
        base="demo",
        settings={"algorithm": {"beta": 0.04}},
        algorithms={
            "gspo": None,
            "hacpo": None,
            "hacpo_robust": {"algorithm.beta": 0.1},
            "gspo_x2": None,
            "mine": {"algorithm": {"name": "naive"}},
            "short": {"algorithm": "grpo"},
            "as-base": {"top_k": 3},
        },
        options={"plain": {}, "high": {"algorithm.beta": 0.2}},
    )
    section = {variant: only(study, "main", variant).model_dump()["algorithm"] for variant in study.variants}
    assert {variant: options["beta"] for variant, options in section.items() if "+" not in variant} == {
        "gspo": 0.04,
        "hacpo": 0.04,
        "hacpo_robust": 0.1,
        "gspo_x2": 0.04,
        "mine": 0.04,
        "short": 0.04,
        "as-base": 0.04,
    }
    assert {options["beta"] for variant, options in section.items() if "+" in variant} == {0.2}
    names = {variant: options["name"] for variant, options in section.items()}
    assert (names["mine"], names["short"], names["as-base"]) == ("naive", "grpo", "hacpo_robust")


def test_an_option_with_another_algorithm_starts_from_what_holds_for_all() -> None:
    study = build(
        settings={"algorithm.beta": 0.04},
        algorithms={"mine": {"algorithm": {"name": "hacpo", "beta": 0.1}}},
        options={"same": {"algorithm": {"name": "hacpo", "alpha": 3.0}}, "other": {"algorithm.name": "gspo"}},
    )
    same, other = (only(study, "main", f"mine+{option}").model_dump()["algorithm"] for option in ("same", "other"))
    assert (same["name"], same["alpha"], same["beta"]) == ("hacpo", 3.0, 0.1)
    assert (other["name"], other["beta"]) == ("gspo", 0.04)


def test_settings_of_an_agent_hold_in_the_teams_that_have_it() -> None:
    trio = {"agents": [{"id": name, "model": "zoo:llama-plus"} for name in ("a", "c", "c.1")]}
    study = build(
        teams={"two": {}, "three": trio},
        settings={"agents.c.temperature": 0.7},
        algorithms={"gspo": {"agents": {"c": {"learning_rate": 0.5}, "a": {"learning_rate": 0.25}}}},
        options={"hot": {"agents.c.1.temperature": 2.0}},
    )
    two = only(study, "two", "gspo+hot").agents
    assert [(agent.id, agent.learning_rate) for agent in two] == [("a", 0.25), ("b", 1e-6)]
    three = only(study, "three", "gspo+hot").agents
    assert [agent.learning_rate for agent in three] == [0.25, 0.5, 1e-6]
    assert [agent.temperature for agent in three] == [1.0, 0.7, 2.0]
    with pytest.raises(UserError, match=r"agents.d.temperature: there is no item 'd'"):
        build(teams={"two": {}, "three": trio}, settings={"agents.d.temperature": 0.7})


def test_checkpoints_are_kept_only_if_the_study_asks() -> None:
    assert only(build(), "main", "gspo").save_every == 0
    assert only(build(settings={"save_every": 3}), "main", "gspo").save_every == 3


def test_presets_and_files_beside_the_study(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(BASE))
    study = {"name": "s", "base": "mine.yaml", "teams": {"own": {}, "zoo": "size"}, "algorithms": ["gspo"]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study))
    runs = Study.build(StudyConfig.load(tmp_path / "s.yaml", ["seeds=[7]", "settings.max_steps=3"])).runs
    assert names(runs) == ["own/gspo/seed-7", "zoo/gspo/seed-7"]
    assert [[agent.id for agent in run.config.agents] for run in runs] == [["a", "b"], ["llama-small", "llama-large"]]
    assert [run.config.max_steps for run in runs] == [3, 3]


def test_the_written_study_stands_alone(tmp_path: Path) -> None:
    config = StudyConfig.from_dict(
        {"name": "s", "teams": ["state"], "algorithms": ["gspo"], "output_dir": str(tmp_path)}
    )
    (tmp_path / "study.yaml").write_text(config.to_yaml())
    assert Study.build(StudyConfig.load(tmp_path)).runs == Study.build(config).runs


def test_teams_may_still_be_called_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = {"name": "s", "pairs": ["state"], "algorithms": ["gspo"], "output_dir": str(tmp_path)}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study))
    config = StudyConfig.load(tmp_path / "s.yaml")
    assert list(config.teams) == ["state"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 's.yaml'}: `pairs` is now called `teams`. It is still read; please rename it."
    ]
    assert "pairs" not in config.to_yaml()
    caplog.clear()
    assert list(StudyConfig.load("quick", ["pairs=[size, gap]"]).teams) == ["size", "gap"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["pairs=[size, gap]"]
    caplog.clear()
    (tmp_path / "study.yaml").write_text(config.to_yaml().replace("teams:", "pairs:"))  # of an earlier version
    assert StudyConfig.load(tmp_path) == config
    assert not caplog.records
    with pytest.raises(UserError, match="both are there"):
        StudyConfig.from_dict({**study, "teams": ["size"]})


@pytest.mark.parametrize("name", study_names())
def test_bundled_studies_are_possible_and_small(name: str) -> None:
    study = Study.build(StudyConfig.load(name))
    assert study.config.name == name
    assert all(run.config.max_steps <= 40 for run in study.runs)
    alone, together = study.groups["state", "gspo"][0], study.groups["state", "hacpo_robust"][0]
    assert alone.config.rollouts_per_step == together.config.rollouts_per_step


def test_the_zoo_study_has_what_it_promises() -> None:
    study = Study.build(StudyConfig.load("zoo"))
    assert study.teams == ["state", "size", "model", "gap"]
    assert {"gspo", "gspo_x2", "naive", "hacpo"} <= set(study.variants)
    assert study.baseline == "gspo"
    assert len(study.config.seeds) >= 3
    assert study.groups["gap", "gspo_x2"][0].updates == study.groups["gap", "hacpo"][0].updates


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"algoritms": []}, ("algoritms", "did you mean algorithms?")),
        ({"max_steps": 3}, ("settings.max_steps",)),
        ({"algorithms": ["gspoo"]}, ("gspoo", "did you mean gspo?")),
        ({"algorithms": []}, ("algorithms",)),
        ({"algorithms": ["gspo", "gspo"]}, ("algorithms", "twice")),
        ({"algorithms": {"gspo": {"algorithm.name": "hacpo"}}}, ("gspo", "hacpo", "label")),
        ({"algorithms": {"gspo": {"algorithm.alpha": 3}}}, ("main/gspo", "alpha")),
        ({"settings": {"algorithm.nonsense": 3}}, ("main/gspo", "gspo has no option 'nonsense'")),
        ({"settings": {"algorithm.alpha": 3}, "algorithms": ["hacpo", "gspo"]}, ("main/gspo", "'alpha'")),
        ({"settings": {"algorithm": {"name": "gspo"}}}, ("settings.algorithm.name", "algorithms: [gspo]")),
        ({"settings": {"algorithm": "gspo"}}, ("settings.algorithm:", "algorithms: [gspo]")),
        ({"algorithms": {"no-clip_x2": {"algorithm.name": "hacpo"}}}, ("'no-clip'", "_x2", "another label")),
        ({"algorithms": {"../x": {"max_steps": 3}}}, ("algorithms", "../x")),
        ({"teams": {"all": {}}}, ("teams", "all", "another name")),
        ({"options": {"a": {}, "b": {}}}, ("options", "one")),
        ({"options": {"a": {"seed": 3}}}, ("options.a.seed",)),
        ({"settings": {"output_dir": "x"}}, ("settings.output_dir",)),
        ({"settings": {"max_step": 3}}, ("max_step", "did you mean max_steps?")),
        ({"settings": {"task": {"eval_size": 0}}}, ("task.eval_size",)),
        ({"teams": {"p": "staet"}}, ("staet",)),
        ({"teams": ["state", "state"]}, ("state", "twice")),
        ({"teams": 3}, ("teams",)),
        ({"seeds": 0}, ("seeds",)),
        ({"seeds": [1, 1]}, ("seeds",)),
        ({"seeds": True}, ("seeds", "number")),
        ({"baseline": "hacpoo"}, ("baseline", "did you mean hacpo?")),
        ({"interval": "normal"}, ("interval",)),
        ({"metric": "final_sampled"}, ("final_sampled", "settings.eval_samples")),
        ({"name": "a/b"}, ("name",)),
        ({"base": {**BASE, "agents": [{"id": "all", "model": "zoo:llama-plus"}]}}, ("all",)),
        ({"base": {**BASE, "task": {"train": "x.jsonl", "reward": "exact"}}}, ("task.eval",)),
        ({"base": {}}, ("agents",)),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        build(**changes)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_a_study_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"quik is neither a bundled study, .* of a study; did you mean quick\?"):
        StudyConfig.load("quik")
    with pytest.raises(UserError, match=r"missing\.yaml is neither .* of a study; choose from quick, zoo"):
        StudyConfig.load("missing.yaml")


def yaml_of(page: str) -> str:
    """The only YAML on a page of the project."""
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    (block,) = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    return block


@pytest.mark.parametrize("run", ["the README's", "of the zoo", "on files"])
def test_the_yaml_of_the_docs_is_a_study(tmp_path: Path, run: str) -> None:
    files = {**BASE, "task": {"train": "a.jsonl", "eval": "b.jsonl", "reward": "exact"}}
    runs = {"the README's": yaml_of("README.md"), "of the zoo": yaml.safe_dump(BASE), "on files": yaml.safe_dump(files)}
    (tmp_path / "my.yaml").write_text(runs[run])
    (tmp_path / "study.yaml").write_text(yaml_of("docs/studies.md"))
    study = Study.build(StudyConfig.load(tmp_path / "study.yaml"))
    assert len(study.runs) == 2 * 4 * 2 * 5
    assert only(study, "large", "no-clip+hot").model_dump()["algorithm"]["cross_clip"] is False


def test_a_bundled_name_is_not_a_folder_that_happens_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quick").mkdir()
    Path("quick/study.yaml").write_text(StudyConfig.load("zoo").to_yaml())
    assert StudyConfig.load("quick").folder == Path("runs/study-quick")
    mine = StudyConfig.load("./quick")
    assert (mine.name, mine.folder) == ("zoo", Path("quick"))


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_studies_behind_the_published_results_are_valid(file: Path) -> None:
    study = Study.build(StudyConfig.load(str(file)))
    assert len(study.config.seeds) >= 3
    if "validation" in study.config.title:
        assert all(run.config.task.eval_split == "validation" for run in study.runs)
    else:
        assert all(run.config.task.eval_split == "test" for run in study.runs)
