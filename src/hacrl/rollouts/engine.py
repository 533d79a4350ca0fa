"""The interface of everything that turns prompts into completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hacrl.rollouts.rollout import Completion


@dataclass(frozen=True)
class SamplingParams:
    num_generations: int
    max_completion_length: int
    temperature: float
    """Sampling temperature; 0 means greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        """Return `num_generations` completions for each prompt. The same seed gives the same completions."""
        ...
