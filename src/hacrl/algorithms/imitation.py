"""Imitation: supervised updates on right answers of a run, the learner's own and those of others."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Imitation:
    """When agents imitate right answers, and how.

    An answer is right if its reward is at least `min_reward` and it was not cut off. Each agent keeps the right answers
    in its own tokens. When it is time, it learns from them in random order; what is maximised is the mean
    log-probability of their tokens.
    """

    when: Literal["never", "step", "middle", "end"] = "never"
    """After each step, on the answers of the last `memory` steps; or once, on all answers so far, after half of the
    steps or after the last."""
    answers: Literal["all", "own", "others"] = "all"
    """Whose answers are kept."""
    confidence: float = 0.0
    """Answers are drawn with the probability p^confidence, p being how likely a token was for the source, on average.

    p is the source's probability of the whole answer to the power of 1 / (the learner's tokens). Above 0, answers that
    are right by luck, which their own source found unlikely, are drawn less often. 0: all alike."""
    focus: float = 0.0
    """Answers are drawn with the probability (1 - m)^focus, m being the share of right ones among the learner's own
    answers to the prompt. Above 0, prompts that the learner solves anyway are practised less. 0: all alike."""
    memory: int = 1
    """With `step`: of how many steps answers are kept. A step learns from `epochs` times as many answers as it has
    added, drawn from all that are kept."""
    min_reward: float = 1.0
    """From which reward on an answer is right."""
    epochs: float = 2.5
    """Answers learned from, as a multiple of those kept: passes over all of them."""
    batch_size: int = 64
    """Answers of one update."""
    rate: float = 3.0
    """The learning rate, as a multiple of the agent's. Over the updates of `middle` and `end` it falls to 0."""
    restart: bool = False
    """With `middle` and `end`: start again from the weights that the run began with."""

    def __post_init__(self) -> None:
        for name, most in (("epochs", 10_000), ("rate", 1000), ("batch_size", 1_000_000), ("memory", 1_000_000)):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(
                    f"imitation.{name} must lie above 0 and be at most {most:,}, but is {getattr(self, name)}"
                )
        for name in ("confidence", "focus"):
            if not 0 <= getattr(self, name) <= 1000:
                raise ValueError(f"imitation.{name} must lie between 0 and 1,000, but is {getattr(self, name)}")
        if not abs(self.min_reward) <= 1e9:
            raise ValueError(f"imitation.min_reward must lie between -1e9 and 1e9, but is {self.min_reward}")

    def is_right(self, reward: float | None) -> bool:
        return reward is not None and reward >= self.min_reward

    def keeps(self, step: int, max_steps: int) -> bool:
        """Whether the right answers of a step are kept: not those that nobody would imitate any more."""
        return self.when != "never" and not (self.when == "middle" and step > middle(max_steps))

    def due(self, step: int, max_steps: int) -> bool:
        """Whether a step ends with imitation."""
        last = {"middle": middle(max_steps), "end": max_steps}
        return self.when == "step" or step == last.get(self.when)

    def sentence(self) -> str | None:
        """What is done, for reports."""
        if self.when == "never":
            return None
        whose = {"all": "everybody's", "own": "its own", "others": "the other agents'"}[self.answers]
        time = {
            "step": "After each step, each agent fine-tunes on this step's right answers",
            "middle": "After half of the steps, each agent fine-tunes on all right answers so far",
            "end": "After the last step, each agent fine-tunes on all right answers of the run",
        }[self.when]
        amount = f"{self.epochs:g} passes"
        if self.when == "step" and self.memory > 1:
            time = f"After each step, each agent fine-tunes on right answers of the last {self.memory:,} steps"
            amount = f"{self.epochs:g} times as many as the step added"
        drawn = ["the surer their source was of them"] * (self.confidence > 0)
        drawn += ["the more often the agent itself failed the prompt"] * (self.focus > 0)
        choice = f", drawn more often {' and '.join(drawn)}" if drawn else ""
        start = ", from the weights it began the run with" if self.restart and self.when != "step" else ""
        return (
            f"{time} ({whose}, with a reward of at least {self.min_reward:g}){start}: {amount}{choice}, in updates of "
            f"{self.batch_size}, at {self.rate:g} times its learning rate."
        )


def middle(max_steps: int) -> int:
    """The step that ends the first half of a run."""
    return max(max_steps // 2, 1)
