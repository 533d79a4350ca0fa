"""Measures time and memory of work, and sets what the C library does with freed memory."""

import ctypes
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""

T = TypeVar("T")


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, because torch frees and allocates the same large blocks in every step.

    Otherwise each block goes back to the kernel, which has to clear the pages before it returns them: a fifth to a
    quarter of the time of a training step on a CPU. With other C libraries this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, 1 << 30)


def peak_resident_gib() -> float:
    """Peak resident memory of this process, in GiB."""
    if sys.platform.startswith("linux"):  # where getrusage would include the parent's peak
        status = Path("/proc/self/status").read_text("ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measured(device: torch.device, work: Callable[[], T]) -> tuple[T, float, float | None]:
    """Run `work` and return its result, its seconds, and the peak GPU memory in GiB, or None on a CPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, seconds, torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
