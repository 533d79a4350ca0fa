"""The formulas of HACRL / HACPO (arXiv 2603.02604) and its rivals once more: float64, plain loops, nothing shared.

This file is the yardstick that `hacrl.algorithms` is measured with. It imports neither torch nor hacrl, it
handles one rollout and one token at a time, and it reads like the specification, so that an error in the
vectorised code cannot hide here as well. Gradients are derived by hand, with respect to the learner's
token log-probabilities; `objective(..., stop_at=...)` freezes what stands under a stop-gradient, which is
what makes them checkable by finite differences.

Indices: k the learner, j the source of a rollout, q a prompt, u the number of updates already made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

CAPABILITY_FLOOR = 1e-8
OMEGA_MIN, OMEGA_MAX = 0.1, 10.0
STD_EPS = 1e-6
LOG_RATIO_MAX = 10.0
RIVALS = ("swarm", "ftis", "success_gated", "luffy", "hacpo_robust")

# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """One completion as one learner sees it."""

    source: int
    prompt: int
    reward: float | None
    # What the source recorded when it sampled, token by token in the source's tokenization.
    old_logps: tuple[float, ...]
    # The learner's log-probabilities, token by token in the learner's own tokenization.
    logps: tuple[float, ...]
    num_bytes: int = 1
    # The learner's own log-probabilities of the same tokens before its first update of the step.
    own_old_logps: tuple[float, ...] | None = None
    # The starting model's log-probabilities of the same tokens as `logps`; only for the KL.
    ref_logps: tuple[float, ...] | None = None
    # The learner could not retokenize it: it counts in mu and sigma, but in no mean of the objective.
    dropped: bool = False


@dataclass(frozen=True)
class Options:
    algorithm: str = "hacpo"
    # Own rollouts: the sequence clip of GSPO, or the token clip of GRPO (0.2 / 0.28).
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    # Mechanism 1.
    baseline: str = "capability"
    baseline_guard: bool = True
    cross_baseline: str = "learner"
    # Mechanism 2.
    cross_omega: bool = True
    # Mechanism 3.
    alpha: float = 1.0
    ratio_unit: str = "token"
    # Mechanism 4.
    cross_clip: bool = True
    delta: float = 0.2
    delta_step: float = 0.025
    # The objective.
    cross_weight: float = 1.0
    beta: float = 0.0
    reward_min: float = 0.0
    # Naive sharing: what the ratio of a foreign rollout is taken against.
    ratio: str = "source"
    # The other methods that share rollouts.
    share: float = 0.5
    cap: float = 2.0
    kl_max: float = 0.5
    transfer_weight: float = 1.0
    gamma: float = 0.1
    foreign: str = "right"
    truncate: bool = True


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# --------------------------------------------------------------------------------------------------
# Section 2: capability
# --------------------------------------------------------------------------------------------------


def shifted(reward: float, reward_min: float) -> float:
    if reward < reward_min:
        raise ValueError(f"reward {reward} is below reward_min {reward_min}")
    return reward - reward_min


def performance(rewards: Sequence[float | None], metric: str = "mean", reward_min: float = 0.0) -> float | None:
    """One agent's P_t: the mean reward, or the share of rewards above reward_min."""
    valid = [shifted(r, reward_min) for r in rewards if r is not None]
    if not valid:
        return None
    if metric == "positive_rate":
        return sum(1 for r in valid if r > 0) / len(valid)
    return mean(valid)


def capability_history(
    performances: Sequence[Sequence[float | None]], window: int = 5, include_current: bool = True
) -> list[list[float | None]]:
    """C_t of every agent after every step, from P_t of every agent in every step.

    None where an agent has nothing to average yet.
    """
    windows: list[list[float]] = [[] for _ in performances[0]]
    history: list[list[float | None]] = []
    for step in performances:
        before = [list(w) for w in windows]
        for agent, value in enumerate(step):
            if value is not None:
                windows[agent].append(value)
        used = windows if include_current else before
        history.append([max(mean(w[-window:]), CAPABILITY_FLOOR) if w else None for w in used])
    return history


def omega(capabilities: Sequence[float | None], k: int, j: int) -> float:
    """omega(k, j) = C^(k) / C^(j): 1 as long as one of the two is not known."""
    c_k, c_j = capabilities[k], capabilities[j]
    if c_k is None or c_j is None:
        return 1.0
    return clip(c_k / c_j, OMEGA_MIN, OMEGA_MAX)


# --------------------------------------------------------------------------------------------------
# Section 3: advantages
# --------------------------------------------------------------------------------------------------


