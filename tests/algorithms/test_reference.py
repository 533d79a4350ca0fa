"""The yardstick itself: its gradients, derived by hand, against finite differences."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from algorithm_batches import label, random_capabilities, random_rollouts, with_readings

from reference import Options, objective

WIDE = {"eps_low": 0.1, "eps_high": 0.15}


@pytest.mark.parametrize(
    "options",
    [
        Options("grpo", eps_low=0.2, eps_high=0.28, beta=0.05),
        Options("gspo", **WIDE, beta=0.05),
        Options("naive", **WIDE),
        Options("naive", ratio="own", **WIDE),
        Options("hacpo", **WIDE, beta=0.05, cross_weight=0.5),
        Options("hacpo", **WIDE, alpha=0.0),
        Options("hacpo", **WIDE, alpha=3.0, ratio_unit="byte"),
        Options("hacpo", **WIDE, alpha=2.0, cross_clip=False),
        Options("hacpo", **WIDE, cross_baseline="source", cross_omega=False),
        Options("swarm", **WIDE, share=0.6),
        Options("ftis", **WIDE, cap=1.1, kl_max=0.1),
        Options("success_gated", **WIDE, transfer_weight=0.7),
        Options("luffy", **WIDE, beta=0.05),
        Options("topr", beta=0.05),
        Options("opd", eps_low=0.2, eps_high=0.28, beta=0.05, weight=0.7, clamp=3.0),
        Options("opd", eps_high=1.1, weight=0.7, clamp=3.0, loss_type="cispo"),
        Options("grpo", eps_high=1.1, beta=0.05, loss_type="cispo"),
        Options("gspo", eps_high=1.1, loss_type="cispo", scale_rewards="batch"),
        Options("hacpo", **WIDE, loss_type="dapo", beta=0.05, scale_rewards="none"),
        Options("swarm", **WIDE, loss_type="dapo"),
        Options("luffy", **WIDE, loss_type="dr_grpo", beta=0.05),
    ],
    ids=label,
)
@pytest.mark.parametrize("n", [1, 3])
def test_gradient_is_the_slope_with_the_stop_gradients_frozen(options: Options, n: int) -> None:
    rng = random.Random(n)
    learner, step, nonzero = n - 1, 1e-6, 0
    capabilities = random_capabilities(rng, n)
    # Wider than the bands' edges need, so that no rollout is within `step` of a kink.
    rollouts = random_rollouts(rng, n, learner, prompts=3, own_spread=0.3)
    if options.algorithm == "opd":
        rollouts = with_readings(rng, rollouts, teachers=2)
    result = objective(rollouts, learner, capabilities, options, u=1)
    for i, rollout in enumerate(rollouts):
        for t in range(len(rollout.logps)):
            values = []
            for sign in (1, -1):
                logps = list(rollout.logps)
                logps[t] += sign * step
                moved = [*rollouts[:i], replace(rollout, logps=tuple(logps)), *rollouts[i + 1 :]]
                values.append(objective(moved, learner, capabilities, options, u=1, stop_at=rollouts).value)
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx(result.gradient[i][t], abs=2e-9)
            nonzero += result.gradient[i][t] != 0
    assert nonzero > 10
