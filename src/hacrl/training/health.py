"""Warnings when agents learn nothing from each other, or seem to harm each other, judged by the metrics."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from hacrl.algorithms import Algorithm

WINDOW = 10
"""How many of the last steps a warning is based on."""
OPPOSED = -0.05
"""Mean cosine of a learner's foreign and own gradient below which they are called opposed."""


class CollaborationCheck:
    """Looks at the metrics of each step and warns once for each agent and kind of trouble."""

    def __init__(self, agents: Sequence[str], algorithm: Algorithm) -> None:
        self.agents, self.algorithm = agents, algorithm
        self.explanation = algorithm.explain(len(agents))
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._told: set[tuple[str, str]] = set()

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """Take the metrics of one more step, and return new warnings."""
        self._recent.append(metrics)
        if len(self._recent) < WINDOW:
            return []
        found = []
        for agent in self.agents:
            for trouble, text in (("idle", self._idle(agent)), ("harmful", self._harmful(agent))):
                if text and (agent, trouble) not in self._told:
                    self._told.add((agent, trouble))
                    found.append(text)
        return found

    def _idle(self, learner: str) -> str | None:
        """Return a warning if every step had rollouts of others to learn from, and none of them was used."""
        prefixes = [f"{learner}/from_{source}" for source in self.agents if source != learner]
        for metrics in self._recent:
            kept = [metrics[f"{prefix}/kept"] for prefix in prefixes if f"{prefix}/kept" in metrics]
            dropped = sum(metrics.get(f"{prefix}/dropped", 0) for prefix in prefixes)
            if any(kept) or not (kept or dropped):
                return None
        last, reasons, why, advice = self._recent[-1], [], "", ""
        for source, prefix in zip((s for s in self.agents if s != learner), prefixes, strict=True):
            if f"{prefix}/kept" in last:
                reason = f"{source}: mean s {last[f'{prefix}/ratio_mean']:.2f}"
                if self.explanation.band:
                    reason += f", band {last[f'{prefix}/lower_mean']:.2f} to {last[f'{prefix}/upper_mean']:.2f}"
                reasons.append(reason)
                why = f" {self.explanation.leaves_out}" if self.explanation.leaves_out else ""
            if last.get(f"{prefix}/dropped"):
                reasons.append(f"{source}: {last[f'{prefix}/dropped']} rollouts it cannot read")
        if self.explanation.leaves_out:
            advice = " Try algorithm.name=hacpo_robust, which uses right answers of others whatever their s."
        return (
            f"Collaboration is idle: agent {learner} has used none of the others' rollouts for {WINDOW} steps "
            f"({'; '.join(reasons)}).{why} It learns as if it were alone.{advice}"
        )

    def _harmful(self, learner: str) -> str | None:
        """Return a warning if the gradient from others' rollouts points against that from the learner's own."""
        name = f"{learner}/grad_cosine"
        cosines = [metrics[name] for metrics in self._recent if metrics.get(name) is not None]
        if len(cosines) < WINDOW or (mean := sum(cosines) / len(cosines)) > OPPOSED:
            return None
        advice = ", or lower algorithm.cross_weight" if hasattr(self.algorithm, "cross_weight") else ""
        return (
            f"Collaboration may be harmful: for {WINDOW} steps the gradient agent {learner} gets from the others' "
            f"rollouts has pointed against its own (mean cosine {mean:.2f}). "
            f"Compare with algorithm.name=gspo{advice}."
        )
