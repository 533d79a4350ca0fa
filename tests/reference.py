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
RIVALS = ("swarm", "ftis", "success_gated", "luffy", "hacpo_robust", "topr")

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
    # Where each of the learner's tokens ends in the text, if others have other tokens.
    ends: tuple[int, ...] | None = None
    # What each teacher says of an own rollout: log-probabilities and ends of the teacher's tokens; None if it cannot
    # read the rollout. Without ends its tokens are the learner's.
    readings: tuple[tuple[tuple[float, ...], tuple[int, ...] | None] | None, ...] = ()
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
    loss_type: str = "grpo"
    max_completion_length: int = 8
    scale_rewards: str = "group"
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
    # Distillation from other agents.
    weight: float = 1.0
    reward_weight: float = 1.0
    clamp: float = 10.0


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))


def divisor(group: Sequence[float], batch: Sequence[float], scale_rewards: str) -> float:
    """What a reward less its baseline is divided by."""
    if scale_rewards == "none":
        return 1.0
    return sample_std(batch if scale_rewards == "batch" else group) + STD_EPS


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
    batch = [r.reward for r in rollouts if r.reward is not None]
    for q in sorted({r.prompt for r in rollouts}):
        members = [i for i, r in enumerate(rollouts) if r.prompt == q and r.reward is not None]
        sources = [rollouts[i].source for i in members]
        rewards = [shifted(rollouts[i].reward or 0.0, options.reward_min) for i in members]
        if len(rewards) < 2 or max(rewards) == min(rewards):
            for i in members:
                advantages[i] = 0.0
            continue
        for i, j, reward in zip(members, sources, rewards, strict=True):
            whose = j if options.cross_baseline == "source" else k
            joint = options.baseline == "joint"
            mu = capability_baseline(sources, rewards, whose, capabilities, options.baseline_guard, joint)
            advantages[i] = (reward - mu) / divisor(rewards, batch, options.scale_rewards)
    return advantages


def group_advantages(rollouts: Sequence[Rollout], scale_rewards: str = "group") -> list[float | None]:
    """GRPO's advantage: mean and standard deviation of whatever rollouts of the prompt are given."""
    advantages: list[float | None] = [None] * len(rollouts)
    batch = [r.reward for r in rollouts if r.reward is not None]
    for q in sorted({r.prompt for r in rollouts}):
        members = [i for i, r in enumerate(rollouts) if r.prompt == q and r.reward is not None]
        rewards = [float(rollouts[i].reward or 0.0) for i in members]
        for i, reward in zip(members, rewards, strict=True):
            if len(rewards) < 2 or max(rewards) == min(rewards):
                advantages[i] = 0.0
            else:
                advantages[i] = (reward - mean(rewards)) / divisor(rewards, batch, scale_rewards)
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


def cispo_term(log_p: float, s_stop: float, advantage: float, high: float) -> tuple[float, float]:
    """CISPO: min(s, high), a constant, times A log p, and its derivative by log p; `log_p` is counted from where the
    constant was taken. The value is that of an exponential, which has the same slope there and says more."""
    value = min(s_stop, high) * advantage * math.exp(log_p)
    return value, value


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


def entropy(logits: Sequence[float], temperature: float) -> tuple[float, list[float]]:
    """Entropy of softmax(logits / temperature), and its derivative by each logit."""
    scaled = [logit / temperature for logit in logits]
    log_z = max(scaled) + math.log(math.fsum(math.exp(x - max(scaled)) for x in scaled))
    logps = [x - log_z for x in scaled]
    h = -math.fsum(math.exp(logp) * logp for logp in logps)
    return h, [-math.exp(logp) * (logp + h) / temperature for logp in logps]


def soft_overlong(length: int, max_completion_length: int, soft_punish_cache: int) -> float:
    """DAPO's equation 13: 0, then down to -1 over the last `soft_punish_cache` tokens."""
    free = max_completion_length - soft_punish_cache
    if length <= free:
        return 0.0
    if length <= max_completion_length:
        return (free - length) / soft_punish_cache
    return -1.0


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


def swarm_advantages(
    rollouts: Sequence[Rollout], k: int, num_agents: int, share: float, scale_rewards: str
) -> list[float | None]:
    """Within each (prompt, source) group; 0 in the groups that are not chosen."""
    advantages: list[float | None] = [None] * len(rollouts)
    choice = swarm_choice(rollouts, k, num_agents, share)
    for j in range(num_agents):
        members = [i for i, r in enumerate(rollouts) if r.source == j]
        own_groups = group_advantages([rollouts[i] for i in members], scale_rewards)
        for i, advantage in zip(members, own_groups, strict=True):
            chosen = choice[rollouts[i].prompt] == j
            advantages[i] = advantage if chosen or advantage is None else 0.0
    return advantages


