"""Models and tokenizers from the zoo, a local folder or the Hugging Face hub."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hacrl.config import AgentConfig
from hacrl.decoder.amx import avoid_broken_amx
from hacrl.errors import UserError, nearest, warn
from hacrl.learners.lora import CONFIG_FILE, Adapter, base_model, merged, read_options
from hacrl.learners.weights import cast_parameters
from hacrl.opening import AGAIN, not_loaded, opening
from hacrl.rollouts.prompts import chat_text, check_template
from hacrl.rollouts.reader import Limits
from hacrl.rollouts.retokenize import readable_ids

disable_progress_bar()
# Hide transformers' table of misfits, which `_misfit` reports. Errors of conversion are reported nowhere else.
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in record.getMessage() or "CONVERSION" in record.getMessage()
)

ZOO = Path(__file__).parent / "zoo" / "models"

MAX_LAYERS = 1_000
"""The most layers a config may ask for, more than any model has. All are built before weights are read."""
PARAMETERS_PER_BYTE = 8
"""The most parameters that a byte in a file of weights can stand for, however they are quantized."""
PROBE_LENGTH = 8
"""How many tokens a model reads once, to see that it works."""
OLD_BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", ".inv_freq", ".position_ids")
"""Endings of names of buffers that earlier versions of transformers saved; now they are computed."""


def zoo_names() -> list[str]:
    return sorted(path.parent.name for path in ZOO.glob("*/config.json"))


def resolve_model(model: str, where: str = "model", files: Sequence[str] = ("config.json", CONFIG_FILE)) -> str:
    """Return the folder or hub id that a `model` setting names; UserError if there is none with one of `files`."""
    if model.startswith("zoo:"):
        name = model.removeprefix("zoo:")
        if name not in zoo_names():
            raise UserError(f"{where}: the zoo has no model {name!r}{nearest(name, zoo_names())}")
        return str(ZOO / name)
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in files):
            raise UserError(
                f"{where}: the folder {model} has no {files[0]}, so it is not a saved {where.split('.')[-1]}."
            )
        if CONFIG_FILE in files and (path / CONFIG_FILE).is_file():
            read_options(path, where)
        return str(path)
    is_hub_id = len(model.split("/")) == 2 and not model.startswith((".", "/", "~"))
    if path.exists() or not is_hub_id:
        raise UserError(
            f"{where}: there is no folder {model}. Give zoo:NAME (see `hacrl models`), a folder written by "
            "save_pretrained, or a hub id such as org/name."
        )
    return model


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {device} was asked for, but this machine has {torch.cuda.device_count()} GPUs.")
    return resolved


def load_model_config(config: AgentConfig) -> Any:
    return _open_config(config, base_model(source_of(config)))


def _open_config(config: AgentConfig, source: str) -> Any:
    with _opening(config, source, "config.json"):
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        layers = getattr(model_config.get_text_config(), "num_hidden_layers", 1)
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers:,}; it must lie between 1 and {MAX_LAYERS:,}")
        rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
        theta = rope.get("rope_theta", 1.0)
        if isinstance(theta, int | float) and not theta > 0:
            raise ValueError(f"rope_theta is {theta}; it must be above 0")
    return model_config


def positions_of(model_config: Any) -> int | None:
    """How many tokens a model takes for prompt and completion together; None if its config does not say."""
    positions: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return positions


def looks_positions_up(model: Any, positions: int) -> bool:
    """Whether the model looks positions up in a table, which ends there. Most models compute positions."""
    words = model.get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    return any(positions <= size <= positions + 2 for size in tables)  # some leave the first two places free


def load_tokenizer(config: AgentConfig) -> PreTrainedTokenizerBase:
    source = source_of(config)
    load_model_config(config)  # first: the tokenizer reads it too, and without a model it would wait for the hub twice
    own = not Path(source).is_dir() or (Path(source) / "tokenizer_config.json").is_file()
    source = source if own else base_model(source)
    with _opening(config, source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    check_template(tokenizer, config, place_of(config))
    # Lengths are checked against the model's positions; the tokenizer's own limit may be anything.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def source_of(config: AgentConfig) -> str:
    return resolve_model(config.model, place_of(config))


def place_of(config: AgentConfig) -> str:
    """The setting that names the model: in a config, or alone in `hacrl eval`."""
    return "model" if config.id == "model" else f"agents.{config.id}.model"


def _named(config: AgentConfig, source: str | Path) -> tuple[str, str]:
    """The setting and the name of a source for error messages. The source is the config's model, a checkpoint, or the
    base model that adapters name."""
    given = source_of(config)
    if str(source) == given:
        return place_of(config), config.model
    return f"{place_of(config)} ({config.model})" if str(source) == base_model(given) else place_of(config), str(source)


def _opening(config: AgentConfig, source: str | Path, file: str = "") -> AbstractContextManager[None]:
    return opening(*_named(config, source), file)


def _refused(config: AgentConfig, source: str | Path, why: str) -> UserError:
    return not_loaded(*_named(config, source), why)


def load_model(config: AgentConfig, source: str | Path | None = None) -> Any:
    """Load a model in float32 on its device, without dropout; safetensors only. Adapters are merged into it."""
    if source is not None:  # a checkpoint: an error must name it and not the agent's own model
        config = config.model_copy(update={"model": str(source)})
    source = source or source_of(config)
    model = _load(config, base_model(source))
    if base_model(source) != str(source):
        with _opening(config, source):
            model = merged(model, source)
        _check_finite(model, config, source)
    return _working(model.to(resolve_device(config.device)).eval(), config, source)


Bases = dict[tuple[str, str, str], Any]
"""Models that agents with adapters share, by source, dtype and device."""


def load_base(config: AgentConfig, bases: Bases) -> Any:
    """Return the base model of an agent's adapters, frozen, in the dtype of the computation. Agents share it."""
    source, device = base_model(source_of(config)), resolve_device(config.device)
    key = (source, config.dtype, str(device))
    if key not in bases:
        model = _load(config, source).requires_grad_(False).eval()
        cast_parameters(model, getattr(torch, config.dtype))  # before the move, so that a GPU need not hold float32
        bases[key] = _working(model.to(device), config, source)
    return bases[key]


