"""The bundled models are what they are said to be, and the script that makes them runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.agents.loading import ZOO as MODELS
from hacrl.agents.loading import zoo_names
from hacrl.agents.zoo.catalog import catalog
from hacrl.agents.zoo.train import PAIRS, ZOO, warm_up
from hacrl.config import RunConfig
from hacrl.rollouts.retokenize import vocabulary_fingerprint


def test_the_zoo_is_small_varied_and_unfinished() -> None:
    models = catalog()
    assert zoo_names() == sorted(row.name for row in ZOO)
    assert len(models) >= 6
    assert all(300_000 <= model.parameters <= 3_000_000 for model in models)
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 12_000_000
    assert len({model.architecture for model in models}) >= 3
    assert {model.tokenizer for model in models} == {"char", "pair", "bpe"}
    # Sampled answers: far from saturated. The weak partner of the gap pair aside, all can do something.
    assert all(0.2 <= model.sampled_accuracy <= 0.6 for model in models if model.name != "llama-weak")


@pytest.mark.parametrize("name", zoo_names())
def test_models_are_stored_in_half_precision_and_say_how_they_were_made(name: str) -> None:
    weights = load_file(MODELS / name / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    made, row = json.loads((MODELS / name / "warmup.json").read_text()), next(row for row in ZOO if row.name == name)
    assert all(made[key] == getattr(row, key) for key in ("architecture", "tokenizer", "minus_share", "target", "seed"))


@pytest.mark.parametrize("name", list(PAIRS))
def test_there_is_a_preset_for_each_heterogeneity(name: str) -> None:
    models = [agent.model.removeprefix("zoo:") for agent in RunConfig.load(name).agents]
    assert models == PAIRS[name]
    configs = [AutoModelForCausalLM.from_pretrained(MODELS / model).config for model in models]
    tokenizers = [vocabulary_fingerprint(AutoTokenizer.from_pretrained(MODELS / model)) for model in models]
    same_architecture = len({config.model_type for config in configs}) == 1
    same_size = len({(config.hidden_size, config.num_hidden_layers) for config in configs}) == 1
    same_tokenizer = len(set(tokenizers)) == 1
    expected = {
        "state": (True, True, True),
        "size": (True, False, True),
        "model": (False, False, False),
        "gap": (True, False, True),
        "team": (False, False, False),
    }
    assert (same_architecture, same_size, same_tokenizer) == expected[name]


def test_the_script_makes_a_model_that_opens(tmp_path: Path) -> None:
    row = next(row for row in ZOO if row.name == "llama-weak")
    warm_up(row, tmp_path, "cpu", max_seconds=60, max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / row.name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / row.name)
    assert model.config.vocab_size == len(tokenizer)
    assert not json.loads((tmp_path / row.name / "warmup.json").read_text())["reached_target"]
