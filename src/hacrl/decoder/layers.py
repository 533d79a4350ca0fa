"""Faster versions of the usual decoder layers, in use only while a `Backbone` drives the model.

A replacement computes what the layer's own code does, in fewer passes over memory: one product for queries, keys and
values, one for gate and up, fused norms, rotations and gates. `Backbone` compares the outputs before it relies on them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hacrl.decoder.attention import Rule
from hacrl.decoder.products import linear, linear_in_parts, pack

try:
    from hacrl.decoder import kernels
except ImportError:  # no Triton: not a CUDA machine
    kernels = None  # type: ignore[assignment]

Forward = Callable[..., Any]

USUAL_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers that add the output of attention, and then that of the MLP, to their input, each after one norm."""


class LeanLayers:
    """The faster forward functions for the modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.joined: list[Joined] = []
        modules = list(model.modules())
        new = ((m, lean_norm(m) or lean_attention(m, self.joined) or lean_mlp(m, self.joined)) for m in modules)
        self.forwards = {module: forward for module, forward in new if forward is not None}
        inside = {layer for joined in self.joined for layer in joined.layers}
        self.single: dict[nn.Module, Single] = {
            m: Single(m) for m in modules if type(m) is nn.Linear and on_cpu(m) and m not in inside
        }
        self.forwards |= self.single
        layers = ((m, lean_layer(m, self.forwards)) for m in modules)
        self.forwards |= {layer: forward for layer, forward in layers if forward is not None}

    def refresh(self) -> bool:
        """Join weights again that were separated, for example by a change of dtype; returns True if any were."""
        apart = [joined for joined in self.joined if not joined.intact]
        for joined in apart:
            joined.join()
        return bool(apart)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Context in which weights do not change, and products read a copy of them where that is faster."""
        products: list[Joined | Single] = [*self.joined, *self.single.values()]
        try:
            for each in products:
                each.packed = pack(each.weight)
            yield
        finally:
            for each in products:
                each.packed = None


class Single:
    """A linear layer on a CPU."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.packed: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.layer.weight, self.layer.bias, self.packed)


class Joined:
    """Several linear layers with the same input, run as one: their weights become slices of one matrix, not copies.

    The layers keep their parameters, and their gradients reach them.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.packed: Tensor | None = None
        self.join()

    def join(self) -> None:
        self.weight, self.bias = self._join("weight"), self._join("bias")

    def release(self) -> None:
        """Release the joined matrix while the layers have no weights."""
        self.weight = self.bias = None

    def _join(self, name: str) -> Any:
        parts: list[Any] = [getattr(layer, name) for layer in self.layers]
        if parts[0] is None:
            return None
        with torch.no_grad():
            if are_neighbours(parts):  # joined already, by another model on the same weights
                return parts[0].data.as_strided((sum(self.sizes), *parts[0].shape[1:]), parts[0].stride())
            joined = torch.cat(parts)
            for part, slot in zip(parts, joined.split(self.sizes), strict=True):
                part.data = slot
        return joined

    @property
    def intact(self) -> bool:
        """Whether the parameters are still slices of the joined matrix; moving or replacing them ends this."""
        weights, whole = [layer.weight for layer in self.layers], self.weight
        return whole is not None and weights[0].data_ptr() == whole.data_ptr() and are_neighbours(weights)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.layers[0].weight.requires_grad:
            biases = [] if self.bias is None else [layer.bias for layer in self.layers]
            return linear_in_parts(x, self.weight, self.bias, [layer.weight for layer in self.layers], biases)
        return linear(x, self.weight, self.bias, self.packed)


def are_neighbours(parts: list[Tensor]) -> bool:
    """Whether the tensors are adjacent slices of one tensor."""
    place, memory = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != memory:
            return False
        place += part.numel() * part.element_size()
    return True


def on_cpu(layer: nn.Linear) -> bool:
    return layer.weight.device.type == "cpu"


def joinable(module: nn.Module, layers: list[Any], others: Sequence[str]) -> bool:
    """Whether these layers of the module can run as one, and it has the other attributes too."""
    linear = all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1
    return linear and all(hasattr(module, name) for name in others)


