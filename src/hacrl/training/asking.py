"""Asks the sources that are no agents of the run: all at once with the agents, or later about unsolved prompts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hacrl.config import RunConfig
from hacrl.rollouts.rollout import Rollout
from hacrl.sources.archive import Archive
from hacrl.sources.endpoint import Endpoint
from hacrl.sources.outside import Given, OutsideSource
from hacrl.tasks.problem import Problem


def sources_of(config: RunConfig) -> list[OutsideSource]:
    """The sources of a config that are no agents."""
    found: list[OutsideSource] = []
    for index, own in enumerate(config.sources, start=len(config.agents)):
        given = own, index, config.seed, config.max_completion_length
        found.append(Archive(*given) if own.rollouts is not None else Endpoint(*given))
    return found


@contextmanager
def prepared(config: RunConfig, problems: Sequence[Problem]) -> Iterator[tuple[list[OutsideSource], list[str]]]:
    """The sources of a config after a check that they can be used, and remarks; `problems` are some of the task's."""
    sources = sources_of(config)
    with ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        yield sources, [note for source in sources for note in _prepare(source, config, problems)]


def stored_remarks(config: RunConfig, problems: Sequence[Problem]) -> list[str]:
    """Remarks on the stored rollouts that this machine has; UserError if they cannot be used. No teacher is asked."""
    here = [source for source in sources_of(config) if isinstance(source, Archive) and not source.is_on_hub]
    return [note for source in here for note in _prepare(source, config, problems)]


def _prepare(source: OutsideSource, config: RunConfig, problems: Sequence[Problem]) -> list[str]:
    return source.prepare(problems, config.algorithm.needs_logps, Path(config.output_dir) / "sources")


Asked = list[Future[Given] | None]
"""The answers that are on their way, by source; None for a source that is asked later."""


class Asking:
    """Asks the sources of a run and counts what they give."""

    def __init__(self, config: RunConfig, sources: Sequence[OutsideSource]) -> None:
        self.sources, self.algorithm = sources, config.algorithm

    def begin(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Asked:
        """Ask the sources that answer every prompt, without waiting for them."""
        if not self.sources:
            return []
        pool = ThreadPoolExecutor(len(self.sources), thread_name_prefix="source")
        asked = [
            pool.submit(source.give, problems, step, sampling_round) if source.config.when == "always" else None
            for source in self.sources
        ]
        pool.shutdown(wait=False)
        return asked

    def finish(
        self,
        asked: Asked,
        problems: Sequence[Problem],
        own: Sequence[Sequence[Rollout]],
        step: int,
        sampling_round: int,
    ) -> list[Given]:
        """Return what each source gives; `own` are the verified rollouts of each agent."""
        is_right = self.algorithm.imitation.is_right
        solved = {rollout.prompt_index for rollout in chain.from_iterable(own) if is_right(rollout.reward)}
        hard = [position for position in range(len(problems)) if position not in solved]
        given = []
        for source, answer in zip(self.sources, asked, strict=True):
            if answer is not None:
                new = answer.result()
            else:
                new = source.give([problems[position] for position in hard], step, sampling_round)
                for rollout in new.rollouts:
                    rollout.prompt_index = hard[rollout.prompt_index]
            if self.algorithm.needs_logps:
                usable = [rollout for rollout in new.rollouts if rollout.logps is not None]
                new = Given(usable, new.figures + Counter(left_out=len(new.rollouts) - len(usable)))
            given.append(new)
        return given

    def metrics(self, source: OutsideSource, rollouts: Sequence[Rollout], figures: Counter[str]) -> dict[str, Any]:
        """Metrics of one source in a step."""
        source.totals.update(rollouts=len(rollouts), tokens=sum(rollout.num_tokens for rollout in rollouts))
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        found: dict[str, Any] = {
            "prompts": figures["prompts"],
            "rollouts": len(rollouts),
            "unverified": len(rollouts) - len(rewards),
            "without_logps": sum(rollout.logps is None for rollout in rollouts),
            "left_out": figures["left_out"],
            **source.metrics(figures),
        }
        if rewards:
            found["reward"] = float(np.mean(rewards))
        if rollouts:
            found["completions/mean_length"] = float(np.mean([rollout.num_tokens for rollout in rollouts]))
        return {f"{source.config.id}/{name}": value for name, value in found.items()}
