"""Weights, gradients and moments of one model, divided among several processes (FSDP)."""

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
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in copies:  # tied weights stay tied
                gathered = whole(value)
                copies[id(value)] = gathered.cpu() if dist.get_rank() == 0 else torch.empty(0)
            state[name] = copies[id(value)]
        return state

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            given = state[name].to(parameter.device)
            part = distribute_tensor(given, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                local(parameter.detach()).copy_(part.to_local())
