"""Padded tables of token ids."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(
    sequences: Sequence[Sequence[int]], length: int, pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, padded on the left so that all sequences end together."""
    ids = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), length, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, length - len(sequence) :] = torch.tensor(sequence, dtype=torch.long)
        mask[row, length - len(sequence) :] = 1
    return ids.to(device), mask.to(device)
