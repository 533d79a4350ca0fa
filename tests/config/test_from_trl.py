"""Configs of TRL in our settings. That the tables have all keys of the real TRL is tested in tests/trl."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl import RunConfig, UserError
from hacrl.config.from_trl import translate
from hacrl.config.starting import agents_of, commented_yaml
from hacrl.config.trl_keys import REASONS, RENAMED, SAME, TRL_KEYS

SMALLEST: dict[str, Any] = {"model_name_or_path": "zoo:llama-plus", "dataset_name": "org/name"}


def run_of(given: dict[str, Any], models: tuple[str, ...] = (), **options: Any) -> RunConfig:
    return RunConfig.from_dict(translate({**SMALLEST, **given}, models, **options).settings)


def test_defaults_are_those_of_trl() -> None:
    run = run_of({})
    assert run.algorithm.name == "grpo"
    assert (run.algorithm.loss_type, run.lr_scheduler_type, run.seed) == ("dapo", "linear", 42)
    assert (vars(run.algorithm)["epsilon"], vars(run.algorithm)["epsilon_high"]) == (0.2, 0.2)
    assert (run.num_generations, run.max_completion_length, run.dtype) == (8, 512, "bfloat16")
    assert (run.prompts_per_step, run.rollouts_per_update) == (1, 8)


@pytest.mark.parametrize(
    ("given", "prompts", "rollouts", "steps"),
    [
        ({"max_steps": 30}, 1, 8, 30),
        ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "max_steps": 30}, 8, 64, 30),
        ({"per_device_train_batch_size": 16, "steps_per_generation": 4, "max_steps": 30}, 8, 16, 8),
        ({"per_device_train_batch_size": 16, "generation_batch_size": 64, "max_steps": 32}, 8, 16, 8),
        ({"steps_per_generation": 4, "num_iterations": 2, "max_steps": 32}, 4, 8, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 3}, 4, 32, 3),
        ({"per_device_train_batch_size": 32, "num_train_epochs": 2}, 4, 32, 50),
    ],
)
def test_batches_and_steps(given: dict[str, Any], prompts: int, rollouts: int, steps: int) -> None:
    run = run_of(given, rows=100)
    assert (run.prompts_per_step, run.rollouts_per_update, run.max_steps) == (prompts, rollouts, steps)
    updates = run.updates_per_step(run.agents[0]) * run.num_iterations
    if "max_steps" in given:
        assert abs(steps * updates - given["max_steps"]) < updates


def test_partners_share_rollouts_and_keep_the_number_of_updates() -> None:
    alone, together = run_of({"steps_per_generation": 4}), run_of({"steps_per_generation": 4}, ("zoo:llama-minus",))
    assert together.algorithm.name == "hacpo_robust"
    assert [agent.id for agent in together.agents] == ["llama-plus", "llama-minus"]
    assert together.updates_per_step(together.agents[0]) == alone.updates_per_step(alone.agents[0]) == 4
    assert vars(together.algorithm)["epsilon"] < 0.01
    clip = {"importance_sampling_level": "sequence", "epsilon": 2e-4, "epsilon_high": 5e-4}
    assert vars(run_of(clip, ("zoo:llama-minus",)).algorithm)["epsilon_high"] == 5e-4
    assert run_of(clip).algorithm.name == "gspo"


@pytest.mark.parametrize(
    ("given", "place", "value"),
    [
        ({"learning_rate": "1e-5"}, "learning_rate", 1e-5),
        ({"bf16": False}, "dtype", "float32"),
        ({"fp16": True}, "dtype", "float32"),
        ({"use_cpu": True}, "device", "cpu"),
        ({"optim": "paged_adamw_8bit"}, "optimizer", "adamw_8bit"),
        ({"report_to": "none"}, "report_to", []),
        ({"report_to": ["wandb"]}, "report_to", ["wandb"]),
        ({"save_strategy": "no"}, "save_every", 0),
        ({"save_steps": 0.1, "max_steps": 50}, "save_every", 5),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}, "vllm", {"gpu_memory_utilization": 0.5}),
        ({"dataset_config": "main", "dataset_train_split": "a"}, "task.train_split", "a"),
        ({"eval_strategy": "steps", "eval_steps": 7, "dataset_test_split": "b"}, "task.eval_split", "b"),
        ({"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}, "lora.r", 4),
        ({"scale_rewards": False}, "algorithm.scale_rewards", "none"),
        ({"beta": 0.1}, "algorithm.beta", 0.1),
    ],
)
def test_values(given: dict[str, Any], place: str, value: Any) -> None:
    found: Any = run_of(given)
    for name in place.split("."):
        found = getattr(found, name)
    assert found == value


def test_rewards() -> None:
    given = {
        "reward_funcs": ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment", "my.lib.short"],
        "reward_weights": [1.0, 0.5, 0.3, 0.2],
    }
    found = translate({**SMALLEST, **given})
    rewards = RunConfig.from_dict(found.settings).task.reward
    expected = [("math", 1.0), ("soft_overlong", 0.3), ("my.lib:short", 0.2)]
    assert [(reward.name, reward.weight) for reward in rewards] == expected
    assert "think_format_reward" in found.left_out["reward_funcs"]


@pytest.mark.parametrize("value", [True, 2, "text", [], {}])
def test_every_key_is_taken_over_or_has_a_reason(value: Any) -> None:
    """No key of TRL is silently lost, whatever its value."""
    for key in TRL_KEYS:
        with suppress(UserError):  # a value that TRL would refuse too
            found = translate({**SMALLEST, key: value})
            assert key in found.taken or key in found.left_out, key
    assert len(TRL_KEYS) == len(set(TRL_KEYS)) == len(SAME) + len(RENAMED) + len(REASONS)


def test_our_names_in_the_table_are_settings() -> None:
    run = RunConfig.model_fields
    for key in SAME:
        assert key in run
    for key, (ours, _) in RENAMED.items():
        assert ours.partition(".")[0] in run, key


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_name_or_path": None}, "names no model"),
        ({"dataset_name": None}, "names no data"),
        ({"num_generations": 3}, "does not divide into groups"),
        ({"per_device_train_batch_size": "many"}, "per_device_train_batch_size: expected a number"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected a number of at least 1"),
        ({"reward_funcs": ["accuracy_reward"], "reward_weights": [1, 2]}, "reward_weights"),
        ({"reward_funcs": 3}, "reward_funcs"),
    ],
)
def test_mistakes_are_sentences(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        translate({**SMALLEST, **given})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"num_train_epochs": 1}, "TRL's num_train_epochs is max_steps here: epochs x rows of the data"),
        ({"beta": 0.1}, "TRL's beta is algorithm.beta here"),
        ({"logging_steps": 1}, "TRL's logging_steps has no place here: every step"),
        ({"algorithm": {"importance_sampling_level": "token"}}, "is algorithm.name here: token is grpo"),
        ({"agents": [{"id": "a", "model": "m", "lora_r": 8}]}, "TRL's lora_r is lora.r here"),
    ],
)
def test_a_key_of_trl_in_our_config_says_what_it_is_called(data: dict[str, Any], said: str) -> None:
    whole = {"agents": [{"id": "a", "model": "m"}], "task": {"name": "arithmetic"}, **data}
    with pytest.raises(UserError, match=re.escape(said)):
        RunConfig.from_dict(whole)


def test_ids_are_unique_and_valid() -> None:
    models = ["Qwen/Qwen3-0.6B", "other/qwen3-0.6b", "zoo:llama-plus", str(Path("models") / "Ünsinn !"), "..."]
    ids = [agent["id"] for agent in agents_of(models)]
    assert ids[:3] == ["qwen3-0.6b", "qwen3-0.6b-2", "llama-plus"]
    assert len(set(ids)) == len(ids)
    agents = [{"id": id, "model": "m"} for id in ids]
    RunConfig.from_dict({"agents": agents, "task": {"name": "arithmetic"}})


def test_comments_stay_comments() -> None:
    """A key or a value that contains a line break adds no setting."""
    text = commented_yaml({"seed": 1}, {"seed": "a\nb: 2"}, ["x\ny: 3"], ["z\u2028w: 4\r v: 5", ""])
    assert yaml.safe_load(text) == {"seed": 1}
