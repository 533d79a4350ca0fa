"""Every number of a config has a limit: beyond it there is a sentence, not a traceback or endless work."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from hacrl.algorithms import ALGORITHMS, CapabilityOptions
from hacrl.cli import app
from hacrl.config import RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.config.study import StudyConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.errors import UserError

HUGE = 2**64
AGENT = {"id": "a", "model": "zoo:llama-weak", "lora": {}, "resources": {"sampler": {}}}
PART = {"name": "arithmetic", "reward": [{"name": "exact"}], "curriculum": {"stages": [{}, {}]}}
TASK = {**PART, "mixture": [PART]}
SOURCE = {"id": "s", "endpoint": {"url": "http://host/v1", "model": "m"}, "budget": {}}
RUN = {"agents": [AGENT], "sources": [SOURCE], "lora": {}, "resources": {"sampler": {}}, "ray": {}, "task": TASK}
DATA = [{"file": "x.jsonl", "task": TASK}]
WARMUP = {"agents": [{"id": "a", "model": "m", "lora": {}, "data": DATA}], "lora": {}, "data": DATA, "task": TASK}
STUDY = {"name": "s", "algorithms": ["gspo"], "base": {}}
CONFIGS: list[tuple[type[BaseModel], dict[str, Any]]] = [(RunConfig, RUN), (WarmupConfig, WARMUP), (StudyConfig, STUDY)]


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def whole_numbers(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Place and value, HUGE or a list of it, of every whole number in a tree of settings."""
    for name, field in model.model_fields.items():
        kinds = list(parts(field.annotation))
        listed = any(get_origin(kind) is list for kind in kinds)
        for section in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            yield from whole_numbers(section, f"{prefix}{name}.0." if listed else f"{prefix}{name}.")
        if int in kinds:
            yield f"{prefix}{name}", [HUGE] if listed else HUGE


NUMBERS = [(config, data, *place) for config, data in CONFIGS for place in whole_numbers(config)]


def refusal(config: Any, data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config.from_dict(apply_overrides(data, overrides))
    return str(caught.value)


def test_the_walk_finds_the_numbers() -> None:
    found = {(config.__name__, place) for config, _, place, _ in NUMBERS}
    assert len(found) > 100
    assert {
        ("RunConfig", "max_completion_length"),
        ("RunConfig", "agents.0.resources.sampler.num_cpus"),
        ("RunConfig", "task.mixture.0.curriculum.window"),
        ("WarmupConfig", "agents.0.drop_layers"),
        ("WarmupConfig", "agents.0.data.0.task.eval_size"),
        ("StudyConfig", "seeds"),
        ("StudyConfig", "jobs"),
    } <= found


@pytest.mark.parametrize("config", [config for config, _ in CONFIGS])
def test_every_whole_number_has_a_limit(config: type[BaseModel]) -> None:
    for _, data, place, value in (row for row in NUMBERS if row[0] is config):
        message = refusal(config, data, f"{place}={value}")
        (line,) = (line for line in message.splitlines() if str(HUGE) in line)
        assert place in line
        assert "must be at most" in line or "less than" in line


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_number_of_an_algorithm_has_a_limit(name: str) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(ALGORITHMS[name]) if field.type in (int, float)}
    assert "beta" in fields
    for option in fields:
        for value in (HUGE, 1e300):
            assert option in refusal(RunConfig, RUN, f"algorithm.name={name}", f"algorithm.{option}={value}")