def _load(config: AgentConfig, source: str) -> Any:
    if config.dtype == "bfloat16" and resolve_device(config.device).type == "cpu":
        avoid_broken_amx()
    damaged = _damaged_file(source)
    if not damaged:
        _check_size(config, source)
    with _opening(config, source, "generation_config.json"):
        if (Path(source) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(source)  # loading a model ignores a file that cannot be read
    with _opening(config, source, damaged):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_misfit` reports them by name
        )
    if trouble := _misfit(report, {_part(name) for name in model.state_dict()}):
        raise _refused(config, source, trouble)
    if beside := _surplus(report):
        warn(
            f"{place_of(config)}: weights of {config.model} that do not belong to a language model are left out: "
            f"{len(beside)}, the first is {beside[0]}."
        )
    _check_finite(model, config, source)
    _allow_saving(model)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers' default leaves the soft cap out
    return model


def _check_size(config: AgentConfig, source: str) -> None:
    """Raise UserError if config.json describes no model, or one too large for the files. Nothing is allocated."""
    model_config = _open_config(config, source)
    with _opening(config, source, "config.json"):
        parameters = _on_meta(model_config, config).num_parameters()
        stored = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
        if stored and parameters > PARAMETERS_PER_BYTE * stored:
            raise ValueError(f"it describes {parameters:,} parameters, and the files of weights have {stored:,} bytes")


def _on_meta(model_config: Any, config: AgentConfig) -> Any:
    """Build a model on the meta device, without memory for weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)


def _damaged_file(source: str) -> str:
    """Name of the first file of weights in a folder that cannot be opened; empty if all can."""
    for file in sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception:  # loading the model reports what is wrong with it
            return file.name
    return ""


def _part(weight: str) -> str:
    """The part of a model that a weight belongs to, such as model.layers or lm_head.weight."""
    return ".".join(weight.split(".")[:2])


def _surplus(report: dict[str, Any]) -> list[str]:
    """Weights in the files that the model does not have. transformers does not report those that an architecture is
    known to leave out."""
    return sorted(name for name in report["unexpected_keys"] if not f".{name}".endswith(OLD_BUFFERS))


def _misfit(report: dict[str, Any], parts: set[str]) -> str | None:
    """Say why weights and config.json do not belong together; None if they do.

    Missing weights would start at random, and layers beyond those in config.json would be left out. Both look like a
    weak model and nothing else. Surplus parts, such as the head of a reward model, do no harm.
    """
    missing = sorted(report["missing_keys"])
    surplus = [name for name in _surplus(report) if _part(name) in parts]
    if missing:
        return f"its files lack {len(missing)} weights, the first is {missing[0]}. {AGAIN}"
    if report["mismatched_keys"]:
        name, stored, wanted = min(report["mismatched_keys"])
        return f"the weight {name} has the shape {tuple(stored)}, and by config.json it is {tuple(wanted)}. {AGAIN}"
    if surplus:
        return (
            f"its files have {len(surplus)} weights that a model of this config.json does not have, the first is "
            f"{surplus[0]}. Correct config.json; or, if it is right, open the model with AutoModelForCausalLM and save "
            "it again, which leaves them out."
        )
    return None


def _check_finite(model: Any, config: AgentConfig, source: str | Path) -> None:
    for name, tensor in model.state_dict().items():
        # The sum is quick to compute. It is finite unless a number is not, or numbers are huge.
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise _refused(config, source, f"the weight {name} has numbers that are not finite. {AGAIN}")


def _working(model: Any, config: AgentConfig, source: str | Path) -> Any:
    """Return the model after it has read some tokens; UserError if it fails or its logits are not finite."""
    ids = torch.arange(min(PROBE_LENGTH, vocabulary_of(model)), device=model.device)[None]
    with _opening(config, source), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise _refused(config, source, f"its weights are finite, but its logits are not. {AGAIN}")
    return model


def _allow_saving(model: Any) -> None:
    """Turn a generation config that transformers refuses to save into one that it saves. Sampling does not use it.

    Many published models have sampling values without do_sample. If another value is refused, only tokens are kept.
    """
    generation = model.generation_config
    if generation is None:
        return
    for do_sample in (generation.do_sample, True):
        generation.do_sample = do_sample
        with suppress(ValueError):
            generation.validate(strict=True)
            return
    tokens = {name: getattr(generation, name) for name in ("bos_token_id", "eos_token_id")}
    model.generation_config = GenerationConfig(**tokens)


def end_of_turn_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, agent_id: str) -> list[int]:
    """Return the tokens that end a turn. The first is the one a learner appends: it closes a turn in its chat template.

    UserError if there are none, or if the model does not have these tokens.
    """
    generation: Any = model.generation_config
    configured = generation.eos_token_id if generation is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = [token for token in [tokenizer.eos_token_id, *listed] if token is not None]
    if not ids:
        raise UserError(
            f"agents.{agent_id}: the model has no end-of-turn token. Set eos_token in its tokenizer_config.json "
            "or eos_token_id in its generation_config.json."
        )
    rows = vocabulary_of(model)
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < rows:
            raise UserError(
                f"agents.{agent_id}: {model.name_or_path} names the end-of-turn token {token!r}, but the model has the "
                f"tokens 0 to {rows - 1}. Correct eos_token_id in generation_config.json, or its tokenizer."
            )
    ids = list(dict.fromkeys(ids))
    if len(ids) > 1 and tokenizer.chat_template:
        closing = closing_ids(tokenizer, f"agents.{agent_id}")
        ids.sort(key=lambda token: closing.index(token) if token in closing else len(closing))
    return ids


def vocabulary_of(model: Any) -> int:
    """Number of rows in a model's embedding; with padding, often more than its tokenizer has tokens."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, agent_id: str) -> None:
    """Raise UserError if text may become a token that the model does not have.

    Special tokens do no harm while no prompt has them: Gemma 3 1B has one for images, which it cannot see.
    """
    last, rows = max(readable_ids(tokenizer, []), default=0), vocabulary_of(model)
    if last >= rows:
        raise UserError(
            f"agents.{agent_id}.model: the tokenizer of {tokenizer.name_or_path} has the token {last}, but the model "
            f"has the tokens 0 to {rows - 1} (vocab_size in config.json). They belong to different models: put the "
            "model's own tokenizer there."
        )


def closing_ids(tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    """The tokens that the chat template puts after an assistant's words."""
    turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    text = chat_text(tokenizer, turn, where, tokenizer.name_or_path)
    return list(tokenizer.encode(text.rpartition("answer")[2], add_special_tokens=False))


def count_parameters(config: AgentConfig) -> tuple[int, int]:
    """Count all parameters and the trained ones, from the model's configuration alone: no weights are read."""
    model_config = load_model_config(config)
    with _opening(config, base_model(source_of(config)), "config.json"):
        model = _on_meta(model_config, config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.device("meta"):
        adapters = [] if config.lora is None else Adapter(model, config, config.model, seed=0).parameters
    trained = sum(parameter.numel() for parameter in adapters) if adapters else parameters
    return parameters, trained


def limits_of(model: Any, tokenizer: PreTrainedTokenizerBase, agent_id: str) -> tuple[list[int], Limits]:
    """Return a model's end-of-turn tokens and limits; UserError if it does not fit its tokenizer."""
    check_vocabulary(model, tokenizer, agent_id)
    positions = positions_of(model.config)
    looks_up = positions is not None and looks_positions_up(model, positions)
    return end_of_turn_ids(model, tokenizer, agent_id), Limits(vocabulary_of(model), positions, looks_up)
