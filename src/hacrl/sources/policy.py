"""The interface of everything that gives rollouts, and a model of the run that does."""

from collections.abc import Callable, Sequence
from typing import Protocol

from hacrl.config import AgentConfig
from hacrl.decoder.policy import naming
from hacrl.rollouts.engine import Engine, SamplingParams
from hacrl.rollouts.reader import Reader
from hacrl.rollouts.retokenize import decode
from hacrl.rollouts.rollout import Completion, Rollout
from hacrl.seeding import EVALUATE, SAMPLE, derive_seed
from hacrl.tasks.problem import Problem


class Source(Protocol):
    """Gives rollouts, with a model or in any other way."""

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        """Return rollouts of the problems, in their order. The verifier adds rewards later.

        A step may have several rounds of sampling, each with new problems; `sampling_round` counts them from 0.
        """
        ...


def params_of(config: AgentConfig, num_generations: int) -> SamplingParams:
    """The sampling parameters of an agent in training."""
    limits = config.temperature, config.top_p, config.top_k, tuple(config.stop)
    return SamplingParams(num_generations, config.max_completion_length, *limits)


class PolicySource(Source):
    """Samples from a model with an engine. `version` returns how many updates the model has had."""

    def __init__(
        self, config: AgentConfig, index: int, seed: int, reader: Reader, engine: Engine, version: Callable[[], int]
    ) -> None:
        self.config, self.index, self.seed = config, index, seed
        self.reader, self.engine, self.version = reader, engine, version

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        """Return `num_generations` rollouts of each problem, in the order of the problems."""
        reader, rollouts = self.reader, []
        prompts = [reader.prompt_ids(problem) for problem in problems]
        seed = derive_seed(self.seed, SAMPLE, step, self.index, sampling_round)
        groups = self._complete(prompts, params_of(self.config, self.config.num_generations), seed)
        for position, (problem, prompt, group) in enumerate(zip(problems, prompts, groups, strict=True)):
            end = reader.retokenizer.end_of(prompt)
            rollouts += [
                Rollout(
                    step=step,
                    prompt_id=problem.id,
                    prompt=problem.prompt,
                    prompt_index=position,
                    source=self.index,
                    index=index,
                    text=decode(reader.tokenizer, completion.content_ids),
                    **vars(completion),
                    special_inside=not reader.readable.issuperset(completion.content_ids),
                    vocabulary=reader.retokenizer.vocabulary,
                    policy_version=self.version(),
                    lead=reader.retokenizer.lead(completion.content_ids, end),
                    opened=end.opened,
                )
                for index, completion in enumerate(group)
            ]
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        """Return one answer to each problem: the greedy one, or one that is sampled as in training."""
        params, seed = SamplingParams(1, self.config.max_completion_length, 0.0, stop=tuple(self.config.stop)), 0
        if sampled:  # every evaluation uses the same random numbers, so that only the policy differs
            params, seed = params_of(self.config, 1), derive_seed(self.seed, EVALUATE, self.index)
        groups = self._complete([self.reader.prompt_ids(problem) for problem in problems], params, seed)
        return [decode(self.reader.tokenizer, completion.content_ids) for (completion,) in groups]

    def _complete(self, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        with naming(self.config, self.version()):
            return self.engine.sample(prompts, params, seed)