def test_the_window_of_the_capability_has_a_limit() -> None:
    assert [field.name for field in dataclasses.fields(CapabilityOptions) if field.type is int] == ["window"]
    message = refusal(RunConfig, RUN, "algorithm.name=hacpo", f"algorithm.capability.window={HUGE}")
    assert f"algorithm: capability: window must be at most 1,000,000, not {HUGE}" in message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("max_completion_length=1048577", "max_completion_length: must be at most 1,048,576 (got 1048577)"),
        ("temperature=1.0e+300", "temperature: must be at most 1,000 (got 1e+300)"),
        ("learning_rate=1.0e+30", "learning_rate: must be at most 10 (got 1e+30)"),
        ("weight_decay=1.0e+30", "weight_decay: must be at most 1,000"),
        ("lora.alpha=1.0e+30", "lora.alpha: must be at most 1,000,000"),
        ("task.reward_timeout=1.0e+30", "task.reward_timeout: must be at most 31,536,000"),
        ("task.reward_call_timeout=1.0e+30", "task.reward_call_timeout: must be at most 31,536,000"),
        ("ray.placement_timeout=1.0e+30", "ray.placement_timeout: must be at most 31,536,000"),
        ("task.mixture.0.weight=1.0e+300", "task.mixture.0.weight: must be at most 1,000,000"),
        ("task.reward.0.weight=1.0e+300", "task.reward.0.weight: must be at most 1,000,000"),
        ("device=cuda:99999999999999999999", "device"),
        ("ray.address=host:99999999999", "ray.address"),
        (f"chat_template_kwargs.a.b={HUGE}", "chat_template_kwargs: a.b must lie between -2**63 and 2**63 - 1"),
        ("vllm.x=.nan", "vllm: x must be finite, but is nan"),
        ("chat_template_kwargs.day=2026-01-01", "chat_template_kwargs: day is a date; write it in quotes"),
        ("chat_template_kwargs.a={1: 2}", "chat_template_kwargs: a.1: a key must be a text"),
    ],
)
def test_other_numbers_that_make_no_sense(override: str, sentence: str) -> None:
    assert sentence in refusal(RunConfig, RUN, override)


def test_a_tree_too_large_to_be_meant() -> None:
    plain = {"id": "a", "model": "zoo:llama-weak"}
    run = {"agents": [plain], "task": {"name": "arithmetic"}}
    large = refusal(RunConfig, run, "prompts_per_step=1000000", "num_generations=65536")
    assert "must be at most 10,000,000 rollouts a step, but is 65,536,000,000" in large
    assert "at most 256" in refusal(RunConfig, {**run, "agents": [{**plain, "id": f"a{n}"} for n in range(300)]})
    parts = [{"name": "arithmetic", "id": f"p{n}"} for n in range(300)]
    assert "at most 100" in refusal(RunConfig, {"agents": [plain], "task": {"mixture": parts}})
    assert "seeds: must be at most 10,000" in refusal(StudyConfig, STUDY, f"seeds={HUGE}")
    many = {f"o{n}": {"temperature": 1 + n / 1000} for n in range(100)}
    assert "must be at most 10,000 runs, but is 100,000" in refusal(
        StudyConfig, {**STUDY, "options": many}, "seeds=1000"
    )
    mistakes = refusal(RunConfig, {**run, **{f"key{n}": 1 for n in range(500)}}).splitlines()
    assert len(mistakes) == 21
    assert mistakes[-1] == "and 480 more mistakes"
    random = {"id": "a", "init": "random", "tokenizer": "zoo:llama-weak", "data": "x.jsonl"}
    for option, limit in (("hidden_size", "10,000,000"), ("num_hidden_layers", "1,000")):
        agent = {**random, "config": {"model_type": "llama", option: 10**9}}
        assert f"config.{option} must be at most {limit}, but is" in refusal(WarmupConfig, {"agents": [agent]})


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "--k", str(HUGE)),
        ("eval", "--problems", str(HUGE)),
        ("eval", "--max-completion-length", str(HUGE)),
        ("eval", "--batch-size", str(HUGE)),
        ("eval", "--seed", str(HUGE)),
        ("eval", "--temperature", "1e300"),
        ("eval", "--temperature", "nan"),
        ("study", "--jobs", str(HUGE)),
        ("report", "--max-mb", "nan"),
    ],
)
def test_numbers_of_the_command_line_have_limits(arguments: tuple[str, ...]) -> None:
    command, option, value = arguments
    result = CliRunner().invoke(app, [command, "x", option, value])
    assert result.exit_code == 2
    assert option in result.output
    assert isinstance(result.exception, SystemExit)
