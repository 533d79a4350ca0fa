"""How a model is run: driven by us where that is possible, plainly where it is not, in batches that fit memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hacrl.config import AgentConfig
from hacrl.decoder import Backbone, CannotDrive
from hacrl.decoder.backbone import checkpointed_layers
from hacrl.decoder.parallel import works_side_by_side
from hacrl.decoder.plain import PlainScorer
from hacrl.decoder.scoring import GraphedScorer, Scorer, TokenLogprobs
from hacrl.errors import TrainingDiverged, UserError, warn

Score = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], float], TokenLogprobs]
"""Prompts, completions and a temperature to log-probabilities."""

CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 16384
"""More in one pass makes nothing faster: on a CPU activations leave the caches, a GPU is busy."""
MEMORY_SHARE = 0.5
"""Share of the free memory for the activations of one pass; the rest is for what the estimate leaves out."""


def free_memory(device: torch.device) -> float:
    """Bytes that could be had now; on systems that do not tell, what any computer has."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + held)
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):
        return 4e9


def local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter: all of it, unless it is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def naming(config: AgentConfig, updates: int) -> Iterator[None]:
    """Say whose logits are not finite: those of the model as it was given, or as training has made it."""
    try:
        yield
    except TrainingDiverged as error:
        if updates:
            raise TrainingDiverged(f"Agent {config.id}: {error}") from error
        raise UserError(
            f"Agent {config.id}: {config.model} gives logits that are not finite, before any update. Use another model."
        ) from error


class Policy:
    """A model with the means to sample from it and to score texts with it."""

    def __init__(
        self,
        model: nn.Module,
        config: AgentConfig,
        stop_ids: Sequence[int],
        lean: bool = True,
        entropy_gradient: bool = False,
    ) -> None:
        self.model, self.config, self.stop_ids = model, config, stop_ids
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.backbone: Backbone | None = None
        if config.fast:
            try:
                self.backbone = Backbone(model, lean)
            except CannotDrive as reason:
                warn(f"Agent {config.id}: falling back to `generate` and to plain learning, because of {reason}.")
        self.side_by_side = self.backbone is not None and works_side_by_side(model)
        self.scorer: Score = PlainScorer(model, stop_ids[0], entropy_gradient)
        if self.backbone is not None:
            self.backbone.checkpointing = bool(config.gradient_checkpointing)
            on_cuda = self.backbone.device.type == "cuda"
            self.scorer = (GraphedScorer if on_cuda else Scorer)(self.backbone, entropy_gradient)
        elif config.gradient_checkpointing:
            layers = checkpointed_layers(model)
            if not layers:
                warn(f"Agent {config.id}: gradient_checkpointing has no effect: its layers do not offer it.")
            for layer, forward in layers.items():
                layer.__dict__["forward"] = forward

    def driven(self) -> AbstractContextManager[None]:
        return nullcontext() if self.backbone is None else self.backbone.driven()

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> TokenLogprobs:
        with self.driven():
            return self.scorer(prompts, completions, temperature)

    @property
    def workers(self) -> int:
        """Batches to work on at the same time."""
        return torch.get_num_threads() if self.side_by_side else 1

    # --- memory ------------------------------------------------------------------------------------

    def choose_batch_tokens(self) -> int:
        """Tokens of one pass, by the memory that is free now; checkpointing is switched on where it is needed."""
        device = next(self.model.parameters()).device
        most, free = (CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS), free_memory(device)
        # Adam's moments come with the first update, and the own part of the gradient is kept for a while.
        free -= 12 * sum(local(parameter).numel() for parameter in self.model.parameters() if parameter.requires_grad)
        longest = self.config.max_prompt_length + self.config.max_completion_length
        fits = int(MEMORY_SHARE * max(free, 0) / self.bytes_per_token())
        if fits < longest and self.backbone is not None and self.config.gradient_checkpointing is None:
            self.backbone.checkpointing = True
            fits = int(MEMORY_SHARE * max(free, 0) / self.bytes_per_token())
            warn(
                f"Agent {self.config.id}: the activations of {longest} tokens would not fit into memory, so "
                "they are computed again in the backward pass (gradient_checkpointing)."
            )
        return min(max(fits, 1), most)

    def bytes_per_token(self) -> int:
        """What a token in a pass keeps until the backward pass: an estimate on the safe side."""
        text = self.model.config.get_text_config()  # type: ignore[operator,union-attr]
        width = int(text.hidden_size)
        inner = int(getattr(text, "intermediate_size", None) or 4 * width)
        size = 2 if self.dtype == torch.bfloat16 else 4
        layer = 16 * width + 6 * inner
        layers = int(text.num_hidden_layers)
        if self.backbone is not None and self.backbone.checkpointing:
            return size * (layers * width + layer)
        return size * layers * layer

    def free_memory(self) -> None:
        """After running out of it."""
        if isinstance(self.scorer, GraphedScorer):
            self.scorer.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
