"""What must hold for any input: laws of the algorithms, not numbers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from algorithm_batches import (
    GRADED,
    build,
    default_options,
    make_sequences,
    random_capabilities,
    random_rollouts,
    run,
    with_log_ratio,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms import (
    FTIS,
    GRPO,
    GSPO,
    HACPO,
    LUFFY,
    TOPR,
    Algorithm,
    CapabilityOptions,
    CapabilityTracker,
    Naive,
    SuccessGated,
    Swarm,
    capability_ratios,
    group_advantages,
)
from reference import Options, Rollout

# Derandomized: the same examples on every machine.
law = settings(max_examples=30, deadline=None, derandomize=True, database=None)

DOUBLE = torch.float64
LONG = torch.long
RIVALS = [Swarm(), FTIS(), SuccessGated(), LUFFY(), TOPR()]
seeds = st.integers(0, 2**32 - 1)
finite = st.floats(-5, 5, allow_nan=False, allow_subnormal=False)
hacpo_options = st.builds(
    Options,
    baseline=st.sampled_from(["capability", "joint"]),
    baseline_guard=st.booleans(),
    cross_baseline=st.sampled_from(["learner", "source"]),
    cross_omega=st.booleans(),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
    ratio_unit=st.sampled_from(["token", "byte"]),
    cross_clip=st.booleans(),
    delta=st.sampled_from([0.1, 0.2, 0.5, 1.0]),
    delta_step=st.sampled_from([0.0, 0.025]),
    cross_weight=st.sampled_from([0.0, 0.5, 1.0]),
    beta=st.sampled_from([0.0, 0.01]),
)


@st.composite
def grouped_rewards(draw: st.DrawFn, agents: int = 3) -> tuple[list[float], list[int], list[int]]:
    """Rewards of any range with their prompts and sources, in no order."""
    n = draw(st.integers(1, 20))
    rewards = draw(st.lists(finite, min_size=n, max_size=n))
    prompts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    sources = draw(st.lists(st.integers(0, agents - 1), min_size=n, max_size=n))
    return rewards, prompts, sources


def one_rollout(
    algorithm: Algorithm,
    rollout: Rollout,
    learner: int,
    advantage: float,
    omega: float = 1.0,
    update: int = 0,
) -> tuple[float, list[float]]:
    """The term of a single rollout and its gradient, for a given advantage."""
    sequences = make_sequences(
        [rollout], learner, torch.tensor([advantage], dtype=DOUBLE), torch.tensor([omega], dtype=DOUBLE)
    )
    objective_N = algorithm.terms(sequences, update).objective_N
    (gradient_NT,) = torch.autograd.grad(objective_N.sum(), sequences.logp_NT)
    return float(objective_N[0].detach()), gradient_NT[sequences.mask_NT].tolist()


# ------------------------------------------------------------------------------------------------------------
# HACPO and GSPO
# ------------------------------------------------------------------------------------------------------------


@law
@given(seed=seeds, options=hacpo_options, capability=st.floats(0, 1), update=st.integers(0, 12))
def test_one_agent_hacpo_is_gspo_bit_for_bit(seed: int, options: Options, capability: float, update: int) -> None:
    rollouts = random_rollouts(random.Random(seed), 1, 0, GRADED)
    hacpo = run(build(options), rollouts, 0, [capability], update)
    gspo = run(GSPO(beta=options.beta), rollouts, 0, [capability], update)
    assert hacpo.value == gspo.value
    assert hacpo.gradient == gspo.gradient
    assert hacpo.terms.kept_N.tolist() == gspo.terms.kept_N.tolist()


@law
@given(seed=seeds, options=hacpo_options, n=st.integers(2, 4))
def test_hacpo_on_own_rollouts_alone_is_gspo(seed: int, options: Options, n: int) -> None:
    # Sharing switched off: the others exist, with any capability, but their rollouts are not pooled.
    rng = random.Random(seed)
    learner = rng.randrange(n)
    rollouts = [r for r in random_rollouts(rng, n, learner, GRADED) if r.source == learner]
    capabilities = random_capabilities(rng, n)
    hacpo = run(build(options), rollouts, learner, capabilities)
    gspo = run(GSPO(beta=options.beta), rollouts, learner, capabilities)
    assert hacpo.value == pytest.approx(gspo.value, abs=1e-14)
    assert hacpo.gradient == gspo.gradient


@law
@given(seed=seeds, n=st.integers(2, 4))
def test_cross_weight_zero_leaves_the_own_mean_only(seed: int, n: int) -> None:
    rng = random.Random(seed)
    rollouts = random_rollouts(rng, n, 0)
    got = run(HACPO(cross_weight=0.0), rollouts, 0, random_capabilities(rng, n))
    own_N = got.sequences.own_N
    if own_N.any():
        assert got.value == pytest.approx(float(got.terms.objective_N.detach()[own_N].mean()), abs=1e-14)
    for rollout, gradient in zip(rollouts, got.gradient, strict=True):
        assert rollout.source == 0 or not any(gradient)


@law
@given(seed=seeds, n=st.integers(1, 4), capability=st.floats(0, 1), alpha=st.sampled_from([0.0, 1.0, 3.0]))
def test_equal_agents_are_one_agent(seed: int, n: int, capability: float, alpha: float) -> None:
    """Equal capability and identical policies: omega = 1, s = 1, and every mechanism is the identity."""
    rng = random.Random(seed)
    rollouts = random_rollouts(rng, n, 0, dropped_share=0)
    # Multiples of 1/64 add up exactly. Otherwise s is 1 up to rounding only, and what comes out above 1 has no
    # gradient: the band ends there.
    rollouts = [replace(r, old_logps=tuple(round(64 * x) / 64 for x in r.old_logps)) for r in rollouts]
    rollouts = [replace(r, logps=r.old_logps) for r in rollouts]
    hacpo = HACPO(alpha=alpha)
    capabilities: list[float | None] = [capability] * n
    assert (hacpo.omega(capabilities) == 1).all()
    got = run(hacpo, rollouts, 0, capabilities)
    assert (got.terms.log_ratio_N == 0).all()
    assert (got.terms.weight_N == 1).all()
    for row, i in enumerate(got.used):
        assert any(got.gradient[i]) == bool(got.sequences.advantage_N[row] != 0)
    # The advantages are those of one pooled group.
    naive = run(Naive(), rollouts, 0, capabilities)
    assert got.advantages.advantage_N.tolist() == pytest.approx(naive.advantages.advantage_N.tolist(), abs=1e-13)


@law
@given(seed=seeds, n=st.integers(2, 4), options=hacpo_options, update=st.integers(0, 3))
def test_permuting_the_agents_permutes_the_results(seed: int, n: int, options: Options, update: int) -> None:
    rng = random.Random(seed)
    learner = rng.randrange(n)
    capabilities = random_capabilities(rng, n)
    rollouts = random_rollouts(rng, n, learner, GRADED)
    new_name = list(range(n))
    rng.shuffle(new_name)
    # Everything comes in another order too: agents are sorted by name, rollouts shuffled within.
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    order.sort(key=lambda i: new_name[rollouts[i].source])
    renamed = [replace(rollouts[i], source=new_name[rollouts[i].source]) for i in order]
    new_capabilities: list[float | None] = [None] * n
    for j in range(n):
        new_capabilities[new_name[j]] = capabilities[j]
    # Not swarm: there the other agents take turns by their number.
    for algorithm in (build(options), Naive(beta=0.01), GSPO(), GRPO(), FTIS(), SuccessGated(), LUFFY(), TOPR()):
        before = run(algorithm, rollouts, learner, capabilities, update)
        after = run(algorithm, renamed, new_name[learner], new_capabilities, update)
        assert after.value == pytest.approx(before.value, abs=1e-12)
        for new_place, i in enumerate(order):
            assert after.gradient[new_place] == pytest.approx(before.gradient[i], abs=1e-12)


@law
@given(seed=seeds, shift=st.integers(1, 10))
def test_other_prompts_do_not_matter(seed: int, shift: int) -> None:
    # A prompt's advantages depend on that prompt alone, wherever it stands in the batch.
    rng = random.Random(seed)
    rollouts = random_rollouts(rng, 2, 0, dropped_share=0, none_share=0)
    part = [replace(r, prompt=shift) for r in rollouts if r.prompt == 1 and r.reward is not None]
    if not part:
        return
    whole = run(HACPO(), rollouts, 0, [0.4, 0.7])
    alone = run(HACPO(), part, 0, [0.4, 0.7])
    rows = [row for row, i in enumerate(whole.used) if rollouts[i].prompt == 1]
    assert alone.advantages.advantage_N.tolist() == whole.advantages.advantage_N[rows].tolist()


# ------------------------------------------------------------------------------------------------------------
# The band
# ------------------------------------------------------------------------------------------------------------

foreign_rollouts = st.builds(
    lambda old_logps, logps, num_bytes: Rollout(1, 0, 1.0, tuple(old_logps), tuple(logps), num_bytes),
    st.lists(st.floats(-3, 0), min_size=1, max_size=5),
    st.lists(st.floats(-3, 0), min_size=1, max_size=5),
    st.integers(1, 20),
)
advantages = st.floats(0.01, 4).flatmap(lambda a: st.sampled_from([a, -a]))


@law
@given(
    rollout=foreign_rollouts,
    advantage=advantages,
    where=st.sampled_from(["below", "inside", "above"]),
    share=st.floats(0.01, 0.99),
    update=st.integers(0, 7),
    alpha=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
    omega=st.floats(0.1, 10),
)
def test_gradient_only_inside_the_band_whatever_the_sign(
    rollout: Rollout, advantage: float, where: str, share: float, update: int, alpha: float, omega: float
) -> None:
    low = 0.8 + 0.025 * update
    s = {"below": low * share, "inside": low + (1 - low) * share, "above": 1 + 5 * share}[where]
    moved = with_log_ratio(math.log(s), rollout)
    value, gradient = one_rollout(HACPO(alpha=alpha), moved, 0, advantage, omega, update)
    clipped = min(max(s, low), 1.0)
    # It counts in the mean whether or not it has a gradient.
    assert value == pytest.approx(clipped ** (1 + alpha) * omega * advantage, rel=1e-9)
    if where == "inside":
        slope = s ** (1 + alpha) * omega * advantage / len(rollout.logps)
        assert gradient == pytest.approx([slope] * len(rollout.logps), rel=1e-9)
    else:
        assert not any(gradient)


@law
@given(
    advantage=advantages,
    share=st.floats(0.05, 0.95),
    where=st.sampled_from(["below", "inside", "above"]),
    length=st.integers(1, 5),
)
def test_own_clip_stops_only_what_goes_too_far(advantage: float, share: float, where: str, length: int) -> None:
    s = {
        "below": 1 - 3e-4 * (1 + share),
        "inside": 1 - 3e-4 + 7e-4 * share,
        "above": 1 + 4e-4 * (1 + share),
    }[where]
    rollout = with_log_ratio(math.log(s), Rollout(0, 0, 1.0, (-1.0,) * length, (-1.0,) * length))
    _, gradient = one_rollout(GSPO(), rollout, 0, advantage)
    too_far = (where == "above" and advantage > 0) or (where == "below" and advantage < 0)
    assert any(gradient) != too_far
    assert all(g == 0 or (g > 0) == (advantage > 0) for g in gradient)


@law
@given(rollout=foreign_rollouts, advantage=advantages, log_s=st.floats(-3, 3))
def test_alpha_zero_is_the_plain_ratio(rollout: Rollout, advantage: float, log_s: float) -> None:
    moved, s = with_log_ratio(log_s, rollout), math.exp(log_s)
    value, gradient = one_rollout(HACPO(alpha=0.0, cross_clip=False), moved, 0, advantage)
    assert value == pytest.approx(s * advantage, rel=1e-9)
    assert gradient == pytest.approx([s * advantage / len(rollout.logps)] * len(rollout.logps), rel=1e-9)


@law
@given(rollout=foreign_rollouts, alpha=st.sampled_from([1.0, 2.0, 3.0]), log_s=st.floats(-3, 3))
def test_alpha_shrinks_what_is_unlikely_and_leaves_the_rest(rollout: Rollout, alpha: float, log_s: float) -> None:
    moved = with_log_ratio(log_s, rollout)
    plain, _ = one_rollout(HACPO(alpha=0.0, cross_clip=False), moved, 0, 1.0)
    weighted, _ = one_rollout(HACPO(alpha=alpha, cross_clip=False), moved, 0, 1.0)
    assert weighted == pytest.approx(plain * min(1.0, plain) ** alpha, rel=1e-9)
    assert weighted <= plain * (1 + 1e-12)


@pytest.mark.parametrize("update", [8, 9, 50])
def test_a_closed_band_teaches_nothing_foreign(update: int) -> None:
    rng = random.Random(0)
    rollouts = random_rollouts(rng, 2, 0)
    got = run(HACPO(), rollouts, 0, [0.5, 0.5], update)
    assert any(any(g) for r, g in zip(rollouts, got.gradient, strict=True) if r.source == 0)
    assert not any(any(g) for r, g in zip(rollouts, got.gradient, strict=True) if r.source == 1)
    # All clipped to one and the same ratio.
    assert (got.terms.weight_N[~got.sequences.own_N] == 1).all()


def test_closed_band_is_refused_unless_asked_for() -> None:
    # delta / delta_step = 8: updates 0 .. 7 have a band, the ninth has none.
    HACPO().check_schedule(8)
    with pytest.raises(ValueError, match="allow_closed_band"):
        HACPO().check_schedule(9)
    HACPO(allow_closed_band=True).check_schedule(9)
    HACPO(cross_clip=False).check_schedule(9)
    HACPO(delta_step=0.0).check_schedule(10_000)
    HACPO(delta=1.0).check_schedule(1)
    for algorithm in (GRPO(), GSPO(), Naive(), *RIVALS):
        algorithm.check_schedule(10_000)


@pytest.mark.parametrize("delta", [0.1, 0.2, 0.25, 0.5])
@pytest.mark.parametrize("delta_step", [0.01, 0.02, 0.025, 0.03, 0.05, 0.1])
def test_schedule_is_refused_exactly_when_an_update_is_left_without_a_band(delta: float, delta_step: float) -> None:
    first_closed = math.ceil(round(delta / delta_step, 9))
    HACPO(delta=delta, delta_step=delta_step).check_schedule(first_closed)
    with pytest.raises(ValueError, match="delta_step"):
        HACPO(delta=delta, delta_step=delta_step).check_schedule(first_closed + 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.2}, "1 - delta"),
        ({"delta_step": -0.1}, "delta_step"),
    ],
)
def test_senseless_options_are_refused_by_name(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HACPO(**options)


# ------------------------------------------------------------------------------------------------------------
# Rewards and advantages
# ------------------------------------------------------------------------------------------------------------


@law
@given(
    batch=grouped_rewards(),
    options=hacpo_options,
    learner=st.integers(0, 2),
    capabilities=st.lists(st.one_of(st.none(), st.floats(0, 3)), min_size=3, max_size=3),
)
def test_advantages_of_any_rewards(
    batch: tuple[list[float], list[int], list[int]],
    options: Options,
    learner: int,
    capabilities: list[float | None],
) -> None:
    rewards, prompts, sources = batch
    hacpo = build(replace(options, reward_min=-5.0))
    got = hacpo.advantages(
        torch.tensor(rewards, dtype=DOUBLE),
        torch.tensor(prompts, dtype=LONG),
        torch.tensor(sources, dtype=LONG),
        learner,
        hacpo.omega(capabilities),
    )
    assert got.advantage_N.isfinite().all()
    assert got.baseline_N.isfinite().all()
    assert 0 <= got.guarded_share <= 1
    for q in set(prompts):
        members = [i for i, p in enumerate(prompts) if p == q]
        shifted = [rewards[i] + 5.0 for i in members]
        if max(shifted) == min(shifted):
            # Without this, mu != R and a sigma of zero would make the advantage explode.
            assert all(float(got.advantage_N[i]) == 0 for i in members)
        elif options.baseline_guard:
            # With the guard no baseline leaves the range, so not all advantages can have one sign.
            for i in members:
                slack = 1e-12
                assert min(shifted) - slack <= float(got.baseline_N[i]) <= max(shifted) + slack


@law
@given(batch=grouped_rewards())
def test_group_advantages_are_standardised(batch: tuple[list[float], list[int], list[int]]) -> None:
    rewards, prompts, _ = batch
    advantage_N = group_advantages(torch.tensor(rewards, dtype=DOUBLE), torch.tensor(prompts, dtype=LONG)).advantage_N
    for q in set(prompts):
        members = [i for i, p in enumerate(prompts) if p == q]
        group_N = advantage_N[members]
        # sigma is at least the smallest gap over the root of n, and A at most sqrt(n) in size.
        assert float(group_N.abs().max()) <= math.sqrt(len(members))
        if len({rewards[i] for i in members}) == 1:
            assert (group_N == 0).all()


@law
@given(
    n=st.integers(1, 4),
    group=st.integers(1, 4),
    reward=st.floats(0, 1),
    capabilities=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    options=hacpo_options,
)
def test_groups_without_spread_have_no_advantage_and_no_gradient(
    n: int, group: int, reward: float, capabilities: list[float], options: Options
) -> None:
    rng = random.Random(0)
    template = random_rollouts(rng, n, 0, none_share=0, dropped_share=0)
    rollouts = [replace(r, reward=reward, prompt=q) for q in range(2) for r in template[: group * n]]
    for algorithm in (build(replace(options, beta=0.0)), Naive(), GSPO(), GRPO(), *RIVALS):
        got = run(algorithm, rollouts, rollouts[0].source, capabilities[:n])
        assert (got.advantages.advantage_N == 0).all()
        assert got.value == 0
        assert not any(any(g) for g in got.gradient)


@pytest.mark.parametrize("rewards", [[1.0], []])
def test_fewer_than_two_valid_rewards(rewards: list[float]) -> None:
    n = len(rewards)
    reward_N, prompt_N = torch.tensor(rewards, dtype=DOUBLE), torch.zeros(n, dtype=LONG)
    for algorithm in (HACPO(), HACPO(cross_baseline="source"), Naive(), GSPO(), GRPO(), *RIVALS):
        got = algorithm.advantages(reward_N, prompt_N, torch.ones(n, dtype=LONG), 0, algorithm.omega([0.9, 0.1]))
        assert got.advantage_N.tolist() == [0.0] * n


@law
@given(seed=seeds, reward_min=st.floats(-100, 0), scale=st.floats(0.5, 20))
def test_reward_min_makes_any_range_work(seed: int, reward_min: float, scale: float) -> None:
    """Rewards moved by reward_min and scaled: the same capabilities, ratios and advantages."""
    rng = random.Random(seed)
    plain = [r for r in random_rollouts(rng, 2, 0, GRADED, dropped_share=0) if r.reward is not None]
    moved = [replace(r, reward=(r.reward or 0.0) * scale + reward_min) for r in plain]
    results = []
    for rollouts, hacpo in ((plain, HACPO()), (moved, HACPO(reward_min=reward_min))):
        tracker = hacpo.tracker(2)
        by_agent = [[r.reward for r in rollouts if r.source == j] for j in range(2)]
        # Rounding may take a moved reward just below the bound that it stands for.
        lowest = hacpo.reward_min
        tracker.update(
            [hacpo.performance(torch.tensor(x, dtype=DOUBLE).clamp(min=lowest)) if x else None for x in by_agent]
        )
        results.append(run(hacpo, rollouts, 0, tracker.capabilities()))
    base, other = (result.advantages.advantage_N for result in results)
    # The epsilon beside sigma is not scaled: it moves A by about 1e-6 / sigma.
    assert other.tolist() == pytest.approx(base.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("metric", ["mean_reward", "positive_rate"])
def test_a_reward_below_the_minimum_is_an_error_that_names_the_option(metric: str) -> None:
    capability = CapabilityOptions(metric=metric)
    with pytest.raises(ValueError, match="reward_min"):
        HACPO(capability=capability).performance(torch.tensor([1.0, -0.5], dtype=DOUBLE))
    with pytest.raises(ValueError, match=r"-2 .*reward_min \(-1\)"):
        HACPO(reward_min=-1.0, capability=capability).performance(torch.tensor([-2.0, 1.0], dtype=DOUBLE))
    # Right on the bound is legal, and worth nothing.
    assert HACPO(reward_min=-1.0).performance(torch.tensor([-1.0, -1.0], dtype=DOUBLE)) == 0


@law
@given(seed=seeds, n=st.integers(1, 4), absent=st.integers(0, 3))
def test_rollouts_without_a_reward_leave_no_trace(seed: int, n: int, absent: int) -> None:
    """Whatever a rollout without reward contains, or how many there are, nothing changes."""
    rng = random.Random(seed)
    rollouts = random_rollouts(rng, n, 0, none_share=0.3)
    if absent < n:
        rollouts = [replace(r, reward=None) if r.source == absent else r for r in rollouts]
    valid = [i for i, r in enumerate(rollouts) if r.reward is not None]
    if not any(rollouts[i].source == 0 for i in valid):
        return
    capabilities = random_capabilities(rng, n)
    for algorithm in (HACPO(), HACPO(cross_baseline="source"), Naive(), GSPO(), GRPO(), *RIVALS):
        with_them = run(algorithm, rollouts, 0, capabilities)
        without = run(algorithm, [rollouts[i] for i in valid], 0, capabilities)
        assert with_them.value == without.value
        assert [with_them.gradient[i] for i in valid] == without.gradient


def test_dropped_rollouts_count_in_the_baseline_and_not_in_the_means() -> None:
    rng = random.Random(4)
    kept = random_rollouts(rng, 2, 0, none_share=0, dropped_share=0)
    first = next(i for i, r in enumerate(kept) if r.source == 1 and r.reward is not None)
    dropped = [replace(r, dropped=i == first) for i, r in enumerate(kept)]
    before, after = (run(HACPO(), batch, 0, [0.4, 0.6]) for batch in (kept, dropped))
    assert after.advantages.advantage_N.tolist() == before.advantages.advantage_N.tolist()
    assert not any(after.gradient[first])
    count = sum(r.source == 1 and r.reward is not None for r in kept)
    for i, rollout in enumerate(kept):
        if i != first:
            # One rollout fewer in this source's mean: the others weigh n / (n - 1) of what they did.
            factor = count / (count - 1) if rollout.source == 1 else 1.0
            assert after.gradient[i] == pytest.approx([factor * g for g in before.gradient[i]], abs=1e-14)


# ------------------------------------------------------------------------------------------------------------
# Ratios
# ------------------------------------------------------------------------------------------------------------


@law
@given(
    old_logp=st.floats(-1e4, 0),
    logp=st.floats(-1e4, 0),
    own=st.booleans(),
    advantage=advantages,
    name=st.sampled_from(["grpo", "gspo", "naive", "hacpo", "hacpo without band", "hacpo bytes"]),
)
def test_nothing_explodes_however_far_apart_the_policies_are(
    old_logp: float, logp: float, own: bool, advantage: float, name: str
) -> None:
    options = {
        "hacpo without band": Options(cross_clip=False, alpha=0.0),
        "hacpo bytes": Options(cross_clip=False, ratio_unit="byte"),
    }.get(name)
    algorithm = build(options or default_options(name))
    rollout = Rollout(0 if own or name == "grpo" else 1, 0, 1.0, (old_logp,), (logp,), num_bytes=1)
    value, gradient = one_rollout(algorithm, rollout, 0, advantage)
    assert abs(value) <= math.exp(10) * abs(advantage) * (1 + 1e-12)
    assert math.isfinite(gradient[0])
    if abs(logp - old_logp) > 10:
        assert gradient == [0.0]


@law
@given(old_logp=st.floats(-5, -0.1), change=st.floats(-0.19, -0.001), advantage=advantages)
def test_one_token_completions(old_logp: float, change: float, advantage: float) -> None:
    # The whole completion is one token: nothing to average, on either side.
    rollout = Rollout(1, 0, 1.0, (old_logp,), (old_logp + change,))
    value, gradient = one_rollout(HACPO(), rollout, 0, advantage)
    assert value == pytest.approx(math.exp(2 * change) * advantage, rel=1e-9)
    assert gradient == pytest.approx([math.exp(2 * change) * advantage], rel=1e-9)
    own = replace(rollout, source=0)
    value, _ = one_rollout(GRPO(), own, 0, advantage)
    ratio = math.exp(change)
    want = min(ratio * advantage, max(ratio, 0.8) * advantage)
    assert value == pytest.approx(want, rel=1e-9)


@law
@given(
    old_logps=st.lists(st.floats(-3, 0), min_size=1, max_size=4),
    logps=st.lists(st.floats(-3, 0), min_size=1, max_size=4),
    old_end=st.floats(-3, 0),
    end=st.floats(-3, 0),
)
def test_cut_off_and_finished_completions(
    old_logps: list[float], logps: list[float], old_end: float, end: float
) -> None:
    """The end-of-turn token is in both sums and both counts, or in neither."""
    algorithm = HACPO(cross_clip=False, alpha=0.0)
    cut_off = Rollout(1, 0, 1.0, tuple(old_logps), tuple(logps))
    finished = Rollout(1, 0, 1.0, (*old_logps, old_end), (*logps, end))
    log_s = sum(logps) / len(logps) - sum(old_logps) / len(old_logps)
    assert one_rollout(algorithm, cut_off, 0, 1.0)[0] == pytest.approx(math.exp(log_s), rel=1e-9)
    log_s = (sum(logps) + end) / (len(logps) + 1) - (sum(old_logps) + old_end) / (len(old_logps) + 1)
    assert one_rollout(algorithm, finished, 0, 1.0)[0] == pytest.approx(math.exp(log_s), rel=1e-9)


@law
@given(rollout=foreign_rollouts, split=st.integers(1, 5))
def test_byte_ratio_does_not_see_the_tokenization(rollout: Rollout, split: int) -> None:
    """Cutting the learner's tokens finer changes the token ratio, and leaves the byte ratio as it is."""
    finer = replace(rollout, logps=tuple(logp / split for logp in rollout.logps for _ in range(split)))
    algorithm = HACPO(ratio_unit="byte", cross_clip=False, alpha=0.0)
    before, _ = one_rollout(algorithm, rollout, 0, 1.0)
    after, _ = one_rollout(algorithm, finer, 0, 1.0)
    assert after == pytest.approx(before, rel=1e-9)


