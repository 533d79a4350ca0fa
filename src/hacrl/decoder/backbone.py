"""An ordinary transformers decoder in two parts: layers that give hidden states, and a projection to logits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl.decoder.attention import NAME, Plan
from hacrl.decoder.head import Head
from hacrl.decoder.layers import LeanLayers
from hacrl.decoder.packing import Packed

Forwards = dict[nn.Module, Callable[..., Any]]
"""Functions that modules use in place of their own forward."""


def checkpointed_layers(model: nn.Module, others: Forwards | None = None) -> Forwards:
    """A forward for each checkpointable layer that computes activations again in the backward pass.

    `others`: what modules use otherwise, if it is not their own forward.
    """
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return {layer: partial(again, (others or {}).get(layer, layer.forward)) for layer in layers}


class CannotDrive(Exception):
    """Raised if the fast paths do not work with a model; the message says why."""


class Backbone:
    """Runs ("drives") a model with our attention function; raises CannotDrive if the model does not support that.

    The constructor compares the model's outputs with and without our attention, on the model's own weights. Build the
    backbone while the weights are in float32, if they ever are.
    """

    def __init__(self, model: nn.Module, lean: bool = True) -> None:
        self.model: Any = model
        self.body: Any = self.model.base_model
        self.lean: LeanLayers | None = None
        self.lock, self.entered = Lock(), 0
        self.head_sizes = set[int]()
        """Channels of the heads of queries, keys and values in all layers."""
        self.moved = 0
        """How often weights were moved in memory; CUDA graphs captured before a move are invalid."""
        self.checkpointing = False
        """Whether layers keep no activations and compute them again in the backward pass."""
        if problem := self._difference():
            raise CannotDrive(f"{type(model).__name__}: {problem}")
        if lean:
            self.lean = LeanLayers(model)
            if self._difference():
                self.lean = None

    @property
    def head(self) -> Head:
        single = self.lean.single.get(self.model.get_output_embeddings()) if self.lean is not None else None
        return Head.of(self.model, None if single is None else single.packed)

    def packed(self) -> AbstractContextManager[None]:
        """Context for many products of a few rows; weights must not change in it. It takes their size in memory."""
        return nullcontext() if self.lean is None else self.lean.packed()

    @property
    def device(self) -> torch.device:
        return self.head.weight_VD.device

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Context in which the model uses our attention and our leaner layers, and the model's GPU is the current one.

        It is reentrant, and several threads may enter it at a time.
        """
        with self.lock:
            self.entered += 1
            if self.entered == 1:
                self._take_over()
        try:
            # Triton and CUDA graphs use the thread's current GPU, wherever the tensors are.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            with self.lock:
                self.entered -= 1
                if self.entered == 0:
                    self._give_back()

    def recompute(self) -> None:
        """Set `checkpointing`; it also holds for those who drive the model now."""
        with self.lock:
            self.checkpointing = True
            if self.entered:
                self._give_back()
                self._take_over()

    def _take_over(self) -> None:
        forwards: Forwards = {}
        if self.lean is not None:
            self.moved += self.lean.refresh()
            forwards |= self.lean.forwards
        if self.checkpointing:
            forwards |= checkpointed_layers(self.body, forwards)
        self.before = {module: module.__dict__.get("forward") for module in forwards}
        self.attention_before = self.model.config._attn_implementation
        self.model.config._attn_implementation = NAME
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward

    def _give_back(self) -> None:
        self.model.config._attn_implementation = self.attention_before
        for module, forward in self.before.items():
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward

    def hidden(self, ids_BS: Tensor, position_BS: Tensor, plan: Plan) -> Tensor:
        """Last hidden states (B, S, D), after the final norm."""
        output = self.body(input_ids=ids_BS, position_ids=position_BS, use_cache=False, plan=plan)
        hidden_BSD: Tensor = output.last_hidden_state
        return hidden_BSD

    @torch.no_grad()
    def _difference(self) -> str | None:
        """Compare logits of two prompts with three completions, with and without our attention; None if they agree."""
        V = self.head.weight_VD.shape[0]
        texts = [[(7 * i + 3 * n + 1) % V for i in range(6 + 5 * n)] for n in range(2)]
        sequences = [(texts[0], [2 % V, 3 % V, 5 % V]), (texts[0], [4 % V] * 5), (texts[1], [1, 6 % V, 2 % V, 7 % V])]
        packed = Packed.build([p for p, _ in sequences], [c for _, c in sequences], self.device)
        try:
            with self.driven():
                hidden_SD = self.hidden(packed.ids_S[None], packed.position_S[None], packed)[0]
                driven_MV = self.head.logits(hidden_SD[packed.from_M])
            self.head_sizes = packed.head_sizes
        except Exception as error:
            return f"its layers do not work with another attention function ({type(error).__name__}: {error})"
        if getattr(self.model.config.get_text_config(), "sliding_window", None) and not packed.windowed:
            return "it has a sliding window of which its attention says nothing"
        expected = []
        for prompt, completion in sequences:
            ids_1S = torch.tensor([prompt + completion[:-1]], device=self.device)
            expected.append(self.model(input_ids=ids_1S, use_cache=False).logits[0, len(prompt) - 1 :])
        expected_MV = torch.cat(expected).to(driven_MV.dtype)
        gap_MV, spread = (driven_MV - expected_MV).abs(), float(expected_MV.std())
        exact = expected[0].dtype in (torch.float32, torch.float64)
        # In bfloat16 the largest of many rounding errors says little, so their mean square is compared.
        tolerance, distance = (1e-3, float(gap_MV.max())) if exact else (5e-2, float(gap_MV.square().mean().sqrt()))
        if not distance <= tolerance * max(spread, 1e-3):
            return f"its logits come out differently with another attention function (by {distance:.2g})"
        return None
