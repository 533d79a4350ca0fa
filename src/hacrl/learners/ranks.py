"""The processes that hold one agent: usually one; with `fsdp`, several that work in lockstep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Sliceable(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Self: ...


Batch = TypeVar("Batch", bound=Sliceable)


@dataclass(frozen=True)
class Ranks:
    """The place of a process among the processes of an agent, and how they exchange values. Default: a single one."""

    rank: int = 0
    size: int = 1

    def share(self, batch: Batch) -> tuple[Batch, bool]:
        """This rank's items of a pass, and whether they count. A rank without any gets one: none may skip a pass."""
        own = batch[self.rank :: self.size]
        return (own, True) if own else (batch[:1], False)

    def gather(self, own: list[T]) -> list[T]:
        """Collect the items of all ranks, in the order of ranks."""
        if self.size == 1:
            return own
        parts: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, own)
        return [item for part in parts for item in part]

    def norm(self, parts: Sequence[Tensor]) -> Tensor:
        """The norm of tensors that are divided among the ranks."""
        if parts and parts[0].dtype == torch.bfloat16:  # so would be its norm
            parts = torch._foreach_norm(list(parts), 2, torch.float32)
        own: Tensor = nn.utils.get_total_norm(parts)
        if self.size == 1:
            return own
        total = own.double().square()
        dist.all_reduce(total)
        return total.sqrt().to(own.dtype)


ALONE = Ranks()


def join_ranks(rank: int, size: int, meeting_point: str, device: torch.device) -> Ranks:
    """Meet the other ranks, for example at file:///some/new/file or tcp://HOST:PORT."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=size)
    return Ranks(rank, size)
