"""Derives all random numbers of a run from its seed and from where in the run they are used.

hacrl uses no generator whose state would have to be saved or sent: a run gives the same numbers if it is resumed, or
if its agents run in another order or on other machines.
"""

import random
from typing import Any

import numpy as np
import torch

SAMPLE, SHUFFLE, EVALUATE, ADAPTER, NUMBER, IMITATE, ASK, STORED = range(8)


def derive_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def permutation(size: int, *parts: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(parts).permutation(size)]


def seed_all(seed: int) -> None:
    """Seed the global generators, which a user's own code may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def global_random_state() -> dict[str, Any]:
    """State of the global generators, which a user's own code may draw from, ready for JSON."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()],
    }


def restore_global_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.tensor(own, dtype=torch.uint8) for own in state["cuda"]])
