"""The JSON schema accepts every file that hacrl accepts here, refuses mistakes, and describes every key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from conftest import MakeConfig
from hacrl.algorithms import ALGORITHMS
from hacrl.config.reference import tables
from hacrl.config.schema import json_schema
from hacrl.config.settings import PRESETS
from hacrl.config.starting import starting_settings
from hacrl.config.strict_yaml import load_yaml
from hacrl.config.study import STUDIES

ROOT = Path(__file__).parents[2]
FOLDERS = (PRESETS, STUDIES, ROOT / "src/hacrl/agents/zoo", *(ROOT / name for name in ("docs", "examples", "tests")))
FILES = sorted(
    path
    for folder in FOLDERS
    for path in folder.rglob("*.yaml")
    if path.name != "base.yaml" and path.parent.name != "teams"
)
"""All but the settings that only studies complete."""
SCHEMA = json_schema()
PAIR = [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-minus"}]
RUN: dict[str, Any] = {"agents": PAIR, "task": {"name": "arithmetic"}}
WARMUP: dict[str, Any] = {"agents": PAIR, "data": "rows.jsonl"}
STUDY: dict[str, Any] = {"name": "s", "base": "demo", "algorithms": ["gspo"]}


def mistakes(data: Any) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(data)]


def test_the_schema_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_is_valid(path: Path) -> None:
    assert mistakes(load_yaml(path.read_bytes(), str(path))) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_configs_of_runs_are_valid(name: str, make_config: MakeConfig) -> None:
    resolved = make_config(algorithm={"name": name}).to_dict()
    assert mistakes(resolved) == []
    resolved["algorithm"]["extra"] = 1
    assert mistakes(resolved)


@pytest.mark.parametrize(
    "data",
    [
        starting_settings(["zoo:llama-plus"], "train.jsonl", None, "runs/x"),
        {**RUN, "algorithm": {"name": "my.py:Mine", "anything": 3}},
        {**RUN, "algorithm": {"alpha": 3, "name": "hacpo", "scale_rewards": False}},
        {**RUN, "algorithm": {"cross_weight": 2}},
        {**RUN, "task": {"train": "a.jsonl", "reward": ["math", {"name": "my.py:short", "weight": 0.2}]}},
        {**RUN, "report_to": "wandb", "lora": {"r": 8}},
        {**WARMUP, "data": ["a.jsonl", {"task": {"name": "arithmetic"}, "weight": 2}]},
        {"agents": [{**PAIR[0], "data": {"file": "a.jsonl"}}]},
        {**STUDY, "seeds": 5, "teams": {"small": None, "large": "large.yaml", "other": {"max_steps": 3}}},
        {**STUDY, "algorithms": {"gspo": None, "mine": {"algorithm.name": "my.py:Mine"}}, "options": ["plain"]},
    ],
)
def test_short_forms_are_valid(data: dict[str, Any]) -> None:
    assert mistakes(data) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({**RUN, "max_step": 3}, "'max_step' was unexpected"),
        ({**RUN, "max_steps": "many"}, "'many' is not of type 'integer'"),
        ({**RUN, "learning_rate": 11}, "11 is greater than the maximum of 10"),
        ({"agents": PAIR}, "'task' is a required property"),
        ({**RUN, "agents": [{"id": "a"}]}, "'model' is a required property"),
        ({**RUN, "agents": [{**PAIR[0], "max_steps": 3}]}, "'max_steps' was unexpected"),
        ({**RUN, "algorithm": {"name": "gspo", "alpha": 1}}, "'alpha' was unexpected"),
        ({**RUN, "algorithm": {"alpha": 1}}, "'alpha' was unexpected"),
        ({**RUN, "algorithm": {"name": "hacop"}}, "'hacop' is not valid under any of the given schemas"),
        ({**RUN, "algorithm": {"name": "hacpo", "capability": {"windw": 3}}}, "'windw' was unexpected"),
        ({**WARMUP, "num_generations": 3}, "'num_generations' was unexpected"),
        ({**STUDY, "max_steps": 3}, "'max_steps' was unexpected"),
    ],
)
def test_mistakes_are_found(data: dict[str, Any], said: str) -> None:
    assert any(said in message for message in mistakes(data))


def described() -> Iterator[tuple[str, str]]:
    """Each key of the schema with its description, which is that of the section if the key stands for one."""
    for name, section in SCHEMA["$defs"].items():
        for key, value in section["properties"].items():
            meant = SCHEMA["$defs"].get(value.get("$ref", "").rpartition("/")[2], {})
            yield f"{name}.{key}", value.get("description") or meant.get("description", "")


def test_every_key_has_a_description_and_a_line_on_the_page() -> None:
    assert [key for key, text in described() if not text] == ["Algorithm.name"]
    listed = {key.name.split(".")[-1] for table in tables() for key in table.keys}
    # Sections whose keys are listed one by one.
    apart = {"resources", "ray", "capability", "imitation", "budget"}
    assert {key.split(".")[1] for key, _ in described()} - listed - apart == set()
    assert all(len(key.text) > 4 for table in tables() for key in table.keys)
