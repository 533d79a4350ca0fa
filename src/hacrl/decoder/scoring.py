"""Fast log-probabilities of given completions under a model: the learner's side of every ratio."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.decoder.backbone import Backbone
from hacrl.decoder.packing import Packed, Texts
from hacrl.decoder.ragged import Ragged, suits

MAX_GRAPHS = 32
STREAM_OF = cache(torch.cuda.Stream)
"""The stream for captures on a GPU; torch's default is one stream for all, on the first GPU used."""
STARVED = 512 << 20
"""With fewer free bytes than this, a CUDA library can fail without saying that memory is the reason."""


@dataclass
class TokenLogprobs:
    logp_NT: Tensor
    mask_NT: Tensor
    entropy_NT: Tensor
    """Entropy of the next-token distribution at each position; it has a gradient only with `entropy_gradient`."""


class Scorer:
    """Scores completions in one packed row of tokens: each distinct prompt once, and never all logits in memory."""

    def __init__(self, backbone: Backbone, entropy_gradient: bool = False) -> None:
        self.backbone, self.entropy_gradient = backbone, entropy_gradient

    def __call__(self, prompts: Texts, completions: Texts, temperature: float) -> TokenLogprobs:
        """log p(token | prompt, tokens before it) at the given temperature, for N completions."""
        packed = self._pack(prompts, completions)
        logp_M, entropy_M = self._score(packed, temperature)
        is_token_M = torch.ones_like(packed.at_M, dtype=torch.bool)
        return TokenLogprobs(*(table(packed, values_M) for values_M in (logp_M, is_token_M, entropy_M)))

    def _pack(self, prompts: Texts, completions: Texts) -> Packed | Ragged:
        kind = Ragged if suits(self.backbone) else Packed
        return kind.build(prompts, completions, self.backbone.device)

    def _score(self, packed: Packed | Ragged, temperature: float) -> tuple[Tensor, Tensor]:
        hidden_1SD = self.backbone.hidden(packed.ids_S[None], packed.position_S[None], packed)
        hidden_MD = hidden_1SD[0].index_select(0, packed.from_M)
        return self.backbone.head.logprobs(hidden_MD, packed.target_M, temperature, self.entropy_gradient)


def table(packed: Packed | Ragged, values_M: Tensor) -> Tensor:
    """Arrange values of the completion tokens as an (N, T) table, 0 where there is no token."""
    N, T = packed.shape
    return values_M.new_zeros(N * T).index_copy(0, packed.at_M, values_M[: len(packed.at_M)]).view(N, T)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Capture what runs inside as the graph; raises torch.OutOfMemoryError if memory runs out."""
    try:
        with torch.cuda.graph(graph, pool, STREAM_OF(device), capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        raise cause_of(error, device) from None


def cause_of(error: RuntimeError, device: torch.device) -> BaseException:
    """The error behind a failed capture, which hides it; other processes may have taken the memory meanwhile."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, torch.OutOfMemoryError):
            return chain
        chain = chain.__context__
    with suppress(RuntimeError):  # if CUDA no longer works, report the original error
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < STARVED:
            return torch.OutOfMemoryError(f"a CUDA graph could not be captured, {free >> 20} MiB are free: {error}")
    return error


@dataclass
class Captured:
    """CUDA graphs of the forward and backward pass for one shape, and the tensors they read and write."""

    packed: Packed
    logp_M: Tensor
    entropy_M: Tensor
    grad_M: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None

    def load(self, packed: Packed) -> None:
        for name, memory in vars(self.packed).items():
            if isinstance(memory, Tensor) and name != "at_M":
                memory.copy_(getattr(packed, name))


