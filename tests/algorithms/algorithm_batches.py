"""Random batches, and the bridge from one list of rollouts to `hacrl.algorithms` and to the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hacrl.algorithms import (
    ALGORITHMS,
    FTIS,
    GRPO,
    HACPO,
    OPD,
    Advantages,
    Algorithm,
    Reading,
    Sequences,
    Terms,
    k3_kl,
)
from reference import Options, Rollout, source_token_logps

DEFAULTS = {f.name: f.default for f in fields(Options)}
BINARY = (0.0, 1.0)
GRADED = (0.0, 0.25, 0.5, 1.0)
RIVAL_OPTIONS = {"swarm": "share", "ftis": "cap kl_max", "success_gated": "transfer_weight", "luffy": "gamma"}
RIVAL_OPTIONS["hacpo_robust"] = "cross_weight foreign truncate cross_omega ratio_unit reward_min"


def build(options: Options) -> Algorithm:
    """The algorithm of hacrl that the reference's options describe."""
    common = {name: getattr(options, name) for name in ("beta", "loss_type", "scale_rewards")}
    clip: dict[str, object] = {"epsilon": options.eps_low, "epsilon_high": options.eps_high, **common}
    if options.algorithm in RIVAL_OPTIONS:
        names = RIVAL_OPTIONS[options.algorithm].split()
        return ALGORITHMS[options.algorithm](**clip, **{name: getattr(options, name) for name in names})
    if options.algorithm == "topr":
        return ALGORITHMS["topr"](**common)
    if options.algorithm == "naive":
        clip["ratio"] = options.ratio
    if options.algorithm == "opd":
        return OPD(weight=options.weight, reward_weight=options.reward_weight, clamp=options.clamp, **clip)
    if options.algorithm != "hacpo":
        return ALGORITHMS[options.algorithm](**clip)
    same_name = (
        "baseline baseline_guard cross_baseline cross_omega alpha ratio_unit cross_clip delta delta_step "
        "cross_weight reward_min"
    )
    return HACPO(**clip, **{name: getattr(options, name) for name in same_name.split()})


def label(value: object) -> str:
    """A short test id: the algorithm and whatever is not the default."""
    if not isinstance(value, Options):
        return str(value)
    changed = [f"{name}={v}" for name, v in vars(value).items() if v != DEFAULTS[name] and name != "algorithm"]
    return "-".join([value.algorithm, *changed])


def random_capabilities(rng: random.Random, n: int) -> list[float | None]:
    # Continuous, so that no baseline lands on the edge of the guard's range, and below a ratio of 10.
    return [rng.uniform(0.15, 0.95) for _ in range(n)]


def seen_by(
    learner: int,
    rng: random.Random,
    rollout: Rollout,
    own_spread: float = 8e-4,
    foreign_spread: float = 0.15,
    dropped_share: float = 0.1,
) -> Rollout:
    """The same completion with the tokens and log-probabilities that it has for this learner.

    The spreads are such that all sides of the bands of GSPO (3e-4) and HACPO (0.2) are met.
    """
    if rollout.source == learner:
        logps = [logp + rng.gauss(0, own_spread) for logp in rollout.old_logps]
    else:
        center = sum(rollout.old_logps) / len(rollout.old_logps) - 0.1 + rng.gauss(0, foreign_spread)
        noise = [rng.gauss(0, 0.3) for _ in range(rng.randint(1, 6))]
        logps = [center + x - sum(noise) / len(noise) for x in noise]
    before = random.Random(repr(logps))  # apart, so that it changes no other number
    return replace(
        rollout,
        logps=tuple(logps),
        own_old_logps=tuple(logp + before.gauss(0, own_spread) for logp in logps),
        ref_logps=tuple(logp + rng.gauss(0, 0.3) for logp in logps),
        dropped=rollout.source != learner and rng.random() < dropped_share,
    )


