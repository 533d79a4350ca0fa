"""Sentences in reports and messages that explain what the numbers of a run mean under its algorithm."""

from dataclasses import dataclass


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
    return (
        "s compares how likely a rollout is for the learner with how likely it was for its source when it was sampled, "
        f"{unit}; at 1 they agree."
    )