class GraphedScorer(Scorer):
    """A `Scorer` on CUDA that replays each pass as a graph, in one launch; shapes are rounded up so that they are few.

    The backward graph adds to the parameters' `grad` tensors, so these must persist: zero them, never set them to None.
    """

    def __init__(self, backbone: Backbone, entropy_gradient: bool = False) -> None:
        super().__init__(backbone, entropy_gradient)
        self.captured: dict[tuple[object, ...], Captured] = {}
        self.warm, self.moved, self.pool = False, backbone.moved, torch.cuda.graph_pool_handle()
        self.anchor = torch.zeros((), device=backbone.device, requires_grad=True)
        # In a small model a pass of fewer tokens is not faster, and each new shape needs a capture.
        parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
        self.least = 1024 if parameters < 2.5e8 else 256

    def forget(self) -> None:
        """Drop all captured graphs and free their memory."""
        self.captured.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def _pack(self, prompts: Texts, completions: Texts) -> Packed:
        return Packed.build(prompts, completions, self.backbone.device)

    def _score(self, packed: Packed | Ragged, temperature: float) -> tuple[Tensor, Tensor]:
        assert isinstance(packed, Packed)
        if self.moved != self.backbone.moved:
            self.moved = self.backbone.moved
            self.forget()
        if self.entropy_gradient and torch.is_grad_enabled():  # the backward graph has only the gradient of logp
            return super()._score(packed, temperature)
        packed = packed.padded(*common_shape(packed, self.least))
        key = (packed.ids_S.shape, packed.rows_NR.shape, packed.again_A.shape, temperature, torch.is_grad_enabled())
        if key not in self.captured:
            if not self.warm:  # the first pass loads kernels and libraries, which a capture must not
                self.warm = True
                return super()._score(packed, temperature)
            if len(self.captured) >= MAX_GRAPHS:
                self.forget()
            self.captured[key] = self._captured(packed, temperature)
        self.captured[key].load(packed)
        logp_M, entropy_M = _Replay.apply(self.anchor, self.captured[key])
        return logp_M, entropy_M

    def _captured(self, packed: Packed, temperature: float) -> Captured:
        forward, backward, device = torch.cuda.CUDAGraph(), None, self.backbone.device
        with fresh_leaves(self.backbone.model) as leaves:
            with capturing(forward, self.pool, device):
                logp_M, entropy_M = Scorer._score(self, packed, temperature)
            grad_M = torch.zeros_like(logp_M)
            if torch.is_grad_enabled():
                trained = [(parameter, leaf) for parameter, leaf in leaves.items() if parameter.requires_grad]
                for parameter, _ in trained:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                backward = torch.cuda.CUDAGraph()
                with capturing(backward, self.pool, device):
                    gradients = torch.autograd.grad(logp_M, [leaf for _, leaf in trained], grad_M, allow_unused=True)
                    used = [(p, g) for (p, _), g in zip(trained, gradients, strict=True) if g is not None]
                    totals: Any = [parameter.grad for parameter, _ in used]
                    torch._foreach_add_(totals, [gradient for _, gradient in used])
        return Captured(packed, logp_M.detach(), entropy_M, grad_M, forward, backward)


@contextmanager
def fresh_leaves(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Use other parameters on the same memory: autograd ties a parameter to the stream of its first use."""
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    for module, name, parameter in places:
        if parameter not in leaves:
            leaves[parameter] = nn.Parameter(parameter.data, parameter.requires_grad)
        module._parameters[name] = leaves[parameter]
    try:
        yield leaves
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: Captured) -> tuple[Tensor, Tensor]:
        captured.forward.replay()
        ctx.captured = captured
        entropy_M = captured.entropy_M.clone()
        ctx.mark_non_differentiable(entropy_M)
        return captured.logp_M.clone(), entropy_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[None, None]:
        captured: Captured = ctx.captured
        assert captured.backward is not None
        captured.grad_M.copy_(grad_M)
        captured.backward.replay()
        return None, None


def common_shape(packed: Packed, least: int = 256) -> tuple[int, int, int, int, int]:
    """Sizes S, M, N, R and A for `Packed.padded`: few different ones, at most a third above the need or `least`."""
    N, R = packed.rows_NR.shape
    tokens = bucket(max(len(packed.ids_S) + 1, len(packed.target_M), least))
    length = -(-(R + 1) // 64) * 64 if R < 256 else bucket(R + 1)
    again = len(packed.again_A)
    return tokens, tokens, bucket(max(N, min(32, tokens // length))), length, max(tokens, bucket(again)) if again else 0


def bucket(n: int) -> int:
    """Round up to the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ..."""
    size = 1
    while size < n:
        size *= 2
    return size * 3 // 4 if size >= 32 and n <= size * 3 // 4 else size