def capability_baseline(
    sources: Sequence[int],
    rewards: Sequence[float],
    k: int,
    capabilities: Sequence[float | None],
    guard: bool = True,
    joint: bool = False,
) -> float:
    """mu_k of one prompt from its valid, shifted rewards."""
    total = 0.0
    for j, r in zip(sources, rewards, strict=True):
        total += (1.0 if joint else omega(capabilities, k, j)) * r
    mu = total / len(rewards)
    low, high = min(rewards), max(rewards)
    rounding = 1e-9 * (high - low)  # a mu on the edge is inside, however its sum was rounded
    if guard and not low - rounding <= mu <= high + rounding:
        own = [r for j, r in zip(sources, rewards, strict=True) if j == k]
        mu = mean(own) if own else mean(rewards)
    return mu


def capability_advantages(
    rollouts: Sequence[Rollout], k: int, capabilities: Sequence[float | None], options: Options
) -> list[float | None]:
    """A_k of every rollout, its own and foreign ones; None for a rollout without a reward."""
    advantages: list[float | None] = [None] * len(rollouts)
    for q in sorted({r.prompt for r in rollouts}):
        members = [i for i, r in enumerate(rollouts) if r.prompt == q and r.reward is not None]
        sources = [rollouts[i].source for i in members]
        rewards = [shifted(rollouts[i].reward or 0.0, options.reward_min) for i in members]
        if len(rewards) < 2 or max(rewards) == min(rewards):
            for i in members:
                advantages[i] = 0.0
            continue
        sigma = sample_std(rewards)
        for i, j, reward in zip(members, sources, rewards, strict=True):
            whose = j if options.cross_baseline == "source" else k
            joint = options.baseline == "joint"
            mu = capability_baseline(sources, rewards, whose, capabilities, options.baseline_guard, joint)
            advantages[i] = (reward - mu) / (sigma + STD_EPS)
    return advantages


def group_advantages(rollouts: Sequence[Rollout]) -> list[float | None]:
    """GRPO's advantage: mean and standard deviation of whatever rollouts of the prompt are given."""
    advantages: list[float | None] = [None] * len(rollouts)
    for q in sorted({r.prompt for r in rollouts}):
        members = [i for i, r in enumerate(rollouts) if r.prompt == q and r.reward is not None]
        rewards = [float(rollouts[i].reward or 0.0) for i in members]
        for i, reward in zip(members, rewards, strict=True):
            if len(rewards) < 2 or max(rewards) == min(rewards):
                advantages[i] = 0.0
            else:
                advantages[i] = (reward - mean(rewards)) / (sample_std(rewards) + STD_EPS)
    return advantages


# --------------------------------------------------------------------------------------------------
# Sections 5 and 6: ratios and clips
# --------------------------------------------------------------------------------------------------


def sequence_log_ratio(logps: Sequence[float], old_logps: Sequence[float]) -> float:
    """Each side by its own token count."""
    raw = math.fsum(logps) / len(logps) - math.fsum(old_logps) / len(old_logps)
    return clip(raw, -LOG_RATIO_MAX, LOG_RATIO_MAX)


def byte_log_ratio(logps: Sequence[float], old_logps: Sequence[float], num_bytes: int) -> float:
    """Both sides by the bytes of the text."""
    raw = (math.fsum(logps) - math.fsum(old_logps)) / num_bytes
    return clip(raw, -LOG_RATIO_MAX, LOG_RATIO_MAX)


def log_ratio_and_slope(
    rollout: Rollout, k: int, ratio_unit: str = "token", against: str = "source"
) -> tuple[float, float]:
    """The log-ratio and its derivative by any one of the learner's token log-probabilities.

    Bytes make two tokenizers comparable, so they apply to foreign rollouts only. The clamp is flat: where it
    bites the derivative is zero.
    """
    if against == "own" and rollout.source != k:
        assert rollout.own_old_logps is not None
        value = sequence_log_ratio(rollout.logps, rollout.own_old_logps)
        slope = 1.0 / len(rollout.logps)
    elif ratio_unit == "byte" and rollout.source != k:
        value = byte_log_ratio(rollout.logps, rollout.old_logps, rollout.num_bytes)
        slope = 1.0 / rollout.num_bytes
    else:
        value = sequence_log_ratio(rollout.logps, rollout.old_logps)
        slope = 1.0 / len(rollout.logps)
    return value, slope if abs(value) < LOG_RATIO_MAX else 0.0


def exponential_ratio(s: float, alpha: float) -> float:
    """s~, section 5."""
    return s * min(s, 1.0) ** alpha


