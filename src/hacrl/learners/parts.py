"""The norms of the own and the foreign part of a gradient, although both are added up in one place."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hacrl.learners.ranks import Ranks

EXACT = 250_000_000
"""A gradient of at most this many numbers is copied; of a larger one, a sketch is kept."""
SKETCH = 1 << 22
"""Numbers in a sketch: 16 MiB."""


class Parts:
    """The norm of the first part of a gradient, and of the second part, which is added to it later.

    Up to `EXACT` numbers, the first part is copied. Of a larger gradient g a linear sketch S(g) is kept: the sketch of
    the second part is S(both) - S(first), and its squared norm is that of the part without bias, with a relative
    standard deviation of at most sqrt(2 / SKETCH), which is 0.07 %. The norm of the first part is exact.
    """

    def __init__(self, gradients: Sequence[Tensor], ranks: Ranks, exact: int = EXACT) -> None:
        self.ranks, self.first = ranks, ranks.norm(gradients)
        self.exact = sum(gradient.numel() for gradient in gradients) <= exact
        self.kept = torch._foreach_mul(list(gradients), 1.0) if self.exact else [sketch(gradients)]

    def second(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of what was added since, given the gradient with both parts."""
        both = list(gradients) if self.exact else [sketch(gradients)]
        return self.ranks.norm(torch._foreach_sub(both, self.kept))


@cache
def signs_of(size: int, device: torch.device) -> Tensor:
    """Random signs. To draw them takes longer than a sketch."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(2, (size,), generator=random).mul_(2).sub_(1).to(device, torch.float32)


def sketch(gradients: Sequence[Tensor], size: int = SKETCH) -> Tensor:
    """Add up all numbers in `size` places, each with a sign: a linear map that keeps squared norms on average.

    Pieces of up to `size` numbers are multiplied by random signs and added from a random place on, around the end. So
    numbers of one piece never meet, and those of two pieces meet with a probability of 1 / size and with random signs.
    """
    device, random = gradients[0].device, torch.Generator().manual_seed(1)
    signs, sums = signs_of(size, device), torch.zeros(2 * size, device=device)
    for piece in (piece for gradient in gradients for piece in gradient.flatten().split(size)):
        start = int(torch.randint(size, (), generator=random))
        sums[start : start + len(piece)].addcmul_(piece.float(), signs[: len(piece)])
    return sums.view(2, size).sum(0)
