"""What every algorithm is: three decisions, as pure functions of tensors.

1. `advantages` and `coefficients`: how good each rollout is, for one learner.
2. `terms`: each rollout's term of the objective, given the learner's log-probabilities.
3. `mean_weights`: how the terms are averaged.

An instance is its options. There is no state: what changes over time (capabilities, the number of
updates made) is passed in.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hacrl.algorithms.advantage import Advantages, ScaleRewards, group_advantages, sum_by
from hacrl.algorithms.capability import CapabilityOptions, CapabilityTracker, capability_ratios, performance
from hacrl.algorithms.explanation import Explanation
from hacrl.algorithms.imitation import Imitation
from hacrl.algorithms.spans import Reading

LARGEST = 1_000_000_000
"""The largest number that an option takes."""

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
"""TRL's names for ways to average over tokens and rollouts; `cispo` also has a clip of its own."""


@dataclass
class Sequences:
    """N rollouts as one learner sees them at the moment of an update."""

    logp_NT: Tensor
    """The learner's log-probability of each completion token, at its temperature."""
    mask_NT: Tensor
    """Which of the T positions are tokens of the completion."""
    old_logp_N: Tensor
    """The sum the source recorded when it sampled, over the source's own tokens; with `Algorithm.rescores_foreign`, the
    learner's own sum before its first update of the step."""
    old_length_N: Tensor
    """The number of tokens in that sum."""
    bytes_N: Tensor
    """UTF-8 length of the text."""
    own_N: Tensor
    """Whether the learner is the source."""
    advantage_N: Tensor
    omega_N: Tensor
    """The coefficient omega(j, k) = C_j / C_k of `Algorithm.coefficients`; 1 for own rollouts."""
    old_logp_NT: Tensor
    """Token log-probabilities when sampled; a foreign rollout's sum spread evenly where its source has other tokens."""
    token_advantage_NT: Tensor | None = None
    """What is added to `advantage_N` for each token, 0 behind the last; None: nothing."""

    @property
    def advantage_NT(self) -> Tensor:
        """The advantage of each token, or a column if all tokens of a rollout have the same."""
        advantage_N1 = self.advantage_N[:, None]
        return advantage_N1 if self.token_advantage_NT is None else advantage_N1 + self.token_advantage_NT

    @property
    def mean_advantage_N(self) -> Tensor:
        """The mean over a rollout's tokens."""
        if self.token_advantage_NT is None:
            return self.advantage_N
        return self.advantage_N + self.token_advantage_NT.sum(1) / self.length_N.clamp(min=1)

    @property
    def logp_N(self) -> Tensor:
        return torch.where(self.mask_NT, self.logp_NT, 0.0).sum(1)

    @property
    def length_N(self) -> Tensor:
        return self.mask_NT.sum(1)