def clipped_surrogate(s: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO's pessimistic min(s A, clip(s, low, high) A), and its derivative by s."""
    unclipped, clipped = s * advantage, clip(s, low, high) * advantage
    # Inside the band both are the same and s moves both; outside, only the unclipped one moves.
    if unclipped <= clipped:
        return unclipped, advantage
    return clipped, 0.0


def lower_bound(u: int, delta: float, delta_step: float) -> float:
    return min(1.0 - delta + u * delta_step, 1.0)


def foreign_term(
    s: float, s_stop: float, advantage: float, weight: float, u: int, options: Options
) -> tuple[float, float]:
    """A foreign rollout's contribution and its derivative by s; s_stop is s under the stop-gradient."""
    if not options.cross_clip:
        factor = min(s_stop, 1.0) ** options.alpha * weight * advantage
        return s * factor, factor
    low = lower_bound(u, options.delta, options.delta_step)
    factor = clip(s_stop, low, 1.0) ** options.alpha * weight * advantage
    return clip(s, low, 1.0) * factor, factor if low <= s <= 1.0 else 0.0


def k3(logp: float, ref_logp: float) -> tuple[float, float]:
    """The k3 estimate of KL(learner || start) at one token, and its derivative by logp."""
    d = ref_logp - logp
    return math.exp(d) - d - 1.0, 1.0 - math.exp(d)


# --------------------------------------------------------------------------------------------------
# The other methods that share rollouts
# --------------------------------------------------------------------------------------------------


def swarm_choice(rollouts: Sequence[Rollout], k: int, num_agents: int, share: float) -> dict[int, int]:
    """Whose group the learner trains on, for each prompt."""
    exact = Fraction(share).limit_denominator(10**6)
    others = [j for j in range(num_agents) if j != k]
    choice = {}
    for q in {r.prompt for r in rollouts}:
        choice[q] = k
        taken_before = math.floor(q * exact)
        if others and math.floor((q + 1) * exact) > taken_before:
            j = others[taken_before % len(others)]
            if any(r.prompt == q and r.source == j and r.reward is not None for r in rollouts):
                choice[q] = j
    return choice


def swarm_advantages(rollouts: Sequence[Rollout], k: int, num_agents: int, share: float) -> list[float | None]:
    """Within each (prompt, source) group; 0 in the groups that are not chosen."""
    advantages: list[float | None] = [None] * len(rollouts)
    choice = swarm_choice(rollouts, k, num_agents, share)
    for j in range(num_agents):
        members = [i for i, r in enumerate(rollouts) if r.source == j]
        for i, advantage in zip(members, group_advantages([rollouts[i] for i in members]), strict=True):
            chosen = choice[rollouts[i].prompt] == j
            advantages[i] = advantage if chosen or advantage is None else 0.0
    return advantages


def is_success(rollouts: Sequence[Rollout], i: int) -> bool:
    """Above the mean of everybody's rewards on its prompt."""
    rewards = [r.reward for r in rollouts if r.prompt == rollouts[i].prompt and r.reward is not None]
    reward = rollouts[i].reward
    return reward is not None and max(rewards) > min(rewards) and reward > mean(rewards) + 1e-9


def success_gated_advantages(rollouts: Sequence[Rollout], k: int) -> list[float | None]:
    """Own: in the own group. Foreign: in everybody's, for successes on prompts where k has none; else 0."""
    pooled = group_advantages(rollouts)
    advantages: list[float | None] = [None] * len(rollouts)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own]), strict=True):
        advantages[i] = advantage
    solved = {rollouts[i].prompt for i in own if is_success(rollouts, i)}
    for i, r in enumerate(rollouts):
        if r.source != k and r.reward is not None:
            advantages[i] = pooled[i] if is_success(rollouts, i) and r.prompt not in solved else 0.0
    return advantages


def luffy_advantages(rollouts: Sequence[Rollout], k: int) -> list[float | None]:
    """One group of the own rollouts and the others' successes; 0 for what the others got wrong."""
    advantages: list[float | None] = [None if r.reward is None else 0.0 for r in rollouts]
    group = [i for i, r in enumerate(rollouts) if r.source == k or is_success(rollouts, i)]
    for i, advantage in zip(group, group_advantages([rollouts[i] for i in group]), strict=True):
        advantages[i] = advantage
    return advantages


