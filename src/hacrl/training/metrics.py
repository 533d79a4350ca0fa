"""What is measured in a step: TRL's names for each agent, and how each learner used each source.

All names are listed in docs/algorithm.md. Names that contain `time` depend on the machine; the rest of a
run's metrics are reproducible.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hacrl.algorithms import Advantages
from hacrl.learners.learner import LearnResult
from hacrl.learners.minibatch import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Verdict

Metrics = dict[str, float]


def accuracy_metrics(name: str, problems: Sequence[Problem], verdicts: Sequence[Verdict]) -> Metrics:
    """The mean reward of what was judged, of all problems and of each part of a mixture."""
    by_part: dict[str | None, list[float]] = {}
    for problem, verdict in zip(problems, verdicts, strict=True):
        if verdict.reward is not None:
            by_part.setdefault(problem.part, []).append(verdict.reward)
    judged = [reward for rewards in by_part.values() for reward in rewards]
    metrics = {name: float(np.mean(judged))} if judged else {}
    return metrics | {f"{name}/{part}": float(np.mean(own)) for part, own in by_part.items() if part is not None}


def sampling_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """One agent's rollouts that a step learns from, of which those that could not be verified have no reward."""
    valid = [rollout for rollout in rollouts if rollout.reward is not None]
    lengths = [rollout.num_tokens for rollout in rollouts]
    metrics: Metrics = {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": float(np.mean([r.finish_reason == "length" for r in rollouts])),
    }
    if valid:
        groups: dict[int, list[float]] = {}
        for rollout in valid:
            groups.setdefault(rollout.prompt_index, []).append(float(rollout.reward or 0.0))
        metrics["reward"] = float(np.mean([rollout.reward for rollout in valid]))
        metrics["reward_std"] = float(np.mean([np.std(g, ddof=1) if len(g) > 1 else 0.0 for g in groups.values()]))
        metrics["frac_reward_zero_std"] = float(np.mean([max(g) == min(g) for g in groups.values()]))
    return metrics


def reward_of_parts(rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> Metrics:
    """One agent's mean reward on the problems of each part of a mixture."""
    by_part: dict[str, list[float]] = {}
    for rollout in rollouts:
        part = problems[rollout.prompt_index].part
        if part is not None and rollout.reward is not None:
            by_part.setdefault(part, []).append(rollout.reward)
    return {f"reward/{part}": float(np.mean(rewards)) for part, rewards in by_part.items()}


def learning_metrics(result: LearnResult, lesson: Lesson, learner: int) -> Metrics:
    """What the clip did to the learner's own rollouts, beside what it reports itself."""
    metrics = dict(result.metrics) | _dropped(result, lesson, learner)
    records = teaching(result.records)
    if records:
        source = np.array([rollout.source for rollout in lesson.rollouts])[records["row"]]
        own = source == learner
        if own.any():
            ratio, advantage = np.exp(records["log_ratio"][own]), records["advantage"][own]
            low = (ratio < records["lower"][own]) & (advantage < 0)
            high = (ratio > records["upper"][own]) & (advantage > 0)
            metrics["clip_ratio/low_mean"] = float(low.mean())
            metrics["clip_ratio/high_mean"] = float(high.mean())
            metrics["clip_ratio/region_mean"] = float((low | high).mean())
            metrics["gradient_mass"] = gradient_mass({name: column[own] for name, column in records.items()})
    return metrics


def teaching(records: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The lines with A other than 0: the others are computed for a trace only, and figures must not depend on that."""
    return {name: column[records["advantage"] != 0] for name, column in records.items()}


def _dropped(result: LearnResult, lesson: Lesson, source: int) -> Metrics:
    """How many rollouts of a source the learner could not use, in all and by reason."""
    reasons = Counter(reason for row, reason in result.dropped.items() if lesson.rollouts[row].source == source)
    return {"dropped": sum(reasons.values()), **{f"dropped/{reason}": count for reason, count in reasons.items()}}


def gradient_mass(records: dict[str, np.ndarray]) -> float:
    """Sum of |weight x advantage| that reaches the gradient: how much a set of rollouts moved the learner."""
    mass = np.abs(records["weight"] * records["advantage"]) * records["kept"] * records["mean_weight"]
    return float(mass.sum())


def pair_metrics(result: LearnResult, lesson: Lesson, sources: int) -> list[Metrics]:
    """How a learner used the rollouts of each of so many agents."""
    metrics = [_dropped(result, lesson, source) for source in range(sources)]
    records = teaching(result.records)
    if not records:
        return metrics
    source_N = np.array([rollout.source for rollout in lesson.rollouts])[records["row"]]
    order = np.argsort(source_N, kind="stable")
    bounds = np.searchsorted(source_N[order], range(sources + 1))
    for source in range(sources):
        chosen = order[bounds[source] : bounds[source + 1]]
        if len(chosen):
            metrics[source] |= _use_of({name: column[chosen] for name, column in records.items()})
    return metrics


def _use_of(records: dict[str, np.ndarray]) -> Metrics:
    """What became of the rollouts of one source."""
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
    """Bias of the capability-aware baseline on single prompts, of which the batch mean shows nothing."""
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
    result: LearnResult,
    advantages: Advantages,
) -> dict[str, Any]:
    """What one agent sampled in a step, and how it learned from it."""
    return {
        **sampling_metrics(rollouts),
        **reward_of_parts(rollouts, problems),
        **learning_metrics(result, lesson, learner),
        **baseline_metrics(advantages),
    }


def exchange_metrics(
    learner: int, ids: Sequence[str], lesson: Lesson, result: LearnResult, omega_KK: Tensor
) -> Metrics:
    """How a learner used the rollouts of each other agent."""
    metrics: Metrics = {}
    for j, pair in enumerate(pair_metrics(result, lesson, len(ids))):
        if j != learner:
            pair |= {"omega": float(omega_KK[j, learner]), "omega_baseline": float(omega_KK[learner, j])}
            metrics |= {f"from_{ids[j]}/{name}": value for name, value in pair.items()}
    return metrics
