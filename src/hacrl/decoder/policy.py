"""Runs a model: by the fast paths if they work with it, plainly if not, in batches that fit into memory."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hacrl.config import AgentConfig
from hacrl.decoder import Backbone, CannotDrive
from hacrl.decoder.backbone import checkpointed_layers
from hacrl.decoder.packing import Texts
from hacrl.decoder.parallel import SMALL
from hacrl.decoder.plain import completion_logprobs
from hacrl.decoder.scoring import GraphedScorer, Scorer, TokenLogprobs
from hacrl.errors import TrainingDiverged, UserError, warn

Score = Callable[[Texts, Texts, float], TokenLogprobs]
"""A function from prompts, completions and a temperature to log-probabilities."""

CAPTURED = 1_000_000_000
"""Largest number of parameters of a model whose passes are captured as CUDA graphs. Graphs keep activations and 2 bytes
a parameter of gradients in memory; they save the host's work, which in larger models the GPU's work covers."""
CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 2048, 16384
"""Most tokens of one pass. More is not faster: on a CPU activations leave the caches, and a GPU is already busy."""
MEMORY_SHARE = 0.5
"""Share of the free memory for the activations of one pass; the rest covers what the estimate leaves out."""
MEMINFO = Path("/proc/meminfo")
SHORT = 0.5
"""A GPU is short of memory if less than this share of it is free."""


def free_bytes(device: torch.device) -> float:
    """Bytes of memory that are free now, cached files included; 4e9 on systems that do not report it."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + held)
    if not MEMINFO.is_file():
        return 4e9
    told = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text("ascii"))
    return 1024.0 * int(told[1]) if told else 4e9


def lean_layer(width: int, inner: int, heads: int) -> int:
    """How many numbers a lean layer keeps of one token until the backward pass; `heads`: width of queries and keys.

    These are what goes into the layer and into its MLP, both before and after the norm; queries, keys, values and
    outputs of attention, twice; and gate, up and their product.
    """
    return 4 * width + 4 * heads + 3 * inner


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds: all of it, unless the parameter is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def naming(config: AgentConfig, updates: int) -> Iterator[None]:
    """Make errors about non-finite logits say whether the model was given that way or training caused it."""
    try:
        yield
    except TrainingDiverged as error:
        if updates:
            raise TrainingDiverged(f"Agent {config.id}: {error}") from error
        raise UserError(
            f"Agent {config.id}: {config.model} gives logits that are not finite, before any update. Use another model."
        ) from error


class Policy:
    """A model that can be sampled from and can score texts."""

    def __init__(
        self, model: nn.Module, config: AgentConfig, stop_ids: Sequence[int],
        lean: bool = True, entropy_gradient: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.config, self.stop_ids = model, config, stop_ids
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.backbone: Backbone | None = None
        if config.fast:
            try:
                self.backbone = Backbone(model, lean)
            except CannotDrive as reason:
                warn(f"Agent {config.id}: falling back to `generate` and to plain learning, because of {reason}.")
        size = sum(parameter.numel() for parameter in model.parameters())
        self.side_by_side = self.backbone is not None and self.backbone.device.type == "cpu" and size <= SMALL
        self.scorer: Score = partial(completion_logprobs, model, pad_id=stop_ids[0], entropy_gradient=entropy_gradient)
        if self.backbone is not None:
            self.backbone.checkpointing = bool(config.gradient_checkpointing)
            scorer = GraphedScorer if self.backbone.device.type == "cuda" and size <= CAPTURED else Scorer
            self.scorer = scorer(self.backbone, entropy_gradient)
        elif config.gradient_checkpointing:
            layers = checkpointed_layers(model)
            if not layers:
                warn(f"Agent {config.id}: gradient_checkpointing has no effect: its layers do not offer it.")
            for layer, forward in layers.items():
                layer.__dict__["forward"] = forward

    @property
    def captures(self) -> bool:
        """Whether passes are captured as CUDA graphs."""
        return isinstance(self.scorer, GraphedScorer)

    def driven(self) -> AbstractContextManager[None]:
        return nullcontext() if self.backbone is None else self.backbone.driven()

    def score(self, prompts: Texts, completions: Texts, temperature: float) -> TokenLogprobs:
        with self.driven():
            return self.scorer(prompts, completions, temperature)

    @property
    def workers(self) -> int:
        """Number of batches to work on at the same time."""
        return torch.get_num_threads() if self.side_by_side else 1

    def choose_batch_tokens(self, reserved: int) -> int:
        """Choose the tokens of one pass from the memory that is free now, `reserved` bytes of which will be used
        otherwise; switches on checkpointing if it is needed."""
        device = next(self.model.parameters()).device
        most, free = (CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS), free_bytes(device)
        free -= reserved
        longest = self.config.max_prompt_length + self.config.max_completion_length
        fits = int(MEMORY_SHARE * max(free, 0) / self.bytes_per_token())
        if fits < longest and self.recompute():
            fits = int(MEMORY_SHARE * max(free, 0) / self.bytes_per_token())
            warn(
                f"Agent {self.config.id}: the activations of {longest} tokens would not fit into memory, so "
                "they are computed again in the backward pass (gradient_checkpointing)."
            )
        return min(max(fits, 1), most)

    def recompute(self) -> bool:
        """Compute activations again in the backward pass from now on; False if that cannot be switched on."""
        backbone = self.backbone
        if backbone is None or backbone.checkpointing or self.config.gradient_checkpointing is not None:
            return False
        backbone.recompute()
        return True

    def bytes_per_token(self) -> int:
        """Bytes of activations that one token keeps until the backward pass; a conservative estimate."""
        text = self.model.config.get_text_config()  # type: ignore[operator,union-attr]
        width, layers = int(text.hidden_size), int(text.num_hidden_layers)
        inner = int(getattr(text, "intermediate_size", None) or 4 * width)
        layer = 16 * width + 6 * inner
        backbone = self.backbone
        if backbone is not None and backbone.lean is not None and backbone.device.type == "cuda":
            heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
            head_dim = getattr(text, "head_dim", None) or width // heads
            layer = lean_layer(width, inner, (heads + (kv_heads or heads)) * head_dim) * 5 // 4
        checkpointing = backbone is not None and backbone.checkpointing
        return self.dtype.itemsize * (layers * width + layer if checkpointing else layers * layer)

    def short_of_memory(self) -> bool:
        """Whether little of the model's GPU is free, so that others may lack what is kept only for speed."""
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return False
        return free_bytes(device) < SHORT * torch.cuda.get_device_properties(device).total_memory

    def free_memory(self) -> None:
        """Release captured graphs and cached GPU memory."""
        if isinstance(self.scorer, GraphedScorer):
            self.scorer.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
