"""The trained weights, float32 whatever dtype the model computes in: whole, or divided among processes (FSDP)."""

from collections.abc import Callable, Mapping
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


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as the frequencies of rotary embeddings must keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def copy_tied(state: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of a state. A tensor with two names is copied once, so that tied weights stay tied."""
    copies = {key: copy(tensor) for key, tensor in {id(tensor): tensor for tensor in state.values()}.items()}
    return {name: copies[id(tensor)] for name, tensor in state.items()}


class MasterWeights:
    """Float32 weights behind a model that computes in `dtype`; for float32 they are the model's own.

    A bfloat16 weight loses an update of 1e-6, and a large gradient a small one that is added to it; float32 keeps both.
    With `offload`, these weights and their gradients are in the computer's memory.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, offload: bool = False) -> None:
        self.working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.separate = dtype != torch.float32 or offload
        self.weights = self.working
        """The float32 values of `working`, which the optimizer updates."""
        if self.separate:
            place = "cpu" if offload else self.working[0].device
            self.weights = [nn.Parameter(p.detach().to(place, torch.float32, copy=True)) for p in self.working]
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
        """Add the gradients that a backward pass left in the model to those of the weights."""
        if self.separate:
            working: Any = [parameter.grad for parameter in self.working]
            taken = [gradient.to(weight) for gradient, weight in zip(working, self.weights, strict=True)]
            torch._foreach_add_(self.gradients, taken)
            torch._foreach_zero_(working)

    def publish(self) -> None:
        """Copy the weights that an update has changed to the model."""
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.working), list[Tensor](self.weights))

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state in float32, as copies."""
        float32 = dict(zip(map(id, self.working), self.weights, strict=True))
        parameters = {name: float32.get(id(p), p) for name, p in model.named_parameters(remove_duplicate=False)}
        state = {name: parameters.get(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        return copy_tied(state, lambda tensor: tensor.detach().clone())

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
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    @property
    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def zero_grad(self) -> None:
        gradients: Any = self.gradients
        torch._foreach_zero_(gradients)
        for parameter in self.working:
            parameter.grad = None

    def collect(self) -> None:
        for parameter, gradient in zip(self.working, self.gradients, strict=True):
            if parameter.grad is not None:
                gradient += local(parameter.grad)
                parameter.grad = None

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