def is_success(rollouts: Sequence[Rollout], i: int) -> bool:
    """Above the mean of everybody's rewards on its prompt."""
    rewards = [r.reward for r in rollouts if r.prompt == rollouts[i].prompt and r.reward is not None]
    reward = rollouts[i].reward
    return reward is not None and max(rewards) > min(rewards) and reward > mean(rewards) + 1e-9


def success_gated_advantages(rollouts: Sequence[Rollout], k: int, scale_rewards: str) -> list[float | None]:
    """Own: in the own group. Foreign: in everybody's, for successes on prompts where k has none; else 0."""
    pooled = group_advantages(rollouts, scale_rewards)
    advantages: list[float | None] = [None] * len(rollouts)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own], scale_rewards), strict=True):
        advantages[i] = advantage
    solved = {rollouts[i].prompt for i in own if is_success(rollouts, i)}
    for i, r in enumerate(rollouts):
        if r.source != k and r.reward is not None:
            advantages[i] = pooled[i] if is_success(rollouts, i) and r.prompt not in solved else 0.0
    return advantages


def luffy_advantages(rollouts: Sequence[Rollout], k: int, scale_rewards: str) -> list[float | None]:
    """One group of the own rollouts and the others' successes; 0 for what the others got wrong."""
    advantages: list[float | None] = [None if r.reward is None else 0.0 for r in rollouts]
    group = [i for i, r in enumerate(rollouts) if r.source == k or is_success(rollouts, i)]
    for i, advantage in zip(group, group_advantages([rollouts[i] for i in group], scale_rewards), strict=True):
        advantages[i] = advantage
    return advantages


def robust_advantages(rollouts: Sequence[Rollout], k: int, foreign: str, scale_rewards: str) -> list[float | None]:
    """Own: in the own group. Foreign: how much better than k's own mean, in units of the pair's deviation."""
    advantages: list[float | None] = [None] * len(rollouts)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own], scale_rewards), strict=True):
        advantages[i] = advantage
    for i, r in enumerate(rollouts):
        if r.source == k or r.reward is None:
            continue
        here = [o for o in rollouts if o.prompt == r.prompt and o.reward is not None]
        mine = [float(o.reward or 0.0) for o in here if o.source == k]
        theirs = [float(o.reward or 0.0) for o in here if o.source == r.source]
        advantages[i] = 0.0
        if mine and max(mine + theirs) > min(mine + theirs):
            batch = [o.reward for o in rollouts if o.source in (k, r.source) and o.reward is not None]
            baseline = mean(theirs) if foreign == "centred" else mean(mine)
            value = (r.reward - baseline) / divisor(mine + theirs, batch, scale_rewards)
            if abs(value) > 1e-9:
                advantages[i] = max(value, 0.0) if foreign == "right" else value
    return advantages


def source_token_logps(rollout: Rollout) -> list[float]:
    """The source's log-probabilities on the learner's tokens: as they are where there are as many, else spread."""
    if len(rollout.old_logps) == len(rollout.logps):
        return list(rollout.old_logps)
    return [math.fsum(rollout.old_logps) / len(rollout.logps)] * len(rollout.logps)


def rival_term(
    rollout: Rollout, stop: Rollout, advantage: float, options: Options, omega_jk: float = 1.0
) -> tuple[float, list[float]]:
    """What a foreign rollout (under TOPR, any) contributes, and the derivative by each of the learner's
    log-probabilities."""
    n = len(rollout.logps)
    if options.algorithm == "hacpo_robust":
        length = n if options.ratio_unit == "learner" else len(stop.old_logps)
        log_s = clip(mean(stop.logps) - math.fsum(stop.old_logps) / length, -LOG_RATIO_MAX, LOG_RATIO_MAX)
        weight = min(math.exp(log_s), 1.0) if options.truncate else 1.0
        if options.foreign == "exact" and advantage < 0:
            weight = min(math.exp(math.fsum(stop.logps) - math.fsum(stop.old_logps)), 1.0)
        weight *= min(omega_jk, 1.0) if options.cross_omega else 1.0
        value = weight * advantage * math.exp(mean(rollout.logps) - mean(stop.logps))
        return value, [value / n] * n
    if options.algorithm == "topr":
        likelier = math.exp(math.fsum(stop.logps) - math.fsum(stop.old_logps))
        weight = min(likelier, 1.0) if advantage < 0 else 1.0
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


