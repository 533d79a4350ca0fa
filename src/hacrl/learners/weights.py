"""The weights that are trained: float32, whatever the model computes in."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: buffers such as the frequencies of rotary embeddings must keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class Weights(Protocol):
    """What an optimizer updates, and the parameters of the model that computes with it."""

    working: list[nn.Parameter]
    """The model's parameters."""
    weights: list[nn.Parameter]
    """Their float32 values."""

    @property
    def gradients(self) -> list[Tensor]: ...
    def zero_grad(self) -> None: ...
    def collect(self) -> None:
        """Take over what a backward pass left in the model."""
        ...

    def publish(self) -> None:
        """Give the model the weights an update has changed."""
        ...

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]: ...
    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None: ...


class MasterWeights:
    """Float32 weights behind a model that computes in `dtype`; for float32 they are the model's own.

    An update of 1e-6 is lost in a bfloat16 weight, and so is a small gradient added to a large one: both happen here.
    With `offload` they are in the computer's memory, and so are their gradients.
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
        """In place: captured graphs add to these very tensors."""
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
        """The model's state in float32, each tensor in memory of its own."""
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