def test_an_empty_text_has_a_finite_byte_ratio() -> None:
    # A source that ends its turn at once: one token, no byte.
    rollout = Rollout(1, 0, 0.0, (-1.0,), (-1.1,), num_bytes=0)
    value, gradient = one_rollout(HACPO(ratio_unit="byte"), rollout, 0, -1.0)
    assert math.isfinite(value)
    assert math.isfinite(gradient[0])


# ------------------------------------------------------------------------------------------------------------
# Capability
# ------------------------------------------------------------------------------------------------------------

performances = st.one_of(st.none(), st.floats(0, 1))


@law
@given(values=st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=5))
def test_omega_is_bounded_reciprocal_and_one_on_the_diagonal(values: list[float | None]) -> None:
    omega_KK = capability_ratios(values)
    assert (omega_KK >= 0.1).all()
    assert (omega_KK <= 10).all()
    assert (omega_KK.diagonal() == 1).all()
    # The clamps are each other's reciprocal, so the two directions stay so.
    assert (omega_KK * omega_KK.T).flatten().tolist() == pytest.approx([1.0] * len(values) ** 2, rel=1e-12)
    for k, c_k in enumerate(values):
        for j, c_j in enumerate(values):
            if c_k is None or c_j is None:
                assert omega_KK[k, j] == 1


