"""The processes that hold one agent: usually one; with `fsdp`, several that do everything in step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """What a member of the team must know to work in step with the others; for a team of one there is nothing to do."""

    rank: int = 0
    size: int = 1

    def share(self, batch: list[T]) -> tuple[list[T], bool]:
        """This member's items of a pass, and whether they count: no member may leave a pass out."""
        own = batch[self.rank :: self.size]
        return (own, True) if own else (batch[:1], False)

    def gather(self, own: list[T]) -> list[T]:
        """Everybody's items, first those of the first member."""
        if self.size == 1:
            return own
        parts: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, own)
        return [item for part in parts for item in part]

    def least(self, own: int) -> int:
        return min(self.gather([own]))

    def norm(self, parts: Sequence[Tensor]) -> Tensor:
        """The norm of tensors of which each member has a part."""
        own = nn.utils.get_total_norm(parts)
        if self.size == 1:
            return own
        total = own.double().square()
        dist.all_reduce(total)
        return total.sqrt().to(own.dtype)


def join_team(rank: int, size: int, meeting_point: str, device: torch.device) -> Team:
    """Meet the other members, for example at file:///some/new/file or tcp://HOST:PORT."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=size)
    return Team(rank, size)
