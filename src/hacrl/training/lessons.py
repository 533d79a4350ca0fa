"""What each learner gets in a step: rollouts, what they are worth to it, and when it updates."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hacrl.algorithms import Advantages
from hacrl.config import AgentConfig, RunConfig
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import NUMBER, SHUFFLE, permutation
from hacrl.tasks.problem import Problem
from hacrl.training.schedule import learning_rate
from hacrl.training.scoring import Scores


def lesson_for(
    learner: int,
    step: int,
    config: RunConfig,
    problems: Sequence[Problem],
    rollouts: Sequence[Sequence[Rollout]],
    omega_KK: Tensor,
    scores: Scores | None,
) -> tuple[Lesson, Advantages]:
    """Make one learner's lesson from the valid rollouts of each agent."""
    algorithm, agent, max_steps = config.algorithm, config.agents[learner], config.max_steps
    everybodys = list(chain.from_iterable(rollouts))
    used = everybodys if algorithm.shares_rollouts else list(rollouts[learner])
    source_N = torch.tensor([rollout.source for rollout in used], dtype=torch.long)
    # Shuffled, because parts of a task may alternate by position, and an algorithm may choose prompts by number.
    number_P = permutation(len(problems), config.seed, NUMBER, step)
    prompt_N = torch.tensor([number_P[rollout.prompt_index] for rollout in used], dtype=torch.long)
    rewards_N = torch.tensor([rollout.reward for rollout in used], dtype=torch.float64)
    advantages = algorithm.advantages(rewards_N, prompt_N, source_N, learner, omega_KK)
    came = Counter(rollout.source for rollout in everybodys)
    outside = [came[j] for j in range(len(config.agents), len(omega_KK))]
    rate, imitation = learning_rate(agent, step, max_steps), algorithm.imitation
    lesson = Lesson(
        step=step,
        prompts=[problem.prompt for problem in problems],
        rollouts=used,
        advantage_N=advantages.advantage_N,
        omega_N=algorithm.coefficients(source_N, learner, omega_KK),
        minibatches=minibatches(config, agent, step, outside) if algorithm.reinforces(step, max_steps) else [],
        learning_rate=rate,
        examples=examples(learner, step, config, everybodys),
        imitates=imitation.due(step, max_steps),
        imitation_rate=rate if imitation.when == "step" else agent.learning_rate,
        token_advantages=scores.token_advantages[learner] if scores else None,
    )
    return lesson, advantages


def examples(learner: int, step: int, config: RunConfig, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The step's right answers that a learner keeps for imitation."""
    imitation = config.algorithm.imitation
    if not config.algorithm.keeps_answers(step, config.max_steps):
        return []
    right = [r for r in rollouts if imitation.is_right(r.reward) and r.finish_reason == "stop"]
    return [r for r in right if imitation.answers in ("all", "own" if r.source == learner else "others")]


def minibatches(config: RunConfig, agent: AgentConfig, step: int, outside: Sequence[int] = ()) -> list[list[int]]:
    """Prompt positions of each update, all passes in a row. `outside` counts what other sources than agents gave.

    The order depends on seed and step alone.
    """
    parts = []
    for iteration in range(agent.num_iterations):
        order = permutation(config.prompts_per_step, config.seed, SHUFFLE, step, iteration)
        parts += [part.tolist() for part in np.array_split(order, config.updates_per_step(agent, outside))]
    return parts
