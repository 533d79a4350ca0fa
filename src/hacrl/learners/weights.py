"""The trained weights, float32 whatever dtype the model computes in: whole, or divided among processes (FSDP)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl.decoder.policy import Policy, local
from hacrl.decoder.scoring import TokenLogprobs
from hacrl.learners.ranks import Ranks

PORTION = 1 << 27
"""Weights that are updated at a time if their gradients must become float32 first: 512 MiB of gradients."""


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as the frequencies of rotary embeddings must keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def copy_tied(state: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of a state. A tensor with two names is copied once, so that tied weights stay tied."""
    copies = {key: copy(tensor) for key, tensor in {id(tensor): tensor for tensor in state.values()}.items()}
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def _hand_over(weight: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient, which was just computed, to that of its float32 weight, and free it."""
    assert weight.grad is not None
    assert parameter.grad is not None
    weight.grad.add_(parameter.grad.to(weight.device))
    parameter.grad = None


class MasterWeights:
    """Float32 weights behind a model that computes in `dtype`; for float32 they are the model's own.

    A bfloat16 weight loses an update of 1e-6, and a large gradient a small one that is added to it; float32 keeps both.
    So each gradient of a bfloat16 model is added to a float32 sum as soon as it is known, and freed. With
    `gradient_dtype` bfloat16, gradients are added up in the model instead, which takes 2 bytes a parameter in place
    of 4. With `offload`, these weights, and float32 gradients, are in the computer's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        offload: bool = False,
        gradient_dtype: torch.dtype = torch.float32,
        captured: bool = False,
    ) -> None:
        """`captured`: CUDA graphs add gradients to the model's own `grad` tensors, which must stay where they are."""
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.separate = dtype != torch.float32 or offload
        self.weights = self.working
        """The float32 values of `working`, which the optimizer updates."""
        self._sums = self.working
        """The parameters whose `grad` tensors add up the gradients of an update."""
        self._fixed = self.working if captured else []
        """The parameters whose `grad` tensors are in captured graphs."""
        if not self.separate:
            return
        place = "cpu" if offload else self.working[0].device
        self.weights = [nn.Parameter(p.detach().to(place, torch.float32, copy=True)) for p in self.working]
        cast_parameters(model, dtype)
        if gradient_dtype == torch.float32:
            self._sums = self.weights
            for parameter, weight in zip(self.working, self.weights, strict=True) if not captured else ():
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, weight))

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._sums if parameter.grad is not None]

    def zero_grad(self) -> None:
        """Set gradients to 0; in place where they exist, because captured graphs add to these tensors."""
        kept = {*self._sums, *self._fixed}
        for parameter in {*self.working} - kept:
            parameter.grad = None  # left by a pass that failed
        for parameter in kept:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients: Any = [parameter.grad for parameter in kept]
        torch._foreach_zero_(gradients)

    def release_gradients(self) -> None:
        """Free the memory of gradients until `zero_grad`, except where captured graphs need it."""
        for parameter in {*self.working, *self._sums} - {*self._fixed}:
            parameter.grad = None

    def collect(self) -> None:
        """Add the gradients that a backward pass left in the model to those of the weights."""
        if self._fixed and self._sums is not self._fixed:
            working: Any = [parameter.grad for parameter in self.working]
            self.add(working)
            torch._foreach_zero_(working)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients, one for each weight."""
        pairs = zip(self.gradients, gradients, strict=True)
        torch._foreach_add_(self.gradients, [gradient.to(total) for total, gradient in pairs])

    def portions(self) -> Iterator[list[nn.Parameter]]:
        """Yield the weights to update next, with float32 gradients; all at once if gradients are float32 anyway."""
        if self._sums is self.weights:
            yield self.weights
            return
        portion: list[nn.Parameter] = []
        for parameter, weight in zip(self.working, self.weights, strict=True):
            assert parameter.grad is not None
            weight.grad = parameter.grad.to(weight)
            portion.append(weight)
            if sum(own.numel() for own in portion) >= PORTION or weight is self.weights[-1]:
                yield portion
                for own in portion:
                    own.grad = None
                portion = []

    def move(self, device: torch.device) -> None:
        """Move the float32 weights, if the model has others, to a device; free gradients that are not at work."""
        self.release_gradients()
        if self.separate:
            for weight in self.weights:
                weight.data = weight.data.to(device)

    def publish(self) -> None:
        """Copy the weights that an update has changed to the model."""
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.working), list[Tensor](self.weights))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state in float32, as copies in the computer's memory."""
        float32 = dict(zip(map(id, self.working), self.weights, strict=True))
        parameters = {name: float32.get(id(p), p) for name, p in model.named_parameters(remove_duplicate=False)}
        state = {name: parameters.get(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        return copy_tied(state, lambda tensor: tensor.detach().to("cpu", copy=True))

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)
        if self.separate:
            float32 = dict(zip(map(id, self.working), self.weights, strict=True))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if id(parameter) in float32:
                        float32[id(parameter)].copy_(state[name])


def shard(policy: Policy, ranks: Ranks, device: torch.device) -> None:
    """Distribute the layers of a policy's model over the ranks. A pass gathers one layer after the other."""
    model: Any = policy.model
    policy.side_by_side = False
    mesh = init_device_mesh(device.type, (ranks.size,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if policy.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(policy.dtype, torch.float32)
    for module in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] + [model]:
        part: FSDPModule = fully_shard(module, **options)
        # The objective is a sum over rollouts, not a mean over ranks.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    if policy.backbone is None:
        return
    score = policy.scorer

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        scored = score(*args)
        return scored.logp_NT.clone(), scored.mask_NT, scored.entropy_NT.clone()  # FSDP warns of views

    model.score = forward
    register_fsdp_forward_method(model, "score")
    policy.scorer = lambda *args: TokenLogprobs(*model.score(*args))


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor in every process. All processes must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


class ShardedWeights:
    """This process's part of the weights: plain float32 tensors that share the memory of the sharded ones."""

    def __init__(self, model: nn.Module) -> None:
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.weights = [nn.Parameter(local(parameter.detach())) for parameter in self.working]

    @property
    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        for parameter in self.working:
            parameter.grad = None

    def collect(self) -> None:
        for parameter, gradient in zip(self.working, self.gradients, strict=True):
            if parameter.grad is not None:
                gradient += local(parameter.grad)
                parameter.grad = None

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients, one for each weight."""
        torch._foreach_add_(self.gradients, list(gradients))

    def release_gradients(self) -> None:
        """Free the memory of gradients until `zero_grad`."""
        for weight in self.weights:
            weight.grad = None

    def portions(self) -> Iterator[list[nn.Parameter]]:
        """Yield the weights to update, all at once."""
        yield self.weights

    def move(self, device: torch.device) -> None:
        """Free gradients; the weights stay, because the model computes with them."""
        self.release_gradients()

    def publish(self) -> None:
        """Do nothing: the model shares the memory of the weights."""

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole model's state in the first process, empty tensors in the others. All processes must call this."""
        first = dist.get_rank() == 0

        def gathered(tensor: Tensor) -> Tensor:
            everything = whole(tensor)
            return everything.cpu() if first else torch.empty(0)

        return copy_tied(model.state_dict(keep_vars=True), gathered)

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            given = state[name].to(parameter.device)
            part = distribute_tensor(given, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                local(parameter.detach()).copy_(part.to_local())


Weights = MasterWeights | ShardedWeights
"""The weights that an optimizer updates, and the parameters that the model computes with."""