@dataclass
class Terms:
    """Each rollout's term of the objective, and the quantities it was made of."""

    objective_N: Tensor
    """What is maximised. The only tensor that carries a gradient."""
    log_ratio_N: Tensor
    lower_N: Tensor
    upper_N: Tensor
    kept_N: Tensor
    """Whether the clip lets a gradient through."""
    weight_N: Tensor
    """What multiplies the advantage in the objective."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """An algorithm that uses the learner's own rollouts and a group-relative advantage."""

    shares_rollouts: ClassVar[bool] = False
    """Whether a learner also uses the rollouts of the others."""
    groups_by_source: ClassVar[bool] = False
    """Whether own rollouts are compared with each other alone, though others are used."""
    scores_by_others: ClassVar[bool] = False
    """Whether other agents score a learner's own rollouts, for `token_advantages`."""
    keeps_all: ClassVar[bool] = False
    """Whether every foreign rollout with A other than 0 has a gradient, so that nobody need look first."""
    may_be_negative: ClassVar[frozenset[str]] = frozenset()
    """Options for which a number below 0 makes sense."""

    name: str = ""
    beta: float = 0.0
    """Weight of the KL divergence to the starting model, on own rollouts."""
    loss_type: LossType = "grpo"
    """What counts alike in a mean: rollouts (`grpo`) or tokens (`bnpo`, `dapo`, `cispo`). `dr_grpo` divides the sum
    over tokens by a constant."""
    scale_rewards: ScaleRewards = "group"
    """What centred rewards are divided by: the group's standard deviation, the batch's, or nothing."""
    entropy_coef: float = 0.0
    """Weight of the entropy of the next-token distribution, mean over the tokens of own rollouts."""
    imitation: Imitation = field(default_factory=Imitation)
    """Supervised updates on right answers, beside those of reinforcement learning."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name not in self.may_be_negative and not 0 <= value <= LARGEST:
                raise ValueError(f"{name} must lie between 0 and {LARGEST:,}, but is {value}")
        if self.loss_type == "cispo" and "epsilon_high" not in vars(self):
            raise ValueError(f"loss_type: {self.name} has no clip that cispo could replace; choose another one")
        if self.loss_type == "cispo" and vars(self)["epsilon_high"] < 1:
            raise ValueError(
                "loss_type: for cispo epsilon_high is the largest ratio itself, as in TRL; set it to 1 or more, for "
                "example 5"
            )

    @property
    def compares_tokens(self) -> bool:
        """Whether it is defined only between agents with one vocabulary, because it compares token by token."""
        return False

    @property
    def rescores_foreign(self) -> bool:
        """Whether foreign ratios compare the learner with itself before its first update of the step."""
        return False

    def tracker(self, num_agents: int) -> CapabilityTracker:
        return CapabilityTracker(num_agents, CapabilityOptions())

    def performance(self, rewards_N: Tensor) -> float:
        """P_t of one agent: its mean reward in a batch."""
        return float(rewards_N.mean())

    def omega(self, capabilities: list[float | None]) -> Tensor:
        """omega[k, j] of all pairs of agents; 1 for an algorithm that ignores capability."""
        return torch.ones(len(capabilities), len(capabilities), dtype=torch.float64)

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """What each rollout is worth to the learner. `prompt_N` numbers the step's prompts in random order."""
        return group_advantages(rewards_N, prompt_N, self.scale_rewards)

    def teachers_of(self, learner: int, capabilities: Sequence[float | None]) -> list[int]:
        """The agents that score the learner's rollouts in a step with these capabilities."""
        return []

    def token_advantages(self, own: Reading, others: Sequence[Reading | None]) -> Tensor:
        """What each teacher adds to the advantage of each token of an own rollout: teachers x tokens.

        `own` is the rollout as its learner sampled it; `others` are the teachers' readings of it, None from one that
        cannot read it. NaN where a teacher says nothing.
        """
        return torch.zeros(len(others), len(own.logps), dtype=torch.float64)

    def coefficients(self, source_N: Tensor, learner: int, omega_KK: Tensor) -> Tensor:
        """What multiplies each rollout's advantage because of who made it."""
        return torch.ones(len(source_N), dtype=omega_KK.dtype, device=source_N.device)

    @abstractmethod
    def terms(self, sequences: Sequences, update: int) -> Terms:
        """Each rollout's term; `update` counts the updates this learner already made in this step."""

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        """The factor of each term in the objective of one update: one mean over all rollouts."""
        return torch.full(source_N.shape, 1 / max(len(source_N), 1), dtype=torch.float64, device=source_N.device)

    def rollout_weights(self, source_N: Tensor, learner: int, length_N: Tensor, max_length: int) -> Tensor:
        """`mean_weights` as `loss_type` wants them, for rollouts of so many tokens, at most `max_length`."""
        if self.loss_type in ("grpo", "dr_grpo"):
            return self.mean_weights(source_N, learner) * self.length_factors(length_N, max_length)
        # The same means over tokens, each of which is as a rollout of its source.
        rollout_T = torch.arange(len(length_N), device=length_N.device).repeat_interleave(length_N)
        return sum_by(self.mean_weights(source_N[rollout_T], learner), rollout_T, len(length_N))

    def length_factors(self, length_N: Tensor, max_length: int) -> Tensor:
        """How much more than by itself each rollout of one mean counts because of its length; 1 for `grpo`."""
        if self.loss_type == "grpo":
            return torch.ones(length_N.shape, dtype=torch.float64, device=length_N.device)
        length_N = length_N.double()
        return length_N / (max_length if self.loss_type == "dr_grpo" else length_N.mean())

    def rollouts_used(self, own: int, foreign: list[int]) -> int:
        """How many rollouts of a prompt a learner trains on, of its own and of those of each other agent."""
        return own + sum(foreign) if self.shares_rollouts else own

    def reinforces(self, step: int, max_steps: int) -> bool:
        """Whether learners make the updates of their `terms` in a step."""
        return True

    def keeps_answers(self, step: int, max_steps: int) -> bool:
        """Whether right answers of a step are kept for imitation."""
        return self.imitation.keeps(step, max_steps)

    def check_schedule(self, updates_per_step: int) -> None:
        """Raise ValueError if the options make no sense for so many updates a step."""

    def explain(self, num_agents: int) -> Explanation:
        """What ratio, weight, band and omega mean with these options and so many agents."""
        return Explanation()


@dataclass(frozen=True)
class CapabilityAware(Algorithm):
    """An algorithm that learns from everybody's rollouts and knows how able everybody is."""

    shares_rollouts: ClassVar[bool] = True
    may_be_negative: ClassVar[frozenset[str]] = frozenset({"reward_min"})

    reward_min: float = 0.0
    """The smallest possible reward; subtracted, because a ratio of means needs rewards >= 0."""
    capability: CapabilityOptions = field(default_factory=CapabilityOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not abs(self.reward_min) <= LARGEST:
            raise ValueError(f"reward_min must lie between -{LARGEST:,} and {LARGEST:,}, but is {self.reward_min}")

    def tracker(self, num_agents: int) -> CapabilityTracker:
        return CapabilityTracker(num_agents, self.capability)

    def performance(self, rewards_N: Tensor) -> float:
        return performance(rewards_N, self.reward_min, self.capability)

    def omega(self, capabilities: list[float | None]) -> Tensor:
        return capability_ratios(capabilities, self.capability.ratio_min, self.capability.ratio_max)


def means_by_source(source_N: Tensor, learner: int, cross_weight: float) -> Tensor:
    """1 / N_own for own rollouts, cross_weight / N_j for those of source j."""
    count_K = torch.bincount(source_N, minlength=learner + 1).to(torch.float64)
    factor_K = torch.full_like(count_K, cross_weight)
    factor_K[learner] = 1.0
    return (factor_K / count_K.clamp(min=1))[source_N]
