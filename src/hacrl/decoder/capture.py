"""Selects the current GPU and captures CUDA graphs on it; errors name the reason of a failed capture."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch

STARVED = 512 << 20
"""With fewer free bytes than this, a CUDA library can fail without saying that memory is the reason."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current: Triton and CUDA graphs use the thread's current GPU, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on this GPU; torch's default is one stream for all, on the first GPU used."""
    return torch.cuda.Stream(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Capture what runs inside as the graph; raises torch.OutOfMemoryError if memory runs out."""
    try:
        with torch.cuda.graph(graph, pool, capture_stream(device), capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        raise cause_of(error, device) from None


def cause_of(error: RuntimeError, device: torch.device) -> BaseException:
    """The error behind a failed capture, which hides it; other processes may have taken the memory meanwhile."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, torch.OutOfMemoryError):
        chain = chain.__context__
    if chain is not None:
        return chain
    with suppress(RuntimeError):  # if CUDA no longer works, report the original error
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < STARVED:
            return torch.OutOfMemoryError(f"a CUDA graph could not be captured, {free >> 20} MiB are free: {error}")
    return error