@law
@given(
    before=st.lists(st.tuples(performances, performances), max_size=8),
    after=st.lists(st.tuples(performances, performances), max_size=8),
    window=st.integers(1, 6),
    include_current=st.booleans(),
)
def test_tracker_survives_a_checkpoint(
    before: list[tuple[float | None, float | None]],
    after: list[tuple[float | None, float | None]],
    window: int,
    include_current: bool,
) -> None:
    options = CapabilityOptions(window=window, include_current=include_current)
    tracker = CapabilityTracker(2, options)
    for step in before:
        tracker.update(step)
    # Through text, as a checkpoint may store it; into a tracker that has seen something else.
    state = json.loads(json.dumps(tracker.state_dict()))
    restored = CapabilityTracker(2, options)
    restored.update([0.123, 0.456])
    restored.load_state_dict(state)
    assert restored.capabilities() == tracker.capabilities()
    for step in after:
        tracker.update(step)
        restored.update(step)
        assert restored.capabilities() == tracker.capabilities()
    assert restored.state_dict() == tracker.state_dict()


def test_saved_state_does_not_follow_the_tracker() -> None:
    tracker = CapabilityTracker(1, CapabilityOptions())
    tracker.update([0.2])
    state = tracker.state_dict()
    tracker.update([0.8])
    tracker.load_state_dict(state)
    assert tracker.capabilities() == [0.2]