class Norm:
    """Fused forward of a root-mean-square norm with weight w, as in Llama, or 1 + w, as in Gemma."""

    def __init__(self, module: Any, eps: float, shift: float) -> None:
        self.module, self.eps, self.shift = module, eps, shift

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.weight
        return weight + self.shift if self.shift else weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.module.weight.shape, self.weight, self.eps)


def lean_norm(module: Any) -> Norm | None:
    """Return the fused forward of a root-mean-square norm; None for other modules."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or eps is None:
        return None
    with torch.no_grad():
        ends = torch.linspace(-2, 3, 2 * weight.numel(), device=weight.device, dtype=weight.dtype)
        probe = ends.view(2, *weight.shape)
        expected = module(probe)
        for norm in (Norm(module, eps, 0.0), Norm(module, eps, 1.0)):
            candidate = norm(probe)
            if candidate.dtype == expected.dtype and torch.allclose(candidate, expected, rtol=2e-2, atol=1e-3):
                return norm
    return None


def by_kernels(x: Tensor) -> bool:
    """Whether Triton kernels, and products that add a residual, are used for this tensor."""
    return x.is_cuda and kernels is not None


def lean_layer(layer: Any, forwards: Mapping[nn.Module, Forward]) -> Forward | None:
    """Forward of the usual decoder layer on CUDA in which the products at the end of its halves add the residuals."""
    if type(layer).__name__ not in USUAL_LAYERS or not {layer.self_attn, layer.mlp} <= forwards.keys():
        return None
    if any(
        type(last) is not nn.Linear or last.bias is not None for last in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ):
        return None
    original = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("plan") is None or not by_kernels(hidden_states):
            return original(hidden_states, *args, **kwargs)
        halfway, _ = layer.self_attn(layer.input_layernorm(hidden_states), *args, residual=hidden_states, **kwargs)
        return layer.mlp(layer.post_attention_layernorm(halfway), residual=halfway)

    return forward


def added(last: Any, x: Tensor, residual: Tensor | None) -> Any:
    """The output of a half's last product, plus the residual if there is one."""
    if residual is None:
        return last(x)
    return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), last.weight.t()).view(residual.shape)


def norms_of(*modules: Any) -> list[Norm] | None:
    """The fused forwards of these norms, if they can be computed together."""
    norms = [norm for norm in map(lean_norm, modules) if norm is not None]
    return norms if len(norms) == len(modules) and len({norm.eps for norm in norms}) == 1 else None


