"""LoRA: small matrices beside a model's linear layers are trained; the model's own weights stay as they are."""

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.learners.weights import Weights
from hacrl.opening import opening

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
VARIANTS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "layers_to_transform")
"""PEFT options that make another model of the same matrices."""


def import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("LoRA needs the package peft: pip install 'hacrl[lora]'.") from None
    return peft


def with_same_weights(base: Any) -> Any:
    """Copy a model's modules and configuration, but share its parameters.

    Agents and the starting policy each get a copy, so that adapters are not switched on and off while others compute.
    """
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})


class Adapter:
    """The adapters of one agent, put into `model`: those in the folder `source`, or new ones, which add nothing yet."""

    def __init__(self, model: nn.Module, config: AgentConfig, source: str, seed: int) -> None:
        assert config.lora is not None
        peft, self.where = import_peft(), f"agents.{config.id}.lora"
        lora, targets = config.lora, config.lora.target_modules or "all-linear"
        self.options = peft.LoraConfig(task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, target_modules=targets)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            try:
                self.wrapped: Any = peft.get_peft_model(model, self.options)
            except ValueError as error:
                raise UserError(f"{self.where}.target_modules: {' '.join(str(error).split())}") from None
        self.wrapped.eval()
        whole: Any = model
        if any(hasattr(layer, "base_layer") for layer in (whole.get_input_embeddings(), whole.get_output_embeddings())):
            what = "embeddings and the output projection cannot have adapters. Name other layers."
            raise UserError(f"{self.where}.target_modules: {what}")
        base = base_model(source)
        self.options.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
        trained = {name: parameter for name, parameter in self.wrapped.named_parameters() if parameter.requires_grad}
        self.names, self.parameters = list(trained), list[nn.Parameter](trained.values())
        if base != source:
            self._read(Path(source), self.parameters)

    def save(self, folder: Path, weights: Weights) -> None:
        """Save the adapters in PEFT's format, in float32."""
        float32 = dict(zip(self.names, weights.weights, strict=True))
        self.wrapped.save_pretrained(folder, state_dict=float32, save_embedding_layers=False)
        (folder / "README.md").unlink()  # PEFT's model card is an empty form

    def load(self, folder: Path, weights: Weights) -> None:
        self._read(folder, weights.weights)
        weights.publish()

    def _read(self, folder: Path, targets: Sequence[Tensor]) -> None:
        """Read the adapters of a folder into `targets`; UserError if they do not match these adapters."""
        saved, file = read_options(folder, self.where), folder / WEIGHTS_FILE
        holds = f"{self.where}: {folder} holds adapters with"
        for name in ("r", "lora_alpha", "target_modules"):
            own, other = getattr(self.options, name), saved.get(name)
            if (set(own) != set(other or ())) if name == "target_modules" else own != other:
                raise UserError(f"{holds} {name} {other}, not {own}. Set lora to that.")
        for name in VARIANTS:
            if saved.get(name) and saved[name] != getattr(self.options, name):
                raise UserError(
                    f"{holds} {name} {saved[name]}, which cannot be trained further here. Merge them into their model "
                    "with PEFT's merge_and_unload, and give that model."
                )
        with opening(self.where, folder, WEIGHTS_FILE):
            state = load_file(file)
        wanted = {name.replace(".default.", "."): target for name, target in zip(self.names, targets, strict=True)}
        for name in sorted(state.keys() | wanted.keys()):
            if name not in state or name not in wanted or state[name].shape != wanted[name].shape:
                raise UserError(f"{self.where}: {file} does not match the model: look at its weight {name}.")
            if not bool(torch.isfinite(state[name]).all()):
                raise UserError(f"{self.where}: the weight {name} in {file} is not finite.")
        with torch.no_grad():
            for name, target in wanted.items():
                target.copy_(state[name])


def read_options(folder: str | Path, where: str = "model") -> dict[str, Any]:
    """Read adapter_config.json; UserError if it does not name the model that the adapters belong to."""
    with opening(where, folder, CONFIG_FILE):
        options = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(options, dict) or not isinstance(options.get("base_model_name_or_path"), str):
            raise ValueError("it names no base_model_name_or_path")
    return options


def base_model(source: str | Path) -> str:
    """The model that the adapters in a folder belong to; a source without adapters is its own base."""
    adapted = (Path(source) / CONFIG_FILE).is_file()
    return str(read_options(source)["base_model_name_or_path"] if adapted else source)


def merged(base: nn.Module, folder: str | Path) -> Any:
    """Add the adapters of a folder to a model's weights."""
    peft = import_peft()
    with warnings.catch_warnings():
        # Adapters missing from the files would add nothing, as if they had not been trained.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model: nn.Module = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    return model.requires_grad_(True)
