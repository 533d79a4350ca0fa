"""The GPU that work goes to, and capturing CUDA graphs there, with the reason where it fails."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch

STARVED = 512 << 20
"""With so few bytes free a CUDA library can fail without saying that memory is what it lacks."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton and CUDA graphs go to the thread's current GPU, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each GPU: torch has one for all, on the GPU that came first."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """What runs inside becomes the graph; torch.OutOfMemoryError if it fails for want of memory."""
    try:
        with torch.cuda.graph(graph, pool, capture_stream(device), capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        raise cause_of(error, device) from None


def cause_of(error: RuntimeError, device: torch.device) -> BaseException:
    """The end of a capture hides why it failed; other processes may have taken the memory in the meantime."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, torch.OutOfMemoryError):
        chain = chain.__context__
    if chain is not None:
        return chain
    with suppress(RuntimeError):  # CUDA may be beyond help, and then the error itself is what counts
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < STARVED:
            return torch.OutOfMemoryError(f"a CUDA graph could not be captured, {free >> 20} MiB are free: {error}")
    return error
