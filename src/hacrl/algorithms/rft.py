"""RFT: fine-tuning on the right answers of a run, the method most people would try first.

Agents sample in every step, and the right answers of all agents are kept. By default agents imitate them at the end,
starting from the weights at the start of the run (`imitation`). `reinforce` sets when agents also learn by GSPO from
their own rollouts. Common forms:

    at the end, on what GSPO sampled          rft                       (the model that GSPO trained is discarded)
    at the end, without any GSPO              reinforce: never
    in every step (shared expert iteration)   reinforce: never, imitation.when: step
    before GSPO                               reinforce: after, imitation.when: middle
    from partners after their GSPO            reinforce: before, imitation.answers: others
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from hacrl.algorithms.algorithm import Explanation
from hacrl.algorithms.gspo import GSPO
from hacrl.algorithms.imitation import Imitation, middle


@dataclass(frozen=True)
class RFT(GSPO):
    name: str = "rft"
    reinforce: Literal["always", "before", "after", "never"] = "always"
    """When agents learn by GSPO: in all steps, in the first half (`before`), in the second half (`after`), or never.

    With `before`, only answers of the second half are kept for imitation."""
    imitation: Imitation = field(default_factory=lambda: Imitation(when="end", restart=True))
    """Supervised updates on right answers: after the last step, from the weights at the start of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitation.when == "never":
            raise ValueError("imitation.when must not be never: without imitation rft is gspo; choose that")

    def reinforces(self, step: int, max_steps: int) -> bool:
        first_half = step <= middle(max_steps)
        return {"always": True, "before": first_half, "after": not first_half, "never": False}[self.reinforce]

    def keeps_answers(self, step: int, max_steps: int) -> bool:
        early = self.reinforce == "before" and step <= middle(max_steps)
        return super().keeps_answers(step, max_steps) and not early

    def explain(self, num_agents: int) -> Explanation:
        told = super().explain(num_agents)
        if self.reinforce == "never":
            return replace(told, own_weight="It is not learned from in the step itself. ")
        half = {
            "always": "",
            "before": "In the first half of the steps: ",
            "after": "In the second half of the steps: ",
        }
        return replace(told, own_weight=f"{half[self.reinforce]}{told.own_weight}")
