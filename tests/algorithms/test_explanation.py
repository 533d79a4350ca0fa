"""What algorithms say about themselves is what they do."""

import random

import pytest
import torch
from algorithm_batches import random_rollouts, run

from hacrl.algorithms import (
    ALGORITHMS,
    FTIS,
    GRPO,
    HACPO,
    LUFFY,
    OPD,
    TOPR,
    Algorithm,
    Naive,
    RobustHACPO,
    SuccessGated,
    Swarm,
)
from hacrl.algorithms.capability import CapabilityOptions

SHARING: list[Algorithm] = [
    Naive(),
    Naive(ratio="own"),
    Naive(loss_type="cispo", epsilon_high=5.0),
    Swarm(),
    FTIS(),
    SuccessGated(),
    LUFFY(),
    TOPR(),
    HACPO(),
    HACPO(cross_clip=False),
    HACPO(cross_omega=False),
    HACPO(baseline="joint"),
    HACPO(cross_omega=False, baseline="joint"),
    HACPO(capability=CapabilityOptions(ratio_min=1.0, ratio_max=1.0)),
    RobustHACPO(),
    RobustHACPO(foreign="all", truncate=False),
    RobustHACPO(cross_omega=False),
    RobustHACPO(capability=CapabilityOptions(ratio_min=1.0)),
]


@pytest.mark.parametrize("algorithm", SHARING, ids=repr)
def test_band_filter_and_omega_are_told_where_they_act(algorithm: Algorithm) -> None:
    told = algorithm.explain(num_agents=2)
    bounded, left_out, right_left_out, able_matters = False, False, False, False
    for seed in range(10):
        rollouts = random_rollouts(random.Random(seed), 2, 0, foreign_spread=0.5)
        outcome = run(algorithm, rollouts, 0, [0.8, 0.2])
        foreign_N = ~outcome.sequences.own_N
        out_N = foreign_N & (outcome.sequences.advantage_N != 0) & ~outcome.terms.kept_N
        bounded |= bool(torch.isfinite(outcome.terms.upper_N[foreign_N]).any())
        left_out |= bool(out_N.any())
        right_left_out |= bool((out_N & (outcome.sequences.advantage_N > 0)).any())
        able_matters |= outcome.gradient != run(algorithm, rollouts, 0, [0.8, 0.8]).gradient
    assert (told.band is not None) == bounded
    assert (told.leaves_out is not None) == left_out
    assert (told.band is not None) == right_left_out
    assert (told.omega is not None) == able_matters
    assert told.capability is not None
    assert ("acts on nothing" in told.capability) == (not able_matters)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_explains_itself(name: str) -> None:
    told = ALGORITHMS[name]().explain(num_agents=2)
    assert None not in (told.ratio, told.own_weight, told.capability)
    assert (told.weight is not None) == ALGORITHMS[name].shares_rollouts


@pytest.mark.parametrize(
    ("algorithm", "field", "words"),
    [
        (HACPO(), "weight", "s to the power of 2, times ω"),
        (HACPO(alpha=0, cross_omega=False), "weight", "the weight s."),
        (HACPO(alpha=3, cross_clip=False), "weight", "s times min(s, 1) to the power of 3, times ω"),
        (HACPO(delta=0.3, delta_step=0.05), "band", "between 0.7 (in the first update of a step, and 0.05 higher"),
        (HACPO(delta_step=0), "band", "between 0.8 and 1."),
        (HACPO(ratio_unit="byte"), "ratio", "foreign ones per byte"),
        (HACPO(), "omega", "counts for more, and the learner's baseline multiplies the source's rewards"),
        (
            RobustHACPO(),
            "weight",
            "above the learner's own mean on the prompt has the weight min(s, 1) times min(ω, 1);",
        ),
        (RobustHACPO(foreign="all", truncate=False, cross_omega=False), "weight", "rollout has the weight 1 whatever"),
        (
            RobustHACPO(foreign="centred"),
            "weight",
            "times min(ω, 1). Its reward is compared with the mean of its source.",
        ),
        (RobustHACPO(foreign="exact"), "weight", "at most 1, takes the place of min(s, 1)."),
        (RobustHACPO(), "omega", "above 1 they do not count for more"),
        (RobustHACPO(), "ratio", "both per token of the learner"),
        (RobustHACPO(ratio_unit="token"), "ratio", "each per token of its own"),
        (Naive(epsilon=0.1, epsilon_high=0.2), "band", "The band of a foreign rollout is 0.9 to 1.2:"),
        (Naive(), "ratio", "how likely it was for its source when it was sampled"),
        (Naive(ratio="own"), "ratio", "how likely it was for the same learner before"),
        (Naive(loss_type="cispo", epsilon_high=5.0), "weight", "its weight is min(s, 5)."),
        (HACPO(loss_type="cispo", epsilon_high=3.0), "own_weight", "has the weight min(s, 3). It has no band."),
        (GRPO(loss_type="cispo", epsilon_high=3.0), "own_weight", "The weight is at most 3; there is no band."),
        (OPD(loss_type="cispo", epsilon_high=3.0), "own_weight", "when it was sampled, at most 3, and without a band."),
        (Swarm(share=0.25), "weight", "On 25% of the prompts"),
        (FTIS(cap=3.0), "weight", "at most 3"),
        (SuccessGated(transfer_weight=0.5), "weight", "the weight 0.5 whatever its s"),
        (LUFFY(gamma=0.2), "weight", "p / (p + 0.2)"),
        (OPD(weight=0.5, reward_weight=0), "own_weight", "0 times the reward's, plus 0.5 times how much more likely"),
        (OPD(), "own_weight", "for the other agents than it was for the learner"),
        (
            OPD(teachers="stronger", clamp=3.0),
            "own_weight",
            "for the agents with a higher C than it was for the learner",
        ),
        (HACPO(reward_min=-1.0), "capability", "mean reward counted from -1 over the last 5 steps"),
        (
            HACPO(capability=CapabilityOptions(metric="positive_rate", window=3, include_current=False)),
            "capability",
            "share of rewards above 0 over the 3 steps before the current one",
        ),
    ],
)
def test_sentences_follow_the_options(algorithm: Algorithm, field: str, words: str) -> None:
    assert words in getattr(algorithm.explain(num_agents=2), field)


def test_hacpo_with_more_than_two_agents_is_our_decision() -> None:
    assert HACPO().explain(num_agents=2).decision is None
    decision = HACPO(cross_weight=0.5).explain(num_agents=4).decision
    assert decision is not None
    assert "with 4, each of the 3 others adds the mean over its rollouts with weight 0.5" in decision
    assert "together 1.5, against 1" in decision
    assert RobustHACPO().explain(num_agents=4).decision is None
    by_tokens = HACPO(loss_type="dapo").explain(num_agents=3).decision
    assert by_tokens is not None
    assert "adds the mean over its tokens with weight 1" in by_tokens
