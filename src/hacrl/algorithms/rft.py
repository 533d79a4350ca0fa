"""RFT: fine-tuning on the right answers of a run, what most people would try first.

Agents sample in every step, and a right answer of anybody is kept (`imitation`, whose defaults here are: at the end, on
everybody's answers, from the weights that the run began with). `reinforce` says when agents also learn by GSPO from
their own rollouts. The forms that people use:

    once at the end, on what GSPO sampled     rft                       (the model of GSPO itself is thrown away)
    the same, on what the models sampled as they were     reinforce: never
    in every step (shared expert iteration)   reinforce: never, imitation.when: step
    before GSPO                               reinforce: after, imitation.when: middle
    from partners after their GSPO            reinforce: before, imitation.answers: others
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from hacrl.algorithms.explanation import Explanation
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.imitation import Imitation, middle


@dataclass(frozen=True)
class RFT(GSPO):
    name: Literal["rft"] = "rft"  # type: ignore[assignment]
    reinforce: Literal["always", "before", "after", "never"] = "always"
    """When agents learn by GSPO: in all steps, in the first half of them, in the second half, in none.

    With `before`, only answers of the second half are kept."""
    imitation: Imitation = field(default_factory=lambda: Imitation(when="end", restart=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitation.when == "never":
            raise ValueError("imitation.when must not be never: without imitation rft is gspo; choose that")

    def reinforces(self, step: int, max_steps: int) -> bool:
        first_half = step <= middle(max_steps)
        return {"always": True, "before": first_half, "after": not first_half, "never": False}[self.reinforce]

    def keeps_answers(self, step: int, max_steps: int) -> bool:
        kept = super().keeps_answers(step, max_steps)
        return kept and not (self.reinforce == "before" and step <= middle(max_steps))

    def explain(self, num_agents: int) -> Explanation:
        told = super().explain(num_agents)
        when = {
            "always": "",
            "before": "In the first half of the steps: ",
            "after": "In the second half of the steps: ",
            "never": "It is not learned from in the step itself. ",
        }[self.reinforce]
        return replace(told, own_weight=when if self.reinforce == "never" else f"{when}{told.own_weight}")
