"""The metrics of a step: TRL's names for each agent, and how each learner used each source.

The docs list all names. Those that contain `time` depend on the machine; all other metrics are reproducible.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from hacrl.algorithms import Advantages
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Verdict
from hacrl.training.records import teaching

Metrics = dict[str, float]
Records = dict[str, np.ndarray]
"""A row for each rollout and update of a learner, as columns by name."""


def accuracy_metrics(name: str, problems: Sequence[Problem], verdicts: Sequence[Verdict]) -> Metrics:
    """Mean reward of the answers that were judged, over all problems and over each part of a mixture."""
    rewards = rewards_by_part(zip(problems, (verdict.reward for verdict in verdicts), strict=True))
    metrics = {name: float(np.mean([*chain.from_iterable(rewards.values())]))} if rewards else {}
    return metrics | {f"{name}/{part}": float(np.mean(own)) for part, own in rewards.items() if part is not None}


def rewards_by_part(judged: Iterable[tuple[Problem, float | None]]) -> dict[str | None, list[float]]:
    """The rewards that were given, by the part of a mixture that the problem belongs to."""
    rewards: defaultdict[str | None, list[float]] = defaultdict(list)
    for problem, reward in judged:
        if reward is not None:
            rewards[problem.part].append(reward)
    return rewards


def sampling_metrics(problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> Metrics:
    """Lengths and rewards of one agent's rollouts that a step learns from; those without a verdict have no reward."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            groups[rollout.prompt_index].append(rollout.reward)
    lengths = [rollout.num_tokens for rollout in rollouts]
    metrics: Metrics = {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": float(np.mean([r.finish_reason == "length" for r in rollouts])),
    }
    if groups:
        metrics["reward"] = float(np.mean([r.reward for r in rollouts if r.reward is not None]))
        metrics["reward_std"] = float(np.mean([np.std(g, ddof=1) if len(g) > 1 else 0.0 for g in groups.values()]))
        metrics["frac_reward_zero_std"] = float(np.mean([max(g) == min(g) for g in groups.values()]))
    parts = rewards_by_part((problems[rollout.prompt_index], rollout.reward) for rollout in rollouts)
    return metrics | {f"reward/{part}": float(np.mean(own)) for part, own in parts.items() if part is not None}


def learning_metrics(result: LearnResult, lesson: Lesson, learner: int) -> Metrics:
    """The learner's own metrics, and how the clip affected its own rollouts."""
    metrics = dict(result.metrics) | _dropped(result, lesson, learner)
    own = _by_source(result, lesson).get(learner)
    if own:
        ratio, advantage = np.exp(own["log_ratio"]), own["advantage"]
        low = (ratio < own["lower"]) & (advantage < 0)
        high = (ratio > own["upper"]) & (advantage > 0)
        metrics["clip_ratio/low_mean"] = float(low.mean())
        metrics["clip_ratio/high_mean"] = float(high.mean())
        metrics["clip_ratio/region_mean"] = float((low | high).mean())
        metrics["gradient_mass"] = gradient_mass(own)
    return metrics


def _by_source(result: LearnResult, lesson: Lesson) -> dict[int, Records]:
    """The rows of a learner's updates that have A other than 0, by the source of the rollout."""
    records = teaching(result.records)
    source_N = np.array([lesson.rollouts[row].source for row in records.get("row", [])])
    sources = np.unique(source_N).tolist()
    return {source: {name: column[source_N == source] for name, column in records.items()} for source in sources}


def _dropped(result: LearnResult, lesson: Lesson, source: int) -> Metrics:
    """How many rollouts of a source the learner could not use, in all and by reason."""
    reasons = Counter(reason for row, reason in result.dropped.items() if lesson.rollouts[row].source == source)
    return {"dropped": sum(reasons.values()), **{f"dropped/{reason}": count for reason, count in reasons.items()}}


def gradient_mass(records: Records) -> float:
    """How much a set of rollouts moved the learner: the sum of |weight x advantage| that reaches the gradient."""
    mass = np.abs(records["weight"] * records["advantage"]) * records["kept"] * records["mean_weight"]
    return float(mass.sum())


def _use_of(records: Records) -> Metrics:
    """Ratios, bounds and weights of the rollouts of one source."""
    ratio, kept, advantage = np.exp(records["log_ratio"]), records["kept"].astype(bool), records["advantage"]
    weight = records["weight"] * kept
    percents = (5, 25, 50, 75, 95)
    quantiles = np.quantile(ratio, [percent / 100 for percent in percents])
    metrics: Metrics = {
        "ratio_mean": float(ratio.mean()),
        **{f"ratio_q{percent:02d}": float(value) for percent, value in zip(percents, quantiles, strict=True)},
        "lower_mean": float(records["lower"].mean()),
        "upper_mean": float(records["upper"].mean()),
        "share_below": float((ratio < records["lower"]).mean()),
        "share_above": float((ratio > records["upper"]).mean()),
        "kept": float(kept.mean()),
        "ess": float(weight.sum() ** 2 / max((weight**2).sum(), 1e-30) / len(weight)),
        "gradient_mass": gradient_mass(records),
    }
    for name, sign in (("kept_positive", advantage > 0), ("kept_negative", advantage < 0)):
        if sign.any():
            metrics[name] = float(kept[sign].mean())
    return metrics


def baseline_metrics(advantages: Advantages) -> Metrics:
    """Bias of the capability-aware baseline on single prompts, which the mean over the batch does not show."""
    metrics: Metrics = {"baseline_guarded": advantages.guarded_share}
    if advantages.bias_P is not None and advantages.bias_noise_P is not None and len(advantages.bias_P):
        bias, noise = advantages.bias_P.numpy(), advantages.bias_noise_P.numpy()
        excess = float((bias**2 - noise).mean())
        metrics["baseline_bias_mean"] = float(bias.mean())
        metrics["baseline_bias_rms"] = float(np.sqrt((bias**2).mean()))
        metrics["baseline_bias_excess"] = math.copysign(math.sqrt(abs(excess)), excess)
    return metrics


def agent_metrics(
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    learner: int,
    lesson: Lesson,
    advantages: Advantages,
    result: LearnResult,
) -> dict[str, Any]:
    """What one agent sampled in a step, and how it learned from it."""
    return {
        **sampling_metrics(problems, rollouts),
        **learning_metrics(result, lesson, learner),
        **baseline_metrics(advantages),
    }


def exchange_metrics(
    learner: int, ids: Sequence[str], lesson: Lesson, result: LearnResult, omega_KK: Tensor
) -> Metrics:
    """How a learner used the rollouts of each other source."""
    used, metrics = _by_source(result, lesson), Metrics()
    for j, source in enumerate(ids):
        if j != learner:
            pair = _dropped(result, lesson, j) | (_use_of(used[j]) if j in used else {})
            pair |= {"omega": float(omega_KK[j, learner]), "omega_baseline": float(omega_KK[learner, j])}
            metrics |= {f"from_{source}/{name}": value for name, value in pair.items()}
    return metrics
