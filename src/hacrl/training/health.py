"""Warnings when agents learn nothing, alone or from each other, or seem to harm each other, judged by the metrics."""

from collections import Counter, deque
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from hacrl.config import AgentConfig, RunConfig

WINDOW = 10
"""How many of the last steps a warning about collaboration is based on."""
FEW = 5
"""How many of the last steps a warning about learning is based on."""
OPPOSED = -0.05
"""Mean cosine of a learner's foreign and own gradient below which they are called opposed."""
NO_SPREAD = 0.9
"""If at least this share of groups has equal rewards, there is little to learn."""
SAME = 0.05
"""Agents whose mean rewards differ by at most this find the problems equally hard."""
MANY = 0.5
"""If at least this share of completions is cut off, or of rollouts dropped, a warning says so."""
NOT_FEW = 0.02
"""If at least this share of rollouts is dropped, the summary of a run says what to do about it."""
REMEDIES = {
    "broken_text": "cut off inside a character: raise the source's max_completion_length",
    "empty": "they have no text",
    "not_reversible": "its tokenizer cannot spell them",
    "special_tokens": "they have such tokens inside: look at the source's chat template and at where it ends its turn",
    "too_long": "raise its max_completion_length",
    "truncated": "cut off, and mask_truncated_completions is set: raise max_completion_length",
    "unopened_block": "only one of the two prompts opens a block such as <think>: give both the same template settings",
}
"""Why a learner drops a rollout, and what to do about it."""


class Health:
    """Looks at the metrics of each step and warns once for each agent and kind of trouble."""

    def __init__(self, config: RunConfig) -> None:
        self._checks: list[CollaborationCheck | LearningCheck] = [
            CollaborationCheck(config),
            LearningCheck(config),
        ]
        self._told: set[tuple[str, str]] = set()

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """Take the metrics of one more step, and return new warnings."""
        found = []
        for check in self._checks:
            check.recent.append(metrics)
            if len(check.recent) == check.recent.maxlen:
                found += [(trouble, text) for trouble, text in check.troubles() if trouble not in self._told]
        self._told.update(trouble for trouble, _ in found)
        return [text for _, text in found]


def findings(config: RunConfig, lines: Iterable[dict[str, Any]]) -> list[str]:
    """What was wrong with the learning of a whole run, and how many rollouts each agent dropped for which reason."""
    check = LearningCheck(config)
    check.recent = deque(line for line in lines if "step_time" in line)
    return [text for (_, kind), text in check.troubles() if kind != "dropped"] + check.dropped()


Trouble = tuple[tuple[str, str], str]
"""An agent with the kind of its trouble, and the warning about it."""


