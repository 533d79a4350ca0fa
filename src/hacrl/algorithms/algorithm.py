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
from hacrl.algorithms.capability import CapabilityOptions, CapabilityTracker, capability_ratios, shifted
from hacrl.algorithms.imitation import Imitation
from hacrl.algorithms.terms import Sequences, Terms

LARGEST = 1_000_000_000
"""The largest number that an option accepts."""

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
"""How tokens and rollouts are averaged, by TRL's names; `cispo` also replaces the clip."""


@dataclass(frozen=True)
class Reading:
    """A text in the tokens of one model."""

    logps: Sequence[float]
    """Log-probability of each token."""
    ends: Sequence[int] | None = None
    """Where in the text each token ends, never falling; one that ends inside a character ends where the next border is.
    None: the tokens are those of the model that this reading is compared with."""


@dataclass(frozen=True)
class Explanation:
    """Sentences about one algorithm with its options. None: the algorithm has no such thing, or does not explain it."""

    ratio: str | None = None
    """What s is."""
    own_weight: str | None = None
    """What multiplies the advantage of an own rollout, and when the learner learns nothing from the rollout."""
    weight: str | None = None
    """What multiplies the advantage of a foreign rollout, and which foreign rollouts are used."""
    band: str | None = None
    """The range of s in which a foreign rollout is learned from."""
    wrong_filter: str | None = None
    """Which foreign rollouts with A < 0 are left out, for an algorithm that filters only those and has no band."""
    capability: str | None = None
    """What C is."""
    omega: str | None = None
    """What omega is and does; None if omega has no effect."""
    decision: str | None = None
    """Which choice this project made where the paper leaves it open."""

    @property
    def leaves_out(self) -> str | None:
        """Why a foreign rollout with A other than 0 may teach nothing; None if all of them teach."""
        return self.band or self.wrong_filter


def ratio_sentence(unit: str = "each per token of its own") -> str:
    """A sentence that explains s when it compares with the probability that the source recorded."""
    now, then = "how likely a rollout is for the learner", "how likely it was for its source when it was sampled"
    return f"s compares {now} with {then}, {unit}; at 1 they agree."


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
    """Name of the algorithm in configs; of a class of your own, file.py:Class or module:Class."""
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
            what = "the largest ratio itself, as in TRL; set it to 1 or more, for example 5"
            raise ValueError(f"loss_type: for cispo epsilon_high is {what}")

    @property
    def compares_tokens(self) -> bool:
        """Whether the algorithm compares token by token, and so needs agents that share one vocabulary."""
        return False

    @property
    def rescores_foreign(self) -> bool:
        """Whether the ratio of a foreign rollout is taken to the learner before its first update of the step."""
        return False

    @property
    def needs_logps(self) -> bool:
        """Whether foreign rollouts are weighed by what their source recorded. If not, s is 1 for a source without
        log-probabilities; if so, such a source is refused."""
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

    def rollouts_used(self, own: float, foreign: list[float]) -> float:
        """How many rollouts of a prompt a learner trains on, given its own and those of each other source."""
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
    """How capability is measured, and the limits of omega."""
    cross_weight: float = 1.0
    """Weight of the mean over each other source's rollouts; the mean over own rollouts has weight 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not abs(self.reward_min) <= LARGEST:
            raise ValueError(f"reward_min must lie between -{LARGEST:,} and {LARGEST:,}, but is {self.reward_min}")

    def tracker(self, num_agents: int) -> CapabilityTracker:
        return CapabilityTracker(num_agents, self.capability)

    def performance(self, rewards_N: Tensor) -> float:
        shifted_N = shifted(rewards_N, self.reward_min)
        return float(((shifted_N > 0).to(rewards_N) if self.capability.metric == "positive_rate" else shifted_N).mean())

    def omega(self, capabilities: list[float | None]) -> Tensor:
        return capability_ratios(capabilities, self.capability.ratio_min, self.capability.ratio_max)

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        return means_by_source(source_N, learner, self.cross_weight)


def means_by_source(source_N: Tensor, learner: int, cross_weight: float) -> Tensor:
    """1 / N_own for own rollouts, cross_weight / N_j for those of source j."""
    count_K = torch.bincount(source_N, minlength=learner + 1).to(torch.float64)
    factor_K = torch.full_like(count_K, cross_weight)
    factor_K[learner] = 1.0
    return (factor_K / count_K.clamp(min=1))[source_N]
