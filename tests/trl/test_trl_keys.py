"""The tables of TRL's keys have every key of the real TRL, and its defaults."""

import dataclasses
from typing import Any

import pytest
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from hacrl.config import RunConfig
from hacrl.config.from_trl import translate
from hacrl.config.trl_keys import DEFAULTS, TRL_KEYS

CLASSES = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
REMOVED = {"max_prompt_length", "warmup_ratio"}
"""Keys of earlier versions that files still have."""


def test_the_tables_have_all_keys_of_trl_and_no_others() -> None:
    fields = {field.name for kind in CLASSES for field in dataclasses.fields(kind)}
    assert set(TRL_KEYS) - REMOVED == fields
    assert not REMOVED & fields


def test_defaults_are_those_of_trl() -> None:
    config = GRPOConfig(output_dir="run", use_cpu=True)
    for key, value in DEFAULTS.items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 16, "generation_batch_size": 64},
        {"steps_per_generation": 4, "num_iterations": 2},
    ],
)
def test_batches_are_those_of_trl(options: dict[str, Any]) -> None:
    theirs = GRPOConfig(output_dir="run", use_cpu=True, **options)
    given = {"model_name_or_path": "m", "dataset_name": "org/name", **options}
    ours = RunConfig.from_dict(translate(given).settings)
    assert ours.prompts_per_step * ours.num_generations == theirs.generation_batch_size
    assert ours.rollouts_per_update == theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert ours.updates_per_step(ours.agents[0]) == theirs.steps_per_generation // theirs.gradient_accumulation_steps