def averages_tokens(options: Options) -> bool:
    return options.loss_type in ("bnpo", "dapo", "cispo")


def swarm_count(rollouts: Sequence[Rollout], used: Sequence[int], k: int, options: Options) -> float:
    """How many rollouts, or tokens, are trained on, if groups have the same size: (1 - share) own and share of one
    other."""
    size = {i: len(rollouts[i].logps) if averages_tokens(options) else 1 for i in used}
    own = sum(size[i] for i in used if rollouts[i].source == k)
    others = {rollouts[i].source for i in used} - {k}
    if not others:
        return max(own, 1)
    return max((1 - options.share) * own + options.share * (sum(size.values()) - own) / len(others), 1)


def shares_of_mean(rollouts: Sequence[Rollout], options: Options) -> list[float]:
    """What each of these rollouts counts in one mean over them, its term being a mean over its tokens."""
    lengths = [len(r.logps) for r in rollouts]
    if averages_tokens(options):
        return [length / sum(lengths) for length in lengths]
    if options.loss_type == "dr_grpo":
        return [length / (len(lengths) * options.max_completion_length) for length in lengths]
    return [1 / len(lengths)] * len(lengths)


# --------------------------------------------------------------------------------------------------
# Distillation from other agents
# --------------------------------------------------------------------------------------------------


def opd_teachers(capabilities: Sequence[float | None], k: int, which: str) -> list[int]:
    teachers = []
    for j, c_j in enumerate(capabilities):
        c_k = capabilities[k]
        stronger = c_j is not None and c_k is not None and c_j > c_k
        if j != k and (which == "all" or stronger):
            teachers.append(j)
    return teachers


def opd_gap(rollout: Rollout, t: int, logps: Sequence[float], ends: Sequence[int] | None) -> float | None:
    """How much more likely token t is for a teacher than it was for the learner; None if it is left out."""
    own = rollout.old_logps
    if ends is None:
        return logps[t] - own[t]
    assert rollout.ends is not None
    borders = [end for end in range(1, max(rollout.ends) + 1) if end in rollout.ends and end in ends]
    if rollout.ends[t] > max(borders, default=-1) or (rollout.ends[t] == 0 and 0 in ends):
        return None
    span_end = min(end for end in borders if end >= rollout.ends[t])
    span_begin = max((end for end in borders if end < span_end), default=0 if 0 in rollout.ends and 0 in ends else -1)
    mine = [logp for logp, end in zip(own, rollout.ends, strict=True) if span_begin < end <= span_end]
    theirs = [logp for logp, end in zip(logps, ends, strict=True) if span_begin < end <= span_end]
    if len(mine) > 6 or len(theirs) > 6 or math.fsum(mine) > -1e-4:
        return None
    return (math.fsum(theirs) / math.fsum(mine) - 1.0) * own[t]


