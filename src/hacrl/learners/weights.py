"""The trained weights, which are float32 whatever dtype the model computes in."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as the frequencies of rotary embeddings must keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class Weights(Protocol):
    """The weights that an optimizer updates, and the parameters that the model computes with."""

    working: list[nn.Parameter]
    """The model's parameters."""
    weights: list[nn.Parameter]
    """The float32 values of `working`, which the optimizer updates."""

    @property
    def gradients(self) -> list[Tensor]: ...
    def zero_grad(self) -> None: ...
    def collect(self) -> None:
        """Add the gradients that a backward pass left in the model to those of the weights."""
        ...

    def publish(self) -> None:
        """Copy the weights that an update has changed to the model."""
        ...

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]: ...
    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None: ...


class MasterWeights:
    """Float32 weights behind a model that computes in `dtype`; for float32 they are the model's own.

    A bfloat16 weight loses an update of 1e-6, and a large gradient a small one that is added to it; float32 keeps both.
    With `offload`, these weights and their gradients are in the computer's memory.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, offload: bool = False) -> None:
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.separate = dtype != torch.float32 or offload
        self.weights = self.working
        if self.separate:
            place = "cpu" if offload else self.working[0].device
            self.weights = [
                nn.Parameter(parameter.detach().to(place, torch.float32, copy=True)) for parameter in self.working
            ]
            cast_parameters(model, dtype)
        for parameter in {*self.working, *self.weights}:
            parameter.grad = torch.zeros_like(parameter)

    @property
    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def zero_grad(self) -> None:
        """Set gradients to 0 in place, because captured graphs add to these tensors."""
        gradients: Any = [parameter.grad for parameter in {*self.working, *self.weights}]
        torch._foreach_zero_(gradients)

    def collect(self) -> None:
        if self.separate:
            working: Any = [parameter.grad for parameter in self.working]
            taken = [gradient.to(weight) for gradient, weight in zip(working, self.weights, strict=True)]
            torch._foreach_add_(self.gradients, taken)
            torch._foreach_zero_(working)

    def publish(self) -> None:
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.working), list[Tensor](self.weights))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state in float32, as copies."""
        float32 = dict(zip(map(id, self.working), self.weights, strict=True))
        parameters = {name: float32.get(id(p), p) for name, p in model.named_parameters(remove_duplicate=False)}
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            source: Any = parameters.get(name, tensor)
            if id(source) not in copies:  # tied weights stay tied
                copies[id(source)] = source.detach().clone()
            state[name] = copies[id(source)]
        return state

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)
        if self.separate:
            float32 = dict(zip(map(id, self.working), self.weights, strict=True))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if id(parameter) in float32:
                        float32[id(parameter)].copy_(state[name])