def lean_attention(attention: Any, joined: list[Joined]) -> Forward | None:
    """Faster forward of attention with separate q, k and v projections and whole heads rotated by halves, or None."""
    layers: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if not joinable(attention, layers, ("o_proj", "head_dim", "scaling")) or (q_norm is None) != (k_norm is None):
        return None
    if not hasattr(attention, "sliding_window") and getattr(attention.config, "sliding_window", None):
        return None  # only the module's own code knows which layers have the window
    joined.append(project := Joined(layers))
    D = attention.head_dim
    H, K = (layer.out_features // D for layer in layers[:2])
    window, softcap = getattr(attention, "sliding_window", None), getattr(attention, "attn_logit_softcapping", None)
    rule = Rule(attention.scaling, window, softcap)
    over_heads = q_norm is not None and q_norm.weight.numel() == D
    norms = norms_of(q_norm, k_norm) if over_heads else None
    original = attention.forward

    def forward(
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *args: Any,
        residual: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        plan = kwargs.get("plan")
        if plan is None or position_embeddings is None or position_embeddings[0].shape[-1] != D:
            output, weights = original(hidden_states, position_embeddings, *args, **kwargs)
            return output if residual is None else residual + output, weights
        B, S, _ = hidden_states.shape
        cos, sin = (x.expand(B, S, D).reshape(B * S, D) for x in position_embeddings)
        both, value = project(hidden_states).split([H * D + K * D, K * D], dim=2)
        fused = norms is not None and by_kernels(both)
        if fused or q_norm is None or k_norm is None:  # queries and keys are adjacent, so one call turns both
            given = (norms[0].weight, norms[1].weight, norms[0].eps) if fused and norms else (None, None, 0.0)
            turned = _Turn.apply(both.view(B * S, H + K, D), cos, sin, H, *given)
            query, key = turned.view(B, S, H + K, D).split([H, K], dim=2)
        else:
            query, key = both.split([H * D, K * D], dim=2)
            query = q_norm(query.unflatten(2, (-1, D)) if over_heads else query)
            key = k_norm(key.unflatten(2, (-1, D)) if over_heads else key)
            parts = (x.reshape(B * S, -1, D) for x in (query, key))
            query, key = (_Turn.apply(x, cos, sin, 0, None, None, 0.0).view(B, S, -1, D) for x in parts)
        heads = (x.transpose(1, 2) for x in (query, key, value.unflatten(2, (-1, D))))
        output = plan.attend(attention, *heads, rule)
        return added(attention.o_proj, output.reshape(B, S, -1), residual), None

    return forward


class _Turn(torch.autograd.Function):
    """Rotary embedding by halves, on CUDA after the norms of queries and keys if their weights are given."""

    @staticmethod
    def forward(
        ctx: Any, x_SHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, queries: int,
        query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    ) -> Tensor:  # fmt: skip
        weights = () if query_weight is None or key_weight is None else (query_weight, key_weight)
        ctx.save_for_backward(cos_SD, sin_SD, *((x_SHD, *weights) if weights else ()))
        ctx.queries, ctx.eps = queries, eps
        if by_kernels(x_SHD):
            return kernels.turn(x_SHD, cos_SD, sin_SD, queries, (*weights, eps) if weights else None)
        return _rotated(x_SHD, cos_SD, sin_SD, 1)

    @staticmethod
    def backward(ctx: Any, grad_SHD: Tensor) -> tuple[Tensor | None, ...]:
        cos_SD, sin_SD, *rest = ctx.saved_tensors
        if not by_kernels(grad_SHD):
            return _rotated(grad_SHD, cos_SD, sin_SD, -1), *[None] * 6
        x_SHD, *weights = rest or [grad_SHD]
        norms = (*weights, ctx.eps) if rest else None
        grad_x, *of_weights = kernels.turn_back(grad_SHD, x_SHD, cos_SD, sin_SD, ctx.queries, norms)
        of_weights = [None if own is None else own.to(weight) for own, weight in zip(of_weights, weights, strict=False)]
        return grad_x, None, None, None, *(of_weights or [None, None]), None


def _rotated(x_SHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: int) -> Tensor:
    half = x_SHD.shape[2] // 2
    cos, sin = cos_SD[:, None, :half], sin_SD[:, None, :half]
    a, b = x_SHD[..., :half], x_SHD[..., half:]
    output = torch.empty(x_SHD.shape, dtype=x_SHD.dtype, device=x_SHD.device)
    torch.mul(a, cos, out=output[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=output[..., half:]).addcmul_(a, sin, value=sign)
    return output


def lean_mlp(mlp: Any, joined: list[Joined]) -> Forward | None:
    """Faster forward of a gated MLP, down(silu(gate(x)) * up(x)), or None."""
    layers: list[Any] = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj")]
    if not joinable(mlp, layers, ("down_proj", "act_fn")):
        return None
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        return None
    joined.append(project := Joined(layers))

    def forward(x: Tensor, residual: Tensor | None = None) -> Any:
        both = project(x)
        inner = _SwiGLU.apply(both.view(-1, both.shape[-1])).view(*x.shape[:-1], -1)
        return added(mlp.down_proj, inner, residual)

    return forward


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, with gate and up side by side in one tensor, which is all that is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, both_SG: Tensor) -> Tensor:
        ctx.save_for_backward(both_SG)
        gate_SF, up_SF = both_SG.chunk(2, dim=1)
        if by_kernels(both_SG):
            return kernels.swiglu(gate_SF, up_SF)
        return F.silu(gate_SF).mul_(up_SF)

    @staticmethod
    def backward(ctx: Any, grad_SF: Tensor) -> Tensor:
        (both_SG,) = ctx.saved_tensors
        gate_SF, up_SF = both_SG.chunk(2, dim=1)
        if by_kernels(both_SG):
            return kernels.swiglu_backward(gate_SF, up_SF, grad_SF)
        grad_gate_SF = torch.ops.aten.silu_backward(grad_SF * up_SF, gate_SF)
        return torch.cat([grad_gate_SF, F.silu(gate_SF).mul_(grad_SF)], dim=1)