def robust_advantages(rollouts: Sequence[Rollout], k: int, foreign: str) -> list[float | None]:
    """Own: in the own group. Foreign: how much better than k's own mean, in units of the pair's deviation."""
    advantages: list[float | None] = [None] * len(rollouts)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own]), strict=True):
        advantages[i] = advantage
    for i, r in enumerate(rollouts):
        if r.source == k or r.reward is None:
            continue
        here = [o for o in rollouts if o.prompt == r.prompt and o.reward is not None]
        mine = [float(o.reward or 0.0) for o in here if o.source == k]
        theirs = [float(o.reward or 0.0) for o in here if o.source == r.source]
        advantages[i] = 0.0
        if mine and max(mine + theirs) > min(mine + theirs):
            value = (r.reward - mean(mine)) / (sample_std(mine + theirs) + STD_EPS)
            if abs(value) > 1e-9:
                advantages[i] = value if foreign == "all" else max(value, 0.0)
    return advantages


def source_token_logps(rollout: Rollout) -> list[float]:
    """The source's log-probabilities on the learner's tokens: as they are where there are as many, else spread."""
    if len(rollout.old_logps) == len(rollout.logps):
        return list(rollout.old_logps)
    return [math.fsum(rollout.old_logps) / len(rollout.logps)] * len(rollout.logps)


def rival_term(
    rollout: Rollout, stop: Rollout, advantage: float, options: Options, omega_jk: float = 1.0
) -> tuple[float, list[float]]:
    """A foreign rollout's contribution, and its derivative by each of the learner's log-probabilities."""
    n = len(rollout.logps)
    if options.algorithm == "hacpo_robust":
        length = n if options.ratio_unit == "learner" else len(stop.old_logps)
        log_s = clip(mean(stop.logps) - math.fsum(stop.old_logps) / length, -LOG_RATIO_MAX, LOG_RATIO_MAX)
        weight = min(math.exp(log_s), 1.0) if options.truncate else 1.0
        weight *= min(omega_jk, 1.0) if options.cross_omega else 1.0
        value = weight * advantage * math.exp(mean(rollout.logps) - mean(stop.logps))
        return value, [value / n] * n
    if options.algorithm in ("swarm", "success_gated"):
        weight = options.transfer_weight if options.algorithm == "success_gated" else 1.0
        value = weight * advantage * math.exp(mean(rollout.logps) - mean(stop.logps))
        return value, [value / n] * n
    parts, slopes = [], []
    if options.algorithm == "luffy":
        for logp in rollout.logps:
            p = math.exp(logp)
            parts.append(p / (p + options.gamma) * advantage / n)
            # df / dlog(p) = p f'(p)
            slopes.append(p * options.gamma / (p + options.gamma) ** 2 * advantage / n)
        return math.fsum(parts), slopes
    log_ratios = [now - old for now, old in zip(stop.logps, source_token_logps(stop), strict=True)]
    kl = mean([math.exp(x) - x - 1.0 for x in log_ratios])
    if advantage < 0 and kl > options.kl_max:
        return 0.0, [0.0] * n
    for logp, stop_logp, log_ratio in zip(rollout.logps, stop.logps, log_ratios, strict=True):
        weight = min(math.exp(clip(log_ratio, -LOG_RATIO_MAX, LOG_RATIO_MAX)), options.cap)
        parts.append(weight * math.exp(logp - stop_logp) * advantage / n)
        slopes.append(parts[-1])
    return math.fsum(parts), slopes


def swarm_count(rollouts: Sequence[Rollout], used: Sequence[int], k: int, share: float) -> float:
    """How many rollouts are trained on, if groups have the same size: (1 - share) own and share of one other."""
    own = sum(rollouts[i].source == k for i in used)
    others = {rollouts[i].source for i in used} - {k}
    if not others:
        return max(own, 1)
    return max((1 - share) * own + share * (len(used) - own) / len(others), 1)


# --------------------------------------------------------------------------------------------------
# Sections 7 and 8: the objectives
# --------------------------------------------------------------------------------------------------


@dataclass
class Result:
    value: float
    # d J_k / d logps, one list for each rollout given, zeros for one that is not used.
    gradient: list[list[float]]
    # The value by parts: the own mean, one mean for each source (before cross_weight), the KL.
    own: float = 0.0
    foreign: dict[int, float] = field(default_factory=dict)
    kl: float = 0.0


def advantages_for(
    rollouts: Sequence[Rollout], k: int, capabilities: Sequence[float | None], options: Options
) -> list[float | None]:
    """The advantage of each rollout under `options.algorithm`; None where the rollout is not used at all."""
    if options.algorithm == "hacpo":
        return capability_advantages(rollouts, k, capabilities, options)
    if options.algorithm in ("naive", "ftis"):
        return group_advantages(rollouts)
    if options.algorithm == "swarm":
        return swarm_advantages(rollouts, k, len(capabilities), options.share)
    if options.algorithm == "success_gated":
        return success_gated_advantages(rollouts, k)
    if options.algorithm == "luffy":
        return luffy_advantages(rollouts, k)
    if options.algorithm == "hacpo_robust":
        return robust_advantages(rollouts, k, options.foreign)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    advantages: list[float | None] = [None] * len(rollouts)
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own]), strict=True):
        advantages[i] = advantage
    return advantages