@law
@given(
    history=st.lists(st.tuples(performances, performances), min_size=1, max_size=10),
    current=st.tuples(performances, performances),
    other=st.tuples(performances, performances),
)
def test_without_the_current_step_omega_does_not_depend_on_the_batch(
    history: list[tuple[float | None, float | None]],
    current: tuple[float | None, float | None],
    other: tuple[float | None, float | None],
) -> None:
    seen = []
    for last in (current, other):
        tracker = CapabilityTracker(2, CapabilityOptions(include_current=False))
        for step in [*history, last]:
            tracker.update(step)
        seen.append(tracker.capabilities())
    assert seen[0] == seen[1]


def test_without_the_current_step_the_first_omega_is_one() -> None:
    tracker = CapabilityTracker(3, CapabilityOptions(include_current=False))
    tracker.update([0.9, 0.1, None])
    assert (HACPO().omega(tracker.capabilities()) == 1).all()
    tracker.update([0.5, 0.5, 0.5])
    # Of the third agent, still nothing is known.
    assert tracker.capabilities() == [0.9, 0.1, None]


def test_a_step_without_valid_rewards_leaves_the_window_unchanged() -> None:
    tracker = CapabilityTracker(2, CapabilityOptions(window=2))
    for step in ([0.2, 0.2], [0.4, 0.4], [None, 0.6], [None, 0.8]):
        tracker.update(step)
    assert tracker.capabilities() == pytest.approx([0.3, 0.7], abs=1e-15)


def test_capability_options_are_checked() -> None:
    with pytest.raises(ValueError, match="window"):
        CapabilityOptions(window=0)
    with pytest.raises(ValueError, match="ratio_min"):
        CapabilityOptions(ratio_min=0.0)
    with pytest.raises(ValueError, match="ratio_max"):
        CapabilityOptions(ratio_max=0.5)
