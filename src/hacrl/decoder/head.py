"""Computes log-probabilities from hidden states without holding all logits in memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacrl.decoder.products import by_onednn, product

try:
    from hacrl.decoder import kernels
except ImportError:  # no Triton: not a CUDA machine
    kernels = None  # type: ignore[assignment]

CHUNK_ELEMENTS = 1 << 25
"""Number of logits in memory at a time: 128 MiB in float32."""
CUDA_ROWS = 768
"""Rows at a time on CUDA, at least: with each chunk, the gradient of the whole weight is read and written."""


@dataclass
class Head:
    """The output layer of a model: turns hidden states into logits."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    packed: Tensor | None = None
    """The weight as `products.pack` arranges it, while it does not change."""

    @classmethod
    def of(cls, model: Any, packed: Tensor | None = None) -> "Head":
        linear, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(linear.weight, getattr(linear, "bias", None), float(scale), softcap, packed)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Logits in float32, or in float64 for a float64 model."""
        logits_MV = wide_product(hidden_MD, self.weight_VD, self.packed)
        if self.bias_V is not None:
            logits_MV = logits_MV + self.bias_V
        if self.scale != 1.0:
            logits_MV = logits_MV * self.scale
        return logits_MV if self.softcap is None else self.softcap * torch.tanh(logits_MV / self.softcap)

    def logprobs(
        self, hidden_MD: Tensor, target_M: Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """log p(target) and entropy at the temperature, M of each; the entropy has a gradient only if requested."""
        logp_M, entropy_M = _ChunkedLogprobs.apply(
            hidden_MD, self.weight_VD, self.bias_V, target_M, temperature, self.scale, self.softcap, entropy_gradient
        )
        return logp_M, entropy_M


def wide_product(a: Tensor, b: Tensor, packed: Tensor | None = None, onednn: bool | None = None) -> Tensor:
    """a @ b.T with a float32 result for bfloat16 matrices: rounding logits to bfloat16 would lose two digits."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    if a.dtype in (torch.float32, torch.float64):
        return product(a, b, packed=packed, onednn=onednn)
    return product(a.float(), b.float(), onednn=onednn)


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes the logits chunk by chunk, once in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_M: Tensor,
        temperature: float, scale: float, softcap: float | None, entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head, chunks = Head(weight_VD, bias_V, scale, softcap), _chunks(weight_VD.shape[0], hidden_MD, target_M)
        scored = [_logprobs(head.logits(hidden), target, temperature) for hidden, target in chunks]
        logp_M, norm_M, entropy_M = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, norm_M, entropy_M)
        ctx.options = temperature, scale, softcap, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, grad_entropy_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, target_M, norm_M, entropy_M = ctx.saved_tensors
        temperature, scale, softcap, entropy_gradient = ctx.options
        head = Head(weight_VD, bias_V, scale, softcap)
        grad_hidden_MD = torch.empty_like(hidden_MD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_M.dtype) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=norm_M.dtype) if ctx.needs_input_grad[2] else None
        tensors = (grad_hidden_MD, hidden_MD, target_M, norm_M, grad_M, entropy_M, grad_entropy_M)
        for grad_hidden, hidden, target, norm, grad, entropy, grad_entropy in _chunks(weight_VD.shape[0], *tensors):
            logits = head.logits(hidden)
            delta = _logit_gradient(head, logits, target, norm, grad, temperature)
            if entropy_gradient:
                delta = (delta + _entropy_gradient(head, logits, norm, entropy, grad_entropy, temperature)).to(delta)
            grad_hidden[:] = product(delta, weight_VD.t())
            if grad_weight_VD is None:
                pass  # only adapters are trained
            elif hidden.is_cuda and hidden.dtype == grad_weight_VD.dtype:
                grad_weight_VD.addmm_(delta.t(), hidden)
            else:
                grad_weight_VD += wide_product(delta.t(), hidden.t(), onednn=by_onednn(weight_VD))
            if grad_bias_V is not None:
                grad_bias_V += delta.sum(0)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, grad_weight, grad_bias, None, None, None, None, None


def _logprobs(logits_MV: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), log-sum-exp and entropy; overwrites the logits."""
    if logits_MV.is_cuda and logits_MV.dtype == torch.float32 and kernels is not None:
        return kernels.logprobs(logits_MV, target_M, temperature)
    logits_MV = logits_MV.div_(temperature)
    norm_M = logits_MV.logsumexp(1)
    logp_M = logits_MV.gather(1, target_M[:, None]).squeeze(1) - norm_M
    # H = log Z - E[logit]
    probs_MV = (logits_MV - norm_M[:, None]).exp_()
    return logp_M, norm_M, norm_M - probs_MV.mul_(logits_MV).sum(1)


def _logit_gradient(
    head: Head, logits_MV: Tensor, target_M: Tensor, norm_M: Tensor, grad_M: Tensor, temperature: float
) -> Tensor:
    """Gradient of log p with respect to the projection's output: (1[target] - p) / temperature, times `grad_M`."""
    dtype = head.weight_VD.dtype
    if logits_MV.is_cuda and logits_MV.dtype == torch.float32 and kernels is not None:
        return kernels.logit_gradient(logits_MV, target_M, norm_M, grad_M, temperature, head.scale, head.softcap, dtype)
    probs_MV = (logits_MV / temperature).sub_(norm_M[:, None]).exp_()
    step_M = grad_M.to(probs_MV.dtype) * (head.scale / temperature)
    delta_MV = probs_MV.mul_(-step_M[:, None])
    delta_MV.scatter_add_(1, target_M[:, None], step_M[:, None])
    if head.softcap is not None:
        delta_MV *= 1 - (logits_MV / head.softcap) ** 2
    return delta_MV.to(dtype)


def _entropy_gradient(
    head: Head, logits_MV: Tensor, norm_M: Tensor, entropy_M: Tensor, grad_M: Tensor, temperature: float
) -> Tensor:
    """Gradient of the entropy H with respect to the projection's output: `grad_M` x -p (log p + H) / temperature."""
    logp_MV = logits_MV / temperature - norm_M[:, None]
    step_M = grad_M * (-head.scale / temperature)
    delta_MV = logp_MV.exp() * (logp_MV + entropy_M[:, None]) * step_M[:, None]
    return delta_MV if head.softcap is None else delta_MV * (1 - (logits_MV / head.softcap) ** 2)


def _chunks(vocabulary: int, *tensors: Tensor) -> Any:
    """Split the tensors into slices of rows whose logits are in memory at a time."""
    size = max(CHUNK_ELEMENTS // vocabulary, CUDA_ROWS if tensors[0].is_cuda else 1)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
