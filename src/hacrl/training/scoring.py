"""Lets teachers score a learner's own rollouts, and computes what their scores add to advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from hacrl.algorithms import Algorithm, Reading
from hacrl.execution.executor import Executor, Timed
from hacrl.rollouts.rollout import Rollout


@dataclass
class Scores:
    """The scores that teachers gave in one step."""

    token_advantages: list[list[np.ndarray]]
    """Values added to the advantage of each token, by learner and own rollout."""
    pairs: list[dict[int, dict[str, float]]]
    """Metrics, by learner and teacher."""
    tokens: list[int]
    """How many tokens each agent scored for others."""
    seconds: list[float]
    """Seconds that each agent scored."""

    def metrics(self, learner: int, ids: Sequence[str]) -> dict[str, float]:
        found = {"tokens_scored": self.tokens[learner], "time/score": self.seconds[learner]}
        for j, pair in self.pairs[learner].items():
            found |= {f"from_{ids[j]}/{name}": value for name, value in pair.items()}
        return found


def scores_of(
    algorithm: Algorithm,
    rollouts: Sequence[Sequence[Rollout]],
    capabilities: Sequence[float | None],
    executor: Executor,
) -> tuple[Scores, list[Timed[list[Reading | None]]]]:
    """Let each learner's teachers score its rollouts, which are given by agent; also return the agents' answers."""
    agents = range(len(rollouts))
    teachers = [algorithm.teachers_of(k, capabilities) for k in agents]
    # Between vocabularies, places in the text are compared, so the learner also says where its own tokens end.
    several = len({rollout.vocabulary for own in rollouts for rollout in own}) > 1
    asked = [[*teachers[k], k] if several and teachers[k] else teachers[k] for k in agents]
    requests = [[rollout for k in agents if j in asked[k] for rollout in rollouts[k]] for j in agents]
    timed = executor.score(requests)
    answers = [iter(answer.value) for answer in timed]
    scores = Scores([], [{} for _ in agents], [0 for _ in agents], [answer.seconds for answer in timed])
    for k, own in enumerate(rollouts):
        readings = {j: list(islice(answers[j], len(own))) for j in asked[k]}
        own_readings = readings.pop(k, [Reading(rollout.logps or ()) for rollout in own])
        added = []
        for row, reading in enumerate(own_readings):
            assert reading is not None
            added.append(algorithm.token_advantages(reading, [readings[j][row] for j in teachers[k]]))
        scores.token_advantages.append([added_JT.nan_to_num(0.0).sum(0).numpy() for added_JT in added])
        for position, j in enumerate(teachers[k]):
            scores.tokens[j] += sum(len(reading.logps) for reading in readings[j] if reading is not None)
            if own:
                scores.pairs[k][j] = figures_of(torch.cat([added_JT[position] for added_JT in added]))
    return scores, timed


def figures_of(added_M: torch.Tensor) -> dict[str, float]:
    """Metrics of what one teacher adds to the advantages of a learner's tokens; NaN where it has no score."""
    known_M = added_M[~added_M.isnan()]
    found = {"scored": len(known_M) / len(added_M)}
    return found | ({"token_advantage": float(known_M.mean())} if len(known_M) else {})
