"""Small models on a CPU: whole batches side by side, because single operations are too short to share out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import TypeVar

import torch
from torch import nn

SMALL = 20_000_000
"""Parameters up to which a model counts as small."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def works_side_by_side(model: nn.Module) -> bool:
    """Whether it is a small model on a CPU."""
    parameters = list(model.parameters())
    return parameters[0].device.type == "cpu" and sum(parameter.numel() for parameter in parameters) <= SMALL


def use_threads(count: int) -> None:
    """For all that torch does in this thread. First a question: its first one takes what another thread said last."""
    torch.get_num_threads()
    torch.set_num_threads(count)


def side_by_side(
    work: Callable[[Item, bool], Result], items: Sequence[tuple[Item, bool]], workers: int
) -> list[Result]:
    """The results of all items in order. Each worker is one thread that uses one thread of torch."""
    workers = min(workers, len(items))
    if workers <= 1:
        return list(starmap(work, items))
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=use_threads, initargs=(1,)) as pool:
            return list(pool.map(work, *zip(*items, strict=True)))
    finally:
        torch.set_num_threads(threads)  # a part of the setting is common to all threads
