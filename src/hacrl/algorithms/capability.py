"""The capability C of each agent, and omega, the ratio of two capabilities."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

CAPABILITY_FLOOR = 1e-8
MAX_WINDOW = 1_000_000
MAX_RATIO = 1e30


@dataclass(frozen=True)
class CapabilityOptions:
    """How performance is measured, smoothed and turned into a bounded ratio."""

    metric: Literal["mean_reward", "positive_rate"] = "mean_reward"
    """`mean_reward`, as published, or `positive_rate`: the share of rewards above `reward_min`."""
    window: int = 5
    """K: the number of steps over which capability is averaged."""
    include_current: bool = True
    """Whether the current batch counts. False makes omega independent of the batch it is used on."""
    ratio_min: float = 0.1
    """The smallest omega, above 0 and at most 1."""
    ratio_max: float = 10.0
    """The largest omega, at least 1."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if self.window > MAX_WINDOW:
            raise ValueError(f"window must be at most {MAX_WINDOW:,}, not {self.window}")
        if not 0 < self.ratio_min <= 1 <= self.ratio_max <= MAX_RATIO:
            raise ValueError(
                f"0 < ratio_min <= 1 <= ratio_max <= {MAX_RATIO:g} is needed, not {self.ratio_min} and {self.ratio_max}"
            )

    def omega_sentence(self) -> str:
        """Beginning of a sentence that explains omega; the caller adds what omega does."""
        limits = f"{self.ratio_min:g} to {self.ratio_max:g}"
        return f"ω is the source's capability C divided by the learner's, limited to {limits}"

    def sentence(self, reward_min: float = 0.0, *, used: bool = False) -> str:
        """A sentence that explains C; `used` says whether C affects learning."""
        what = f"mean reward{f' counted from {reward_min:g}' if reward_min else ''}"
        if self.metric == "positive_rate":
            what = f"share of rewards above {reward_min:g}"
        steps = f"{self.window} steps" if self.window > 1 else "step"
        when = f"the last {steps}" if self.include_current else f"the {steps} before the current one"
        unused = "" if used else "; it is shown for comparison and acts on nothing"
        return f"C is an agent's {what} over {when}{unused}."


def shifted(rewards_N: Tensor, reward_min: float) -> Tensor:
    """Rewards minus `reward_min`, so that they are >= 0, as a ratio of means needs."""
    lowest = float(rewards_N.min()) if len(rewards_N) else reward_min
    if lowest < reward_min:
        advice = "capability is a ratio of mean rewards, so set algorithm.reward_min to the smallest possible reward"
        raise ValueError(f"a reward of {lowest:g} is below reward_min ({reward_min:g}); {advice}")
    return rewards_N - reward_min


class CapabilityTracker:
    """C_t^(k): the mean of agent k's last `window` batch performances P_t^(k)."""

    def __init__(self, num_agents: int, options: CapabilityOptions) -> None:
        self.options = options
        # Keep one step more than the window: without the current step, the window ends one step earlier.
        self._history: list[deque[tuple[int, float]]] = [deque(maxlen=options.window + 1) for _ in range(num_agents)]
        self._step = 0

    def update(self, performances: Sequence[float | None]) -> None:
        """Record one step. None (no reward in this step) leaves that agent's window unchanged."""
        self._step += 1
        for history, performance in zip(self._history, performances, strict=True):
            if performance is not None:
                history.append((self._step, performance))

    def capabilities(self) -> list[float | None]:
        """C of each agent, at least `CAPABILITY_FLOOR`; None for an agent without a performance in the window."""
        last = self._step if self.options.include_current else self._step - 1
        known = [[p for step, p in history if step <= last][-self.options.window :] for history in self._history]
        return [max(sum(window) / len(window), CAPABILITY_FLOOR) if window else None for window in known]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "history": [list(history) for history in self._history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["history"]) != len(self._history):
            raise ValueError(f"the saved window has {len(state['history'])} agents, not {len(self._history)}")
        self._step = state["step"]
        for history, saved in zip(self._history, state["history"], strict=True):
            history.clear()
            history.extend(map(tuple, saved))


def capability_ratios(capabilities: Sequence[float | None], ratio_min: float = 0.1, ratio_max: float = 10.0) -> Tensor:
    """omega[k, j] = clamp(C_k / C_j): agents x agents, float64; 1 if either C is unknown."""
    omega_KK = torch.ones(len(capabilities), len(capabilities), dtype=torch.float64)
    for k, c_k in enumerate(capabilities):
        for j, c_j in enumerate(capabilities):
            if k != j and c_k is not None and c_j is not None:
                ratio = max(c_k, CAPABILITY_FLOOR) / max(c_j, CAPABILITY_FLOOR)
                omega_KK[k, j] = min(max(ratio, ratio_min), ratio_max)
    return omega_KK
