"""Imitation: supervised updates on the right answers of a run, from the learner and from other agents."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Imitation:
    """When agents imitate right answers, and how.

    An answer is right if its reward is at least `min_reward` and it was not cut off. Each agent keeps the right answers
    in its own tokens. At the time that `when` sets, it trains on them in random order and maximises the mean
    log-probability of their tokens.
    """

    when: Literal["never", "step", "middle", "end"] = "never"
    """When agents imitate: after each `step`, on the answers of the last `memory` steps; or once, on all answers,
    after half of the steps (`middle`) or after the last (`end`)."""
    answers: Literal["all", "own", "others"] = "all"
    """Whose answers are kept."""
    confidence: float = 0.0
    """Answers are drawn in proportion to p^confidence, where p is the source's probability per token.

    p is the source's probability of the whole answer to the power of 1 / (the learner's tokens). Above 0, lucky
    answers, which their own source found unlikely, are drawn less often. At 0, all are equally likely."""
    focus: float = 0.0
    """Answers are drawn in proportion to (1 - m)^focus, where m is the share of right answers among the learner's
    own to the prompt. Above 0, prompts that the learner already solves are drawn less often. At 0, all are alike."""
    memory: int = 1
    """With `step`: answers of this many last steps are kept. After a step, agents train on `epochs` times as many
    answers as the step added, drawn from all kept answers."""
    min_reward: float = 1.0
    """Smallest reward of a right answer."""
    epochs: float = 2.5
    """Passes over the kept answers."""
    batch_size: int = 64
    """Number of answers per update."""
    rate: float = 3.0
    """Learning rate, as a multiple of the agent's. With `middle` and `end` it decays to 0 over the updates."""
    restart: bool = False
    """With `middle` and `end`: whether imitation starts from the weights at the start of the run."""

    def __post_init__(self) -> None:
        for name, most in (("epochs", 10_000), ("rate", 1000), ("batch_size", 1_000_000), ("memory", 1_000_000)):
            if not 0 < (value := getattr(self, name)) <= most:
                raise ValueError(f"imitation.{name} must lie above 0 and be at most {most:,}, but is {value}")
        for name in ("confidence", "focus"):
            if not 0 <= getattr(self, name) <= 1000:
                raise ValueError(f"imitation.{name} must lie between 0 and 1,000, but is {getattr(self, name)}")
        if not abs(self.min_reward) <= 1e9:
            raise ValueError(f"imitation.min_reward must lie between -1e9 and 1e9, but is {self.min_reward}")

    def is_right(self, reward: float | None) -> bool:
        return reward is not None and reward >= self.min_reward

    def keeps(self, step: int, max_steps: int) -> bool:
        """Whether the right answers of this step are kept; False if no later imitation would use them."""
        return self.when != "never" and not (self.when == "middle" and step > middle(max_steps))

    def due(self, step: int, max_steps: int) -> bool:
        """Whether agents imitate at the end of this step."""
        last = {"middle": middle(max_steps), "end": max_steps}
        return self.when == "step" or step == last.get(self.when)

    def sentence(self) -> str | None:
        """A sentence for reports that describes the imitation; None if there is none."""
        if self.when == "never":
            return None
        whose = {"all": "everybody's", "own": "its own", "others": "the other agents'"}[self.answers]
        time, which = {
            "step": ("After each step", "this step's right answers"),
            "middle": ("After half of the steps", "all right answers so far"),
            "end": ("After the last step", "all right answers of the run"),
        }[self.when]
        amount = "passes"
        if self.when == "step" and self.memory > 1:
            which, amount = f"right answers of the last {self.memory:,} steps", "times as many as the step added"
        drawn = ["the surer their source was of them"] * (self.confidence > 0)
        drawn += ["the more often the agent itself failed the prompt"] * (self.focus > 0)
        choice = f", drawn more often {' and '.join(drawn)}" if drawn else ""
        start = ", from the weights it began the run with" if self.restart and self.when != "step" else ""
        how = f"in updates of {self.batch_size}, at {self.rate:g} times its learning rate"
        which = f"{which} ({whose}, with a reward of at least {self.min_reward:g}){start}"
        return f"{time}, each agent fine-tunes on {which}: {self.epochs:g} {amount}{choice}, {how}."


def middle(max_steps: int) -> int:
    """The last step of the first half of a run."""
    return max(max_steps // 2, 1)