def random_rollouts(
    rng: random.Random,
    n: int,
    learner: int,
    rewards: Sequence[float] = BINARY,
    prompts: int = 5,
    own_spread: float = 8e-4,
    foreign_spread: float = 0.15,
    none_share: float = 0.1,
    dropped_share: float = 0.1,
) -> list[Rollout]:
    """A batch as `learner` sees it: groups of any size, rewards missing, rollouts dropped."""
    rollouts = []
    for q in range(prompts):
        for j in range(n):
            success = rng.choice([0.1, 0.5, 0.9])
            mute = rng.random() < 0.05  # The verifier fails for the whole group.
            for _ in range(rng.randint(1, 6)):
                right = rng.random() < success
                reward = max(rewards) if right else rng.choice([r for r in rewards if r < max(rewards)])
                rollout = Rollout(
                    source=j,
                    prompt=q,
                    reward=None if mute or rng.random() < none_share else reward,
                    old_logps=tuple(-2 * rng.random() for _ in range(rng.randint(1, 6))),
                    logps=(),
                    num_bytes=rng.randint(1, 12),
                )
                rollouts.append(seen_by(learner, rng, rollout, own_spread, foreign_spread, dropped_share))
    return rollouts


def with_readings(rng: random.Random, rollouts: Sequence[Rollout], teachers: int) -> list[Rollout]:
    """The same with more tokens, and so many teachers' readings: in the same tokens, in others, or none."""

    def cut(length: int, pieces: int) -> tuple[int, ...]:
        """Ends of tokens, some of them with no text of their own."""
        return tuple(sorted([*(rng.randint(0, length) for _ in range(pieces - 1)), length]))

    changed = []
    for rollout in rollouts:
        size, length = rng.randint(1, 14), rng.randint(1, 20)
        old = [rng.choice([-2 * rng.random(), -1e-5 * rng.random()]) for _ in range(size)]
        readings: list[tuple[tuple[float, ...], tuple[int, ...] | None] | None] = []
        for _ in range(teachers):
            ends = rng.choice([None, cut(length, rng.randint(1, 14))])
            count = size if ends is None else len(ends)
            logps = tuple(-rng.choice([1, 20]) * rng.random() for _ in range(count))
            readings.append((logps, ends) if rng.random() > 0.2 else None)
        changed.append(
            replace(
                rollout,
                old_logps=tuple(old),
                logps=tuple(logp + rng.gauss(0, 0.2) for logp in old),
                ref_logps=tuple(logp + rng.gauss(0, 0.3) for logp in old),
                ends=cut(length, size),
                readings=tuple(readings),
            )
        )
    return changed


def token_advantages(algorithm: Algorithm, rollout: Rollout) -> list[float]:
    """What its readers add to the advantage of each token."""
    readings = [None if reading is None else Reading(*reading) for reading in rollout.readings]
    added: list[float] = (
        algorithm.token_advantages(Reading(rollout.old_logps, rollout.ends), readings).nan_to_num(0.0).sum(0).tolist()
    )
    return added


def padded(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=torch.float64)


@dataclass
class Outcome:
    value: float
    # One list for each rollout given, as in the reference.
    gradient: list[list[float]]
    advantages: Advantages
    # The rollouts that `terms` and `sequences` have a row for.
    used: list[int]
    terms: Terms
    sequences: Sequences


def make_sequences(
    rollouts: Sequence[Rollout],
    learner: int,
    advantage_N: Tensor,
    omega_N: Tensor,
    by_token: bool = False,
    rescored: bool = False,
) -> Sequences:
    """Tensors of a batch. The padding holds values that would show in any sum that forgot the mask."""
    if rescored:
        rollouts = [r if r.source == learner else replace(r, old_logps=r.own_old_logps or ()) for r in rollouts]
    width = max(max(len(r.logps), len(r.old_logps)) for r in rollouts) + 2
    logp_NT = padded([r.logps for r in rollouts], width, -3.7).requires_grad_()
    mask_NT = padded([[1.0] * len(r.logps) for r in rollouts], width, 0.0).bool()
    # A foreign source's tokens are not the learner's: nothing may read them one by one, unless it says so.
    nan = float("nan")
    old_rows = [source_token_logps(r) if by_token or r.source == learner else (nan,) for r in rollouts]
    return Sequences(
        logp_NT=logp_NT,
        mask_NT=mask_NT,
        old_logp_N=torch.tensor([sum(r.old_logps) for r in rollouts], dtype=torch.float64),
        old_length_N=torch.tensor([len(r.old_logps) for r in rollouts]),
        bytes_N=torch.tensor([r.num_bytes for r in rollouts]),
        own_N=torch.tensor([r.source == learner for r in rollouts]),
        advantage_N=advantage_N,
        omega_N=omega_N,
        old_logp_NT=padded(old_rows, width, nan),
    )


