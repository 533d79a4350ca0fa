"""Runs whole batches in parallel for small models on a CPU, whose single operations are too short to split."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import TypeVar

import torch

SMALL = 20_000_000
"""Largest number of parameters of a model whose batches run in parallel on a CPU."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def use_threads(count: int) -> None:
    """Set torch's threads for this thread, after a first read, which takes over what another thread set last."""
    torch.get_num_threads()
    torch.set_num_threads(count)


def side_by_side(
    work: Callable[[Item, bool], Result], items: Sequence[tuple[Item, bool]], workers: int
) -> list[Result]:
    """Work on all items in parallel and return the results in order. Each worker uses one thread of torch."""
    workers = min(workers, len(items))
    if workers <= 1:
        return list(starmap(work, items))
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=use_threads, initargs=(1,)) as pool:
            return list(pool.map(work, *zip(*items, strict=True)))
    finally:
        torch.set_num_threads(threads)  # part of the setting is shared by all threads
