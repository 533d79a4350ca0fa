"""The learning rate of each step, in runs and warm-ups."""

import math

from hacrl.config import AgentConfig


def learning_rate(agent: AgentConfig, step: int, max_steps: int) -> float:
    """The learning rate of a training step: linear warm-up, then the schedule, which reaches 0 after the last step."""
    if step <= agent.warmup_steps:
        return agent.learning_rate * step / (agent.warmup_steps + 1)
    if agent.lr_scheduler_type == "constant":
        return agent.learning_rate
    done = (step - 1 - agent.warmup_steps) / max(max_steps - agent.warmup_steps, 1)
    if agent.lr_scheduler_type == "linear":
        return agent.learning_rate * (1 - done)
    return agent.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
