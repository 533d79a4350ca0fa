"""What the figures of a run mean under an algorithm: the sentences that reports and messages show."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Sentences that hold for one algorithm with its options. None: it has no such thing, or says nothing about it."""

    ratio: str | None = None
    """What s is."""
    own_weight: str | None = None
    """What multiplies the advantage of an own rollout, and when the rollout teaches nothing."""
    weight: str | None = None
    """What multiplies the advantage of a foreign rollout, and which foreign rollouts are used."""
    band: str | None = None
    """For which s a foreign rollout teaches."""
    wrong_filter: str | None = None
    """What leaves out foreign rollouts with A < 0, and only those, where there is no band."""
    capability: str | None = None
    """What C is."""
    omega: str | None = None
    """What omega is and does; None where it acts on nothing."""
    decision: str | None = None
    """What is our choice because the paper does not settle it."""

    @property
    def leaves_out(self) -> str | None:
        """Why a foreign rollout with A other than 0 may teach nothing; None where each of them teaches."""
        return self.band or self.wrong_filter


def ratio_sentence(unit: str = "each per token of its own") -> str:
    """The meaning of s where it is taken against what the source recorded."""
    return (
        "s compares how likely a rollout is for the learner with how likely it was for its source when it was sampled, "
        f"{unit}; at 1 they agree."
    )
