"""Swarm sampling (SAPO of Gensyn, arXiv 2509.08721): whole foreign groups replace own groups.

On a fixed share of the prompts, the learner trains on another agent's group instead of its own; the other agents
take turns. So it trains on as many rollouts as GSPO does. It treats foreign groups like its own: each has its own
mean and standard deviation, and there is no importance correction. Own groups are treated as in GSPO. Our
interpretation: in the paper each node chooses what to take; here the number of the prompt decides, and the trainer
numbers the prompts of each step in random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms.advantage import Advantages, group_advantages
from hacrl.algorithms.algorithm import Explanation
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.terms import Sequences, Terms, as_if_on_policy, own_or_foreign, unbounded


@dataclass(frozen=True)
class Swarm(GSPO):
    shares_rollouts: ClassVar[bool] = True
    groups_by_source: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    name: str = "swarm"
    share: float = 0.5
    """Share of the prompts on which a foreign group replaces the own group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share > 1:
            raise ValueError(f"share must lie in [0, 1], but is {self.share}")

    def advantages(
        self, rewards_N: Tensor, prompt_N: Tensor, source_N: Tensor, learner: int, omega_KK: Tensor
    ) -> Advantages:
        """Advantages within each group of one prompt and source; 0 for groups that are not used."""
        groups = group_advantages(rewards_N, prompt_N * len(omega_KK) + source_N, self.scale_rewards, source_N)
        used_N = source_N == self._chosen(prompt_N, source_N, learner, len(omega_KK))
        return replace(groups, advantage_N=groups.advantage_N * used_N)

    def _chosen(self, prompt_N: Tensor, source_N: Tensor, learner: int, num_agents: int) -> Tensor:
        """Agent whose group is used for each rollout's prompt; the learner if the agent in turn has no group."""
        others = [j for j in range(num_agents) if j != learner]
        if not others:
            return torch.full_like(source_N, learner)
        # Adding 1e-9 keeps 10 x 0.1 from being rounded below 1.
        before_N = (prompt_N.double() * self.share + 1e-9).floor().long()
        foreign_N = ((prompt_N.double() + 1) * self.share + 1e-9).floor().long() > before_N
        turn_N = torch.tensor(others, device=source_N.device)[before_N % len(others)]
        chosen_N = torch.where(foreign_N, turn_N, learner)
        return torch.where(torch.isin(prompt_N, prompt_N[source_N == chosen_N]), chosen_N, learner)

    def terms(self, sequences: Sequences, update: int) -> Terms:
        own = super().terms(sequences, update)
        foreign = unbounded(as_if_on_policy(sequences), sequences.advantage_N, own.log_ratio_N)
        return own_or_foreign(sequences.own_N, own, foreign)

    def mean_weights(self, source_N: Tensor, learner: int) -> Tensor:
        """1 / the number of rollouts used; exact if all groups have the same size."""
        counts: list[int] = torch.bincount(source_N, minlength=learner + 1).tolist()
        used = self._mixed(counts.pop(learner), [count for count in counts if count])
        return torch.full(source_N.shape, 1 / max(used, 1.0), dtype=torch.float64, device=source_N.device)

    def rollouts_used(self, own: float, foreign: list[float]) -> float:
        return round(self._mixed(own, foreign))

    def _mixed(self, own: float, foreign: Sequence[float]) -> float:
        return (1 - self.share) * own + self.share * sum(foreign) / len(foreign) if foreign else float(own)

    def explain(self, num_agents: int) -> Explanation:
        return replace(
            super().explain(num_agents),
            weight=(
                f"On {self.share:.0%} of the prompts a foreign group takes the place of the own one, and its rollouts "
                "have the weight 1 whatever their s; other foreign rollouts are not used."
            ),
        )