def opd_token_advantages(rollout: Rollout, options: Options) -> list[float]:
    """What the teachers who can read the rollout add to the advantage of each of its tokens."""
    readings = [reading for reading in rollout.readings if reading is not None]
    added = []
    for t in range(len(rollout.old_logps)):
        total = 0.0
        for logps, ends in readings:
            gap = opd_gap(rollout, t, logps, ends)
            total += 0.0 if gap is None else clip(gap, -options.clamp, options.clamp)
        added.append(options.weight * total / len(readings) if readings else 0.0)
    return added


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
    scale = options.scale_rewards
    if options.algorithm in ("naive", "ftis", "topr"):
        return group_advantages(rollouts, scale)
    if options.algorithm == "swarm":
        return swarm_advantages(rollouts, k, len(capabilities), options.share, scale)
    if options.algorithm == "success_gated":
        return success_gated_advantages(rollouts, k, scale)
    if options.algorithm == "luffy":
        return luffy_advantages(rollouts, k, scale)
    if options.algorithm == "hacpo_robust":
        return robust_advantages(rollouts, k, options.foreign, scale)
    own = [i for i, r in enumerate(rollouts) if r.source == k]
    advantages: list[float | None] = [None] * len(rollouts)
    for i, advantage in zip(own, group_advantages([rollouts[i] for i in own], scale), strict=True):
        factor = options.reward_weight if options.algorithm == "opd" else 1.0
        advantages[i] = None if advantage is None else factor * advantage
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
    if options.algorithm in ("naive", "ftis", "topr"):
        means = [(None, used, 1.0)]
    elif options.algorithm == "swarm":
        size = sum(len(rollouts[i].logps) for i in used) if averages_tokens(options) else len(used)
        means = [(None, used, size / swarm_count(rollouts, used, k, options))]
    else:
        means = []
        for j in sorted({rollouts[i].source for i in used}):
            weight = 1.0 if j == k else options.cross_weight
            means.append((j, [i for i in used if rollouts[i].source == j], weight))

    for j, members, mean_weight in means:
        if not members:
            continue
        value = 0.0
        for i, share in zip(members, shares_of_mean([rollouts[i] for i in members], options), strict=True):
            rollout, advantage = rollouts[i], advantages[i] or 0.0
            weight = mean_weight * share
            if options.algorithm in ("grpo", "opd"):
                added = opd_token_advantages(rollout, options)
                by_token = [advantage + a for a in added] if options.algorithm == "opd" else [advantage] * len(added)
                value += share * _token_level(rollout, stop_at[i], by_token, options, weight, result.gradient[i])
                continue
            unit = options.ratio_unit if options.algorithm == "hacpo" else "token"
            against = options.ratio if options.algorithm == "naive" else "source"
            log_s, slope = log_ratio_and_slope(rollout, k, unit, against)
            s = math.exp(log_s)
            if options.algorithm in RIVALS and (rollout.source != k or options.algorithm == "topr"):
                omega_jk = omega(capabilities, rollout.source, k)
                term, slopes = rival_term(rollout, stop_at[i], advantage, options, omega_jk)
                value += share * term
                for t, d_logp in enumerate(slopes):
                    result.gradient[i][t] += weight * d_logp
                continue
            if options.algorithm == "hacpo" and rollout.source != k:
                s_stop = math.exp(log_ratio_and_slope(stop_at[i], k, unit)[0])
                coefficient = omega(capabilities, rollout.source, k) if options.cross_omega else 1.0
                term, d_term = foreign_term(s, s_stop, advantage, coefficient, u, options)
            elif options.loss_type == "cispo":
                s_stop = math.exp(log_ratio_and_slope(stop_at[i], k, unit, against)[0])
                log_p = mean(rollout.logps) - mean(stop_at[i].logps)
                term, d_term = cispo_term(log_p, s_stop, advantage, options.eps_high)
                s, slope = 1.0, 1.0 / len(rollout.logps)  # the derivative is by log p, not by s
            else:
                low, high = 1.0 - options.eps_low, 1.0 + options.eps_high
                term, d_term = clipped_surrogate(s, advantage, low, high)
            value += share * term
            for t in range(len(rollout.logps)):
                # ds = s d(log s)
                result.gradient[i][t] += weight * d_term * s * slope
        result.value += mean_weight * value
        if j is None or j == k:
            result.own = value
        else:
            result.foreign[j] = value

    own = [i for i in used if rollouts[i].source == k]
    if options.beta and own:
        for i, share in zip(own, shares_of_mean([rollouts[i] for i in own], options), strict=True):
            logps, ref_logps = rollouts[i].logps, rollouts[i].ref_logps
            assert ref_logps is not None
            for t, (logp, ref_logp) in enumerate(zip(logps, ref_logps, strict=True)):
                value, slope = k3(logp, ref_logp)
                result.kl += share * value / len(logps)
                result.gradient[i][t] -= options.beta * share * slope / len(logps)
        result.value -= options.beta * result.kl
    return result


def _token_level(
    rollout: Rollout,
    stop: Rollout,
    advantages: Sequence[float],
    options: Options,
    weight: float,
    gradient: list[float],
) -> float:
    """GRPO: each token has its ratio and its clip; the mean over the tokens."""
    total = 0.0
    n = len(rollout.logps)
    for t, (logp, old_logp) in enumerate(zip(rollout.logps, rollout.old_logps, strict=True)):
        if options.loss_type == "cispo":
            stop_ratio = math.exp(clip(stop.logps[t] - old_logp, -LOG_RATIO_MAX, LOG_RATIO_MAX))
            term, d_term = cispo_term(logp - stop.logps[t], stop_ratio, advantages[t], options.eps_high)
            total += term / n
            gradient[t] += weight * d_term / n
            continue
        ratio = math.exp(logp - old_logp)
        low, high = 1.0 - options.eps_low, 1.0 + options.eps_high
        term, d_term = clipped_surrogate(ratio, advantages[t], low, high)
        total += term / n
        gradient[t] += weight * d_term * ratio / n
    return total