def objective(
    rollouts: Sequence[Rollout],
    k: int,
    capabilities: Sequence[float | None],
    options: Options,
    u: int = 0,
    stop_at: Sequence[Rollout] | None = None,
) -> Result:
    """J_k over one mini-batch of whole prompts, and its gradient.

    `stop_at` gives the rollouts at which the stop-gradient factors are evaluated: the same ones by default.
    With it held fixed while `rollouts` moves, the gradient of `value` is `gradient`, in the ordinary sense.
    """
    stop_at = rollouts if stop_at is None else stop_at
    advantages = advantages_for(rollouts, k, capabilities, options)
    result = Result(0.0, [[0.0] * len(r.logps) for r in rollouts])
    used = [i for i, a in enumerate(advantages) if a is not None and not rollouts[i].dropped]

    # Which rollouts share a mean, and with what weight that mean enters.
    if options.algorithm in ("naive", "ftis"):
        means = [(None, used, 1.0)]
    elif options.algorithm == "swarm":
        means = [(None, used, len(used) / swarm_count(rollouts, used, k, options.share))]
    else:
        means = []
        for j in sorted({rollouts[i].source for i in used}):
            weight = 1.0 if j == k else options.cross_weight
            means.append((j, [i for i in used if rollouts[i].source == j], weight))

    for j, members, mean_weight in means:
        if not members:
            continue
        total = 0.0
        for i in members:
            rollout, advantage = rollouts[i], advantages[i] or 0.0
            weight = mean_weight / len(members)
            if options.algorithm == "grpo":
                total += _token_level(rollout, advantage, options, weight, result.gradient[i])
                continue
            unit = options.ratio_unit if options.algorithm == "hacpo" else "token"
            against = options.ratio if options.algorithm == "naive" else "source"
            log_s, slope = log_ratio_and_slope(rollout, k, unit, against)
            s = math.exp(log_s)
            if options.algorithm in RIVALS and rollout.source != k:
                omega_jk = omega(capabilities, rollout.source, k)
                term, slopes = rival_term(rollout, stop_at[i], advantage, options, omega_jk)
                total += term
                for t, d_logp in enumerate(slopes):
                    result.gradient[i][t] += weight * d_logp
                continue
            if options.algorithm == "hacpo" and rollout.source != k:
                s_stop = math.exp(log_ratio_and_slope(stop_at[i], k, unit)[0])
                coefficient = omega(capabilities, rollout.source, k) if options.cross_omega else 1.0
                term, d_term = foreign_term(s, s_stop, advantage, coefficient, u, options)
            else:
                low, high = 1.0 - options.eps_low, 1.0 + options.eps_high
                term, d_term = clipped_surrogate(s, advantage, low, high)
            total += term
            for t in range(len(rollout.logps)):
                # ds = s d(log s)
                result.gradient[i][t] += weight * d_term * s * slope
        value = total / len(members)
        result.value += mean_weight * value
        if j is None or j == k:
            result.own = value
        else:
            result.foreign[j] = value

    own = [i for i in used if rollouts[i].source == k]
    if options.beta and own:
        total = 0.0
        for i in own:
            logps, ref_logps = rollouts[i].logps, rollouts[i].ref_logps
            assert ref_logps is not None
            for t, (logp, ref_logp) in enumerate(zip(logps, ref_logps, strict=True)):
                value, slope = k3(logp, ref_logp)
                total += value / len(logps)
                result.gradient[i][t] -= options.beta * slope / len(logps) / len(own)
        result.kl = total / len(own)
        result.value -= options.beta * result.kl
    return result


def _token_level(rollout: Rollout, advantage: float, options: Options, weight: float, gradient: list[float]) -> float:
    """GRPO: each token has its ratio and its clip; the mean over the tokens, then over the rollouts."""
    total = 0.0
    n = len(rollout.logps)
    for t, (logp, old_logp) in enumerate(zip(rollout.logps, rollout.old_logps, strict=True)):
        ratio = math.exp(logp - old_logp)
        low, high = 1.0 - options.eps_low, 1.0 + options.eps_high
        term, d_term = clipped_surrogate(ratio, advantage, low, high)
        total += term / n
        gradient[t] += weight * d_term * ratio / n
    return total