def run(
    algorithm: Algorithm,
    rollouts: Sequence[Rollout],
    learner: int,
    capabilities: Sequence[float | None],
    update: int = 0,
) -> Outcome:
    """One update's objective and gradient the way a trainer gets them."""
    valid = [
        i for i, r in enumerate(rollouts) if r.reward is not None and (algorithm.shares_rollouts or r.source == learner)
    ]
    omega_KK = algorithm.omega(list(capabilities))
    source_N = torch.tensor([rollouts[i].source for i in valid], dtype=torch.long)
    advantages = algorithm.advantages(
        torch.tensor([rollouts[i].reward for i in valid], dtype=torch.float64),
        torch.tensor([rollouts[i].prompt for i in valid], dtype=torch.long),
        source_N,
        learner,
        omega_KK,
    )
    # What the learner could not retokenize has had its say in the baseline, and has none in the means.
    rows = [row for row, i in enumerate(valid) if not rollouts[i].dropped]
    used = [valid[row] for row in rows]
    source_N = source_N[rows]
    sequences = make_sequences(
        [rollouts[i] for i in used],
        learner,
        advantages.advantage_N[rows],
        algorithm.coefficients(source_N, learner, omega_KK),
        by_token=isinstance(algorithm, FTIS),
        rescored=algorithm.rescores_foreign,
    )
    if algorithm.scores_by_others:
        added = [token_advantages(algorithm, rollouts[i]) for i in used]
        sequences.token_advantage_NT = padded(added, sequences.logp_NT.shape[1], 0.0)
    terms = algorithm.terms(sequences, update)
    longest = Options.max_completion_length
    weight_N = algorithm.rollout_weights(source_N, learner, sequences.length_N, longest)
    value = (terms.objective_N * weight_N).sum()
    own_N = sequences.own_N
    if algorithm.beta and own_N.any():
        references = [rollouts[i].ref_logps or () for i in used]
        ref_logp_NT = padded(references, sequences.logp_NT.shape[1], 1.9)
        kl_N = k3_kl(sequences.logp_NT, ref_logp_NT, sequences.mask_NT)
        factor_N = algorithm.length_factors(sequences.length_N[own_N], longest)
        value = value - algorithm.beta * (kl_N[own_N] * factor_N).mean()
    (gradient_NT,) = torch.autograd.grad(value, sequences.logp_NT)
    assert (gradient_NT[~sequences.mask_NT] == 0).all()
    gradient = [[0.0] * len(r.logps) for r in rollouts]
    for row, i in enumerate(used):
        gradient[i] = gradient_NT[row, : len(rollouts[i].logps)].tolist()
    return Outcome(float(value.detach()), gradient, advantages, used, terms, sequences)


def with_log_ratio(log_ratio: float, rollout: Rollout) -> Rollout:
    """The same rollout with the learner's log-probabilities moved to this (token) log-ratio."""
    old = sum(rollout.old_logps) / len(rollout.old_logps)
    now = sum(rollout.logps) / len(rollout.logps)
    return replace(rollout, logps=tuple(logp - now + old + log_ratio for logp in rollout.logps))


def default_options(algorithm: str) -> Options:
    if algorithm in ("grpo", "opd"):
        return Options(algorithm, eps_low=GRPO.epsilon, eps_high=GRPO.epsilon_high)
    return Options(algorithm, ratio_unit="learner" if algorithm == "hacpo_robust" else "token")
