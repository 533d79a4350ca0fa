"""Models and tokenizers from the zoo, a local folder or the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hacrl.agents.amx import avoid_broken_amx
from hacrl.agents.lora import CONFIG_FILE, Adapter, base_model, merged
from hacrl.agents.master import cast_parameters
from hacrl.config import AgentConfig
from hacrl.errors import UserError, nearest

disable_progress_bar()

ZOO = Path(__file__).parent / "zoo" / "models"


def zoo_names() -> list[str]:
    return sorted(path.parent.name for path in ZOO.glob("*/config.json"))


def resolve_model(model: str, where: str = "model", files: Sequence[str] = ("config.json", CONFIG_FILE)) -> str:
    """The folder or hub id that a `model` setting means; UserError if there is no such thing with one of `files`."""
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
    return _open(AutoConfig, config, base_model(source_of(config)))


def positions_of(model_config: Any) -> int | None:
    """Tokens that a prompt and its completion may have for a model; None: it does not say."""
    positions: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return positions


def looks_positions_up(model: Any, positions: int) -> bool:
    """Whether they are in a table, so that there are none beyond them; most models compute theirs."""
    words = model.get_input_embeddings()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    return any(positions <= size <= positions + 2 for size in tables)  # some leave the first two places free


def load_tokenizer(config: AgentConfig) -> PreTrainedTokenizerBase:
    source = source_of(config)
    if not Path(source).is_dir():
        load_model_config(config)  # where there is no such model, the tokenizer would wait for the hub twice
    own = not Path(source).is_dir() or (Path(source) / "tokenizer_config.json").is_file()
    tokenizer: PreTrainedTokenizerBase = _open(AutoTokenizer, config, source if own else base_model(source))
    # Lengths are checked against the model's positions; what the tokenizer says of them may be anything.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def source_of(config: AgentConfig) -> str:
    return resolve_model(config.model, place_of(config))


def place_of(config: AgentConfig) -> str:
    """Where a model was given: in a config, or alone to `hacrl eval`."""
    return "model" if config.id == "model" else f"agents.{config.id}.model"


def _open(kind: Any, config: AgentConfig, source: str) -> Any:
    try:
        return kind.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _not_loaded(config, error) from None


def load_model(config: AgentConfig, source: str | Path | None = None) -> Any:
    """The model in float32 on its device, without dropout; safetensors only. Adapters become part of its weights."""
    if source is not None:  # a checkpoint's: if it fails, the agent's own model is not to blame
        config = config.model_copy(update={"model": str(source)})
    source = source or source_of(config)
    model = _load(config, base_model(source))
    if base_model(source) != str(source):
        model = merged(model, source)
    return model.to(resolve_device(config.device)).eval()


Bases = dict[tuple[str, str, str], Any]
"""Models that agents with adapters share, by source, dtype and device."""


def load_base(config: AgentConfig, bases: Bases) -> Any:
    """The model that an agent's adapters belong to, frozen, in the dtype of the computation."""
    source, device = base_model(source_of(config)), resolve_device(config.device)
    key = (source, config.dtype, str(device))
    if key not in bases:
        model = _load(config, source).requires_grad_(False).eval()
        cast_parameters(model, getattr(torch, config.dtype))  # before it is moved: a GPU need not hold float32
        bases[key] = model.to(device)
    return bases[key]


def _load(config: AgentConfig, source: str) -> Any:
    if config.dtype == "bfloat16" and resolve_device(config.device).type == "cpu":
        avoid_broken_amx()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _not_loaded(config, error) from None
    if missing := sorted(report["missing_keys"]):
        # They would start at random, which looks like a very weak model and nothing else.
        raise _not_loaded(config, ValueError(f"its files lack {len(missing)} weights, the first is {missing[0]}."))
    if model.generation_config is not None:
        try:
            model.generation_config.validate(strict=True)
        except ValueError:
            # Sampling values without do_sample: common in published models, and refused when a model is saved.
            model.generation_config.do_sample = True
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers' default leaves the soft cap out
    return model


def end_of_turn_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, agent_id: str) -> list[int]:
    """Tokens that end a turn; first the one a learner appends, which is how its chat template closes a turn."""
    generation: Any = model.generation_config
    configured = generation.eos_token_id if generation is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = list(dict.fromkeys(token for token in [tokenizer.eos_token_id, *listed] if token is not None))
    if not ids:
        raise UserError(
            f"agents.{agent_id}: the model has no end-of-turn token. Set eos_token in its tokenizer_config.json "
            "or eos_token_id in its generation_config.json."
        )
    if len(ids) > 1 and tokenizer.chat_template:
        closing = closing_ids(tokenizer)
        ids.sort(key=lambda token: closing.index(token) if token in closing else len(closing))
    return ids


def closing_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens its chat template puts behind an assistant's words."""
    turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False)
    return list(tokenizer.encode(text.rpartition("answer")[2], add_special_tokens=False))


def readable_ids(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]) -> set[int]:
    """Ids whose token is part of the text: what decoding keeps."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(tokenizer.get_vocab().values()) - special - set(tokenizer.all_special_ids) - set(stop_ids)


def count_parameters(config: AgentConfig) -> tuple[int, int]:
    """Of the model, and how many are trained; from its configuration alone: no weights are read."""
    model_config = load_model_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        adapters = [] if config.lora is None else Adapter(model, config, config.model, seed=0).parameters
    trained = sum(parameter.numel() for parameter in adapters) if adapters else parameters
    return parameters, trained


def _not_loaded(config: AgentConfig, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    what = config.model
    if not what.startswith("zoo:") and not Path(what).expanduser().is_dir():
        what = f"there is no folder {what}, and the hub's model of that name"
    return UserError(f"{place_of(config)}: {what} could not be loaded: {reason}")
