"""The bundled models are what they are said to be, and the recipe that makes them works."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hacrl.agents.loading import ZOO as MODELS
from hacrl.agents.loading import zoo_names
from hacrl.agents.zoo.catalog import catalog
from hacrl.config import RunConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.rollouts.retokenize import vocabulary_fingerprint
from hacrl.warmup.stage import warm_up

RECIPE = MODELS.parent / "zoo.yaml"


def test_the_zoo_is_small_varied_and_unfinished() -> None:
    models = catalog()
    assert zoo_names() == sorted(agent.id for agent in WarmupConfig.load(RECIPE).agents)
    assert len(models) >= 6
    assert all(300_000 <= model.parameters <= 3_000_000 for model in models)
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 12_000_000
    assert len({model.architecture for model in models}) >= 3
    assert {model.tokenizer for model in models} == {"char", "pair", "bpe"}
    # Sampled answers: far from saturated. The weak partner of the gap pair aside, all can do something.
    assert all(0.2 <= model.sampled_accuracy <= 0.6 for model in models if model.name != "llama-weak")


@pytest.mark.parametrize("name", zoo_names())
def test_models_are_stored_in_half_precision_and_the_recipe_says_how_they_were_made(name: str) -> None:
    weights = load_file(MODELS / name / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    made = json.loads((MODELS / name / "warmup.json").read_text())
    recipe = next(agent for agent in WarmupConfig.load(RECIPE).agents if agent.id == name)
    assert (made["architecture"], f"zoo:{name}") == (recipe.config["model_type"], recipe.tokenizer)
    assert recipe.data[0].task is not None
    assert recipe.data[0].task.minus_share == made["minus_share"]
    assert recipe.target_accuracy is not None
    assert 0 <= made["validation_accuracy"] - recipe.target_accuracy <= 0.02
    stored = AutoConfig.from_pretrained(MODELS / name)
    assert {option: getattr(stored, option) for option in recipe.config} == recipe.config


@pytest.mark.parametrize(
    ("name", "models", "alike"),  # alike: architecture, size, tokenizer
    [
        ("state", ["llama-plus", "llama-minus"], (True, True, True)),
        ("size", ["llama-small", "llama-large"], (True, False, True)),
        ("model", ["llama-plus", "neox-pair"], (False, False, False)),
        ("gap", ["llama-weak", "llama-large"], (True, False, True)),
        ("team", ["llama-plus", "neox-pair", "qwen3-bpe"], (False, False, False)),
    ],
)
def test_there_is_a_preset_for_each_heterogeneity(name: str, models: list[str], alike: tuple[bool, ...]) -> None:
    assert [agent.model.removeprefix("zoo:") for agent in RunConfig.load(name).agents] == models
    configs = [AutoModelForCausalLM.from_pretrained(MODELS / model).config for model in models]
    tokenizers = [vocabulary_fingerprint(AutoTokenizer.from_pretrained(MODELS / model)) for model in models]
    same_architecture = len({config.model_type for config in configs}) == 1
    same_size = len({(config.hidden_size, config.num_hidden_layers) for config in configs}) == 1
    same_tokenizer = len(set(tokenizers)) == 1
    assert (same_architecture, same_size, same_tokenizer) == alike


def test_the_recipe_makes_models_that_open(tmp_path: Path) -> None:
    short = ["max_steps=1", "batch_size=8", "eval_every=0", "eval_size=4", "task.eval_size=4"]
    result = warm_up(WarmupConfig.load(RECIPE, [*short, f"output_dir={tmp_path / 'zoo'}"]))
    for bundled in catalog():
        folder = result.models[bundled.name]
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer)
        assert sum(parameter.numel() for parameter in model.parameters()) == bundled.parameters
        assert vocabulary_fingerprint(tokenizer) == vocabulary_fingerprint(
            AutoTokenizer.from_pretrained(MODELS / bundled.name)
        )