class LearningCheck:
    """Looks for agents that have nothing to learn from, and says what to change."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.recent: deque[dict[str, Any]] = deque(maxlen=FEW)

    def troubles(self) -> list[Trouble]:
        if not self.recent:
            return []
        checks = {"unjudged": self._unjudged, "spread": self._spread, "cut off": self._cut_off}
        checks["dropped"] = self._many_dropped
        found = [((a.id, kind), check(a)) for a in self.config.agents for kind, check in checks.items()]
        return [(trouble, text) for trouble, text in found if text]

    def _known(self, name: str) -> list[float]:
        """The values of a metric in the steps that have it."""
        return [line[name] for line in self.recent if line.get(name) is not None]

    def _unjudged(self, agent: AgentConfig) -> str | None:
        """Say so if many rollouts got no reward, so that nothing is learned from them."""
        names = ("unverified", "verifier_timeouts", "verifier_errors")
        without, late, ended = (int(sum(self._known(f"{agent.id}/{name}"))) for name in names)
        share = without / (self.config.prompts_per_step * agent.num_generations * len(self.recent))
        if share < MANY:
            return None
        reasons = {
            "the function took too long: raise task.reward_timeout or task.reward_call_timeout": late,
            "the function's process ended": ended,
            "every function returned None": without - late - ended,
        }
        why = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.items() if count > 0)
        found = f"{100 * min(share, 1):.0f} % of the rollouts of agent {agent.id} got no reward and were left out"
        return f"In {self._steps()} {found}: {why}."

    def _spread(self, agent: AgentConfig) -> str | None:
        """Warn if rewards are equal in nearly all groups, of all agents if they share rollouts: advantages are 0."""
        algorithm = self.config.algorithm
        if algorithm.scores_by_others or any(self._known(f"{agent.id}/imitation/tokens")):  # these need no spread
            return None
        groups = self.config.agents if algorithm.shares_rollouts else [agent]
        shares = [self._known(f"{one.id}/frac_reward_zero_std") for one in groups]
        if not all(known and fmean(known) >= NO_SPREAD for known in shares):
            return None
        means = [fmean(self._known(f"{one.id}/reward")) for one in groups]
        if max(means) - min(means) > SAME:  # what others are right about teaches
            return None
        own, rewards = fmean(self._known(f"{agent.id}/frac_reward_zero_std")), self._known(f"{agent.id}/reward")
        if own == 1 and min(rewards) == max(rewards):
            found = f"every rollout of agent {agent.id} had the reward {rewards[0]:g}, so it learned nothing"
        else:
            equal = f"{100 * own:.0f} % of the groups of agent {agent.id}"
            found = f"{equal} had equal rewards, which teach nothing (mean reward {fmean(rewards):.3f})"
        look = f"In {self._steps()} {found}. Look at its answers with `hacrl rollouts`."
        if fmean(rewards) >= MANY:
            return f"{look} If they are right, take harder problems; if not, correct the reward function."
        more = f"easier problems, a curriculum or more num_generations (now {agent.num_generations})"
        return f"{look} If right ones are among them, correct the reward function; if not, take {more}."

    def _cut_off(self, agent: AgentConfig) -> str | None:
        shares = self._known(f"{agent.id}/completions/clipped_ratio")
        if not shares or fmean(shares) < MANY:
            return None
        found = f"{100 * fmean(shares):.0f} % of the completions of agent {agent.id} were cut off"
        return (
            f"In {self._steps()} {found}. Raise max_completion_length (now {agent.max_completion_length}). If they go "
            "on after their answer, look at the chat template and the end-of-turn token, or set stop."
        )

    def _many_dropped(self, agent: AgentConfig) -> str | None:
        if self._dropped_share(agent) < MANY:
            return None
        return f"In {self._steps()} agent {agent.id} could not use most of the others' rollouts: {self._why(agent)}."

    def dropped(self) -> list[str]:
        """What each agent dropped, and why."""
        agents = [agent for agent in self.config.agents if self._dropped_by(agent)]
        return [f"Agent {agent.id} dropped {self._why(agent)}." for agent in agents]

    def _dropped_by(self, learner: AgentConfig) -> Counter[tuple[str, str]]:
        """How many rollouts of each source a learner dropped for each reason."""
        counts: Counter[tuple[str, str]] = Counter()
        for source in self.config.names:
            place = learner.id if source == learner.id else f"{learner.id}/from_{source}"
            for reason in REMEDIES:
                counts[source, reason] += int(sum(self._known(f"{place}/dropped/{reason}")))
        return +counts

    def _dropped_share(self, learner: AgentConfig) -> float:
        """Rollouts that a learner dropped as a share of those of others."""
        others = sum(other.num_generations for other in self.config.agents if other.id != learner.id)
        given = sum(sum(self._known(f"{source.id}/rollouts")) for source in self.config.sources)
        given += others * self.config.prompts_per_step * len(self.recent)
        return self._dropped_by(learner).total() / max(given, 1)

    def _why(self, learner: AgentConfig) -> str:
        """How many rollouts a learner dropped for which reason; and what to do about it, if they are not few."""
        remedies = REMEDIES if self._dropped_share(learner) >= NOT_FEW else {}
        return ", ".join(
            f"{count:,} of {source} ({reason}: {remedies[reason]})" if remedies else f"{count:,} of {source} ({reason})"
            for (source, reason), count in self._dropped_by(learner).items()
        )

    def _steps(self) -> str:
        if self.recent.maxlen:
            return f"the last {len(self.recent)} steps"
        return "the only step" if len(self.recent) == 1 else f"all {len(self.recent)} steps"


class CollaborationCheck:
    """Looks for agents that learn nothing from each other, or whose gradients are opposed."""

    def __init__(self, config: RunConfig) -> None:
        self.agents, self.sources = config.names[: len(config.agents)], config.names
        self.algorithm, self.explanation = config.algorithm, config.algorithm.explain(len(config.names))
        self.recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)

    def troubles(self) -> list[Trouble]:
        checks = {"idle": self._idle, "harmful": self._harmful}
        found = [((agent, kind), check(agent)) for agent in self.agents for kind, check in checks.items()]
        return [(trouble, text) for trouble, text in found if text]

    def _idle(self, learner: str) -> str | None:
        """Return a warning if every step had rollouts of others to learn from, and none of them was used."""
        prefixes = [f"{learner}/from_{source}" for source in self.sources if source != learner]
        for metrics in self.recent:
            kept = [metrics[f"{prefix}/kept"] for prefix in prefixes if f"{prefix}/kept" in metrics]
            dropped = sum(metrics.get(f"{prefix}/dropped", 0) for prefix in prefixes)
            if any(kept) or not (kept or dropped):
                return None
        last, reasons, why, advice = self.recent[-1], [], "", ""
        for source, prefix in zip((s for s in self.sources if s != learner), prefixes, strict=True):
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
        cosines = [metrics[name] for metrics in self.recent if metrics.get(name) is not None]
        if len(cosines) < WINDOW or (mean := sum(cosines) / len(cosines)) > OPPOSED:
            return None
        advice = ", or lower algorithm.cross_weight" if hasattr(self.algorithm, "cross_weight") else ""
        return (
            f"Collaboration may be harmful: for {WINDOW} steps the gradient agent {learner} gets from the others' "
            f"rollouts has pointed against its own (mean cosine {mean:.2f}). "
            f"Compare with algorithm.name=gspo{advice}."
        )
