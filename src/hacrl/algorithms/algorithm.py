"""The base class of all algorithms: three decisions, as pure functions of tensors.

1. `advantages` and `coefficients`: how good each rollout is, for one learner.
2. `terms`: each rollout's term of the objective, given the learner's log-probabilities.
3. `mean_weights`: how the terms are averaged.

An instance holds only its options and has no state: the caller passes in what changes over time (capabilities, the
number of updates made).
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
"""The largest number that an option accepts."""

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
"""How tokens and rollouts are averaged, by TRL's names; `cispo` also replaces the clip."""


@dataclass
class Sequences:
    """N rollouts as one learner sees them at one update."""

    logp_NT: Tensor
    """The learner's log-probability of each completion token, at its temperature."""
    mask_NT: Tensor
    """True at the positions that are tokens of the completion."""
    old_logp_N: Tensor
    """Log-probability of the completion that its source recorded when it sampled, summed over the source's tokens. With
    `Algorithm.rescores_foreign`: the learner's own sum before its first update of the step."""
    old_length_N: Tensor
    """The number of tokens in the sum `old_logp_N`."""
    bytes_N: Tensor
    """Length of the completion's text in UTF-8 bytes."""
    own_N: Tensor
    """True for rollouts that the learner itself sampled."""
    advantage_N: Tensor
    omega_N: Tensor
    """The coefficient omega(j, k) = C_j / C_k of `Algorithm.coefficients`; 1 for own rollouts."""
    old_logp_NT: Tensor
    """Token log-probabilities at sampling; with another tokenizer, the source's sum spread evenly over tokens."""
    token_advantage_NT: Tensor | None = None
    """Added to `advantage_N` at each token, 0 after the last token; None adds nothing."""

    @property
    def advantage_NT(self) -> Tensor:
        """The advantage of each token, or one column (N, 1) if all tokens of a rollout share it."""
        advantage_N1 = self.advantage_N[:, None]
        return advantage_N1 if self.token_advantage_NT is None else advantage_N1 + self.token_advantage_NT

    @property
    def mean_advantage_N(self) -> Tensor:
        """The mean advantage over each rollout's tokens."""
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
    """Each rollout's term of the objective, and the quantities it is computed from."""

    objective_N: Tensor
    """The terms to maximise: the only tensor here with a gradient."""
    log_ratio_N: Tensor
    lower_N: Tensor
    upper_N: Tensor
    kept_N: Tensor
    """True for rollouts whose gradient passes the clip."""
    weight_N: Tensor
    """The factor of the advantage in the objective."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """Base class: uses the learner's own rollouts and a group-relative advantage, unless a subclass overrides this."""

    shares_rollouts: ClassVar[bool] = False
    """Whether a learner also uses the rollouts of other agents."""
    groups_by_source: ClassVar[bool] = False
    """Whether own rollouts are compared only with each other, although foreign rollouts are used too."""
    scores_by_others: ClassVar[bool] = False
    """Whether other agents score a learner's own rollouts, for `token_advantages`."""
    keeps_all: ClassVar[bool] = False
    """Whether every foreign rollout with A other than 0 has a gradient, so that no check is needed beforehand."""
    may_be_negative: ClassVar[frozenset[str]] = frozenset()
    """Options that accept a number below 0."""

    name: str = ""
    beta: float = 0.0
    """Weight of the KL divergence to the starting model, on own rollouts."""
    loss_type: LossType = "grpo"
    """What has equal weight in the mean: each rollout (`grpo`) or each token (`bnpo`, `dapo`, `cispo`). `dr_grpo`
    divides the sum over tokens by a constant."""
    scale_rewards: ScaleRewards = "group"
    """What centred rewards are divided by: the standard deviation of the `group`, of the `batch`, or nothing."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: the entropy of the next-token distribution, averaged over tokens of own rollouts."""
    imitation: Imitation = field(default_factory=Imitation)
    """Supervised updates on right answers, in addition to reinforcement learning."""

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
        """Whether the algorithm compares token by token, and so needs agents that share one vocabulary."""
        return False

    @property
    def rescores_foreign(self) -> bool:
        """Whether the ratio of a foreign rollout is taken to the learner before its first update of the step."""
        return False

    def tracker(self, num_agents: int) -> CapabilityTracker:
        return CapabilityTracker(num_agents, CapabilityOptions())

    def performance(self, rewards_N: Tensor) -> float:
        """P_t, the performance of one agent: its mean reward in a batch."""
        return float(rewards_N.mean())

    def omega(self, capabilities: list[float | None]) -> Tensor:
        """omega[k, j] for all pairs of agents; 1 if the algorithm ignores capability."""
        return torch.ones(len(capabilities), len(capabilities), dtype=torch.float64)

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """The advantage of each rollout for the learner. `prompt_N` numbers the step's prompts in random order."""
        return group_advantages(rewards_N, prompt_N, self.scale_rewards)

    def teachers_of(self, learner: int, capabilities: Sequence[float | None]) -> list[int]:
        """The agents that score the learner's rollouts in a step with these capabilities."""
        return []

    def token_advantages(self, own: Reading, others: Sequence[Reading | None]) -> Tensor:
        """What each teacher adds to the advantage of each token of an own rollout, as a table of teachers x tokens.

        `own` is the rollout as its learner sampled it. `others` are the teachers' readings of it; None means that the
        teacher cannot read it. The result is NaN at tokens that a teacher does not score.
        """
        return torch.zeros(len(others), len(own.logps), dtype=torch.float64)

    def coefficients(self, source_N: Tensor, learner: int, omega_KK: Tensor) -> Tensor:
        """The factor of each rollout's advantage that depends on its source."""
        return torch.ones(len(source_N), dtype=omega_KK.dtype, device=source_N.device)

    @abstractmethod
    def terms(self, sequences: Sequences, update: int) -> Terms:
        """Compute each rollout's term; `update` counts the updates this learner has already made in this step."""

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        """The factor of each term in the objective of one update: one mean over all rollouts."""
        return torch.full(source_N.shape, 1 / max(len(source_N), 1), dtype=torch.float64, device=source_N.device)

    def rollout_weights(self, source_N: Tensor, learner: int, length_N: Tensor, max_length: int) -> Tensor:
        """`mean_weights` adapted to `loss_type`, for rollouts of `length_N` tokens, each at most `max_length`."""
        if self.loss_type in ("grpo", "dr_grpo"):
            return self.mean_weights(source_N, learner) * self.length_factors(length_N, max_length)
        # Take the means over tokens: each token counts as a rollout of its source.
        rollout_T = torch.arange(len(length_N), device=length_N.device).repeat_interleave(length_N)
        return sum_by(self.mean_weights(source_N[rollout_T], learner), rollout_T, len(length_N))

    def length_factors(self, length_N: Tensor, max_length: int) -> Tensor:
        """Factor by which the length of each rollout changes its weight in a mean; 1 for `grpo`."""
        if self.loss_type == "grpo":
            return torch.ones(length_N.shape, dtype=torch.float64, device=length_N.device)
        length_N = length_N.double()
        return length_N / (max_length if self.loss_type == "dr_grpo" else length_N.mean())

    def rollouts_used(self, own: int, foreign: list[int]) -> int:
        """How many rollouts of a prompt a learner trains on, given its own and those of each other agent."""
        return own + sum(foreign) if self.shares_rollouts else own

    def reinforces(self, step: int, max_steps: int) -> bool:
        """Whether learners update on their `terms` in this step."""
        return True

    def keeps_answers(self, step: int, max_steps: int) -> bool:
        """Whether the right answers of this step are kept for imitation."""
        return self.imitation.keeps(step, max_steps)

    def check_schedule(self, updates_per_step: int) -> None:
        """Raise ValueError if the options do not work with this number of updates per step."""

    def explain(self, num_agents: int) -> Explanation:
        """Explain what ratio, weight, band and omega mean with these options and this number of agents."""
        return Explanation()


@dataclass(frozen=True)
class CapabilityAware(Algorithm):
    """Base class of algorithms that use the rollouts of all agents and weigh them by capability."""

    shares_rollouts: ClassVar[bool] = True
    may_be_negative: ClassVar[frozenset[str]] = frozenset({"reward_min"})

    reward_min: float = 0.0
    """The smallest possible reward. It is subtracted from rewards, because a ratio of means needs rewards >= 0."""
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
