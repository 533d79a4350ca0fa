"""Products with the weights of linear layers; on a CPU by oneDNN, which is part of torch.

torch itself multiplies float32 matrices with MKL. That uses half the width of AMD's processors, and on any processor it
is slow for a few rows, as in a token step. oneDNN is up to three times as fast there. Small weights are left to MKL: in
steps of the zoo's models oneDNN was hardly faster, or slower, and results stay the same to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

WORTH_IT = 1 << 18
"""Numbers in a weight from which on oneDNN is used: more than in any weight of the zoo."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def by_onednn(weight: Tensor) -> bool:
    """Whether products with a layer's weight, and those of their gradients, are computed by oneDNN."""
    here = HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32
    return here and weight.numel() >= WORTH_IT


def pack(weight: Tensor) -> Tensor | None:
    """A copy of the weight in oneDNN's order, in which products of a few rows read it faster; None where it is no use.

    The copy does not follow the weight: use it only while the weight does not change.
    """
    if not by_onednn(weight):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
    return packed


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None, onednn: bool | None = None
) -> Tensor:
    """x @ weight.T + bias, without a gradient. `onednn`: by oneDNN or not; None: if the weight is large enough."""
    if not (by_onednn(weight) if onednn is None else onednn):
        return F.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight if packed is None else packed, bias, "none", [], "")
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with gradients."""
    if not torch.is_grad_enabled():
        return product(x, weight, bias, packed)
    if not by_onednn(weight):
        return F.linear(x, weight, bias)
    return linear_in_parts(x, weight, bias, [weight], [] if bias is None else [bias])


def linear_in_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """x @ weight.T + bias; the gradients go to `weights` and `biases`, which are the slices of `weight` and `bias`."""
    whole = weight.detach(), None if bias is None else bias.detach()
    result: Tensor = _Linear.apply(x, *whole, [len(part) for part in weights], *weights, *biases)
    return result


class _Linear(torch.autograd.Function):
    """A linear layer whose weight and bias are made of parts: slices of them, which get the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.onednn = sizes, by_onednn(weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        count, (needs_x, _, _, _, *needs) = len(ctx.sizes), ctx.needs_input_grad
        grad_SO = grad.flatten(0, -2)
        grads: list[Tensor | None] = [None] * len(needs)
        if any(needs[:count]):
            grads[:count] = product(grad_SO.t(), x.flatten(0, -2).t(), onednn=ctx.onednn).split(ctx.sizes)
        if any(needs[count:]):
            grads[count:] = grad_SO.sum(0).split(ctx.sizes)
        return product(grad_SO, weight.t()).view(x.shape) if needs_x else None, None, None, None, *grads
