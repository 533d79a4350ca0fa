"""Makes starting models: cut from a larger model, or with new weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hacrl.agents.loading import load_model, load_tokenizer, resolve_model
from hacrl.config.warmup import WarmupAgentConfig
from hacrl.errors import UserError, lack_of_memory, nearest
from hacrl.opening import reason
from hacrl.seeding import derive_seed


def starting_model(agent: WarmupAgentConfig, index: int, seed: int, folder: Path) -> str:
    """Return the model that the agent starts from: its own, or one that is made once and saved in `folder`."""
    if not agent.starts_from_a_copy:
        assert agent.model is not None
        return agent.model
    if not folder.is_dir():
        model, tokenizer = _random(agent, index, seed) if agent.init == "random" else _cut(agent)
        aside = folder.with_name(f".{folder.name}.partial")
        aside.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.rename(folder)
    return str(folder)


# --- fewer layers ----------------------------------------------------------------------------------


def _cut(agent: WarmupAgentConfig) -> tuple[Any, PreTrainedTokenizerBase]:
    assert agent.model is not None
    config = agent.for_agent(agent.model).model_copy(update={"device": "cpu"})
    model = load_model(config)
    count = model.config.get_text_config().num_hidden_layers
    first = min(agent.max_layers or count, count)
    keep = [layer for layer in range(first) if layer not in agent.drop_layers]
    outside = [layer for layer in agent.drop_layers if layer >= count]
    if outside or not keep:
        what = f"there is no layer {outside[0]}" if outside else "no layer would be left"
        raise UserError(f"agents.{agent.id}: {what}: {agent.model} has the layers 0 to {count - 1}.")
    keep_layers(model, keep, agent.id)
    return model, load_tokenizer(config)


def keep_layers(model: Any, keep: list[int], agent_id: str) -> None:
    """Remove the other layers. Save and reload the model before use, because layers keep their old numbers."""
    text = model.config.get_text_config()
    count = text.num_hidden_layers
    places = [
        (module, name, child)
        for module in model.base_model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(places) != 1:
        raise UserError(f"agents.{agent_id}: the layers of {type(model).__name__} cannot be told from its other parts.")
    ((module, name, layers),) = places
    setattr(module, name, nn.ModuleList(layers[layer] for layer in keep))
    options = text.to_dict()
    text.num_hidden_layers = len(keep)
    for key, value in options.items():
        if "layer" in key and isinstance(value, list) and len(value) == count:  # such as the kind of attention of each
            setattr(text, key, [value[layer] for layer in keep])


# --- new weights -----------------------------------------------------------------------------------


def resolve_tokenizer(agent: WarmupAgentConfig) -> str:
    """Return the folder or hub id of the tokenizer for new weights; the folder needs nothing else in it."""
    if agent.tokenizer is None:
        return resolve_model(str(agent.model), f"agents.{agent.id}.model")
    return resolve_model(agent.tokenizer, f"agents.{agent.id}.tokenizer", ("tokenizer_config.json", "tokenizer.json"))


def _random(agent: WarmupAgentConfig, index: int, seed: int) -> tuple[Any, PreTrainedTokenizerBase]:
    where = f"agents.{agent.id}"
    source = resolve_tokenizer(agent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=agent.trust_remote_code)
        config = _architecture(agent, tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, index))
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=agent.trust_remote_code
            )
    except UserError:
        raise
    except Exception as error:  # transformers raises all kinds of errors about tokenizers and options
        if isinstance(error, RuntimeError) and lack_of_memory(error):
            raise
        raise UserError(f"{where}: a model with new weights cannot be made: {reason(error)}") from error
    if config.get_text_config().vocab_size < len(tokenizer):
        raise UserError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, more than config.vocab_size "
            f"({config.get_text_config().vocab_size})."
        )
    model.generation_config = GenerationConfig(**_special(tokenizer))
    return model, tokenizer


def _architecture(agent: WarmupAgentConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The config of the new model. The tokenizer says what `agent.config` leaves open about the vocabulary."""
    own_tokens = {"vocab_size": len(tokenizer), **_special(tokenizer)} if agent.tokenizer else {}
    options = dict(agent.config)
    make: Callable[..., Any]
    if agent.model is None:
        make = partial(AutoConfig.for_model, options.pop("model_type"))
    else:
        source = resolve_model(agent.model, f"agents.{agent.id}.model")
        make = partial(AutoConfig.from_pretrained, source, trust_remote_code=agent.trust_remote_code)
    usual = make()
    known = {*usual.to_dict(), *usual.attribute_map} - {"model_type"}
    for name in options:  # transformers takes any name, but would ignore it
        if name not in known:
            raise UserError(f"agents.{agent.id}.config: {usual.model_type} has no {name!r}{nearest(name, known)}")
    return make(**{**own_tokens, **options})


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
