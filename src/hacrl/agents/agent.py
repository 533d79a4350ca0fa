"""One agent: a source and a learner on one model."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hacrl.agents.loading import Bases
from hacrl.agents.model import AgentModel
from hacrl.agents.sharded import ShardedModel
from hacrl.algorithms import Algorithm, Reading
from hacrl.config import AgentConfig
from hacrl.config.agent import logs_kl
from hacrl.errors import warn
from hacrl.learners.learner import Learner
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.learners.minibatch import Minibatch, texts_of
from hacrl.learners.ranks import ALONE, Ranks
from hacrl.learners.supervised import Imitator, Row
from hacrl.learners.updating import read_state, write_state
from hacrl.rollouts.reader import Traits
from hacrl.rollouts.rollout import Rollout
from hacrl.rollouts.vllm import Sampler
from hacrl.tasks.problem import Problem


class Agent:
    """Samples completions, and learns from its own and from those of other agents."""

    def __init__(
        self,
        config: AgentConfig,
        index: int,
        algorithm: Algorithm,
        seed: int,
        trace: bool = False,
        bases: Bases | None = None,
        sampler: Sampler | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`bases` holds the models that agents with adapters share in this process.

        `sampler` is the agent's vLLM if it is elsewhere. With several `ranks`, this process holds a part of the agent:
        all ranks get the same calls, and each answers for its share.
        """
        self.config, self.index, self.algorithm, self.ranks = config, index, algorithm, ranks
        entropy_gradient = algorithm.entropy_coef > 0
        self.opened: AgentModel | ShardedModel
        if ranks.size > 1:
            self.opened = ShardedModel(config, index, seed, ranks, entropy_gradient)
        else:
            self.opened = AgentModel(config, index, seed, bases, entropy_gradient)
        self.model, self.reader, self.device = self.opened.model, self.opened.reader, self.opened.device
        self.weights = self.opened.weights()
        self.source = self.opened.source(lambda: self.learner.updates, sampler)
        reference = self.opened.starting_policy() if algorithm.beta or self._logs_kl() else None
        saves_work = config.fast and not trace
        self.learner = Learner(config, index, algorithm, self.weights, self.opened.policy, reference, saves_work, ranks)
        self.imitator = Imitator(self.learner, algorithm.imitation, index, seed)
        self.learner.rest()

    def _logs_kl(self) -> bool:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        logs = logs_kl(self.config, size)
        if not logs and self.config.log_kl is None:
            warn(
                f"Agent {self.config.id}: kl is not logged, because that would take a copy of {size / 1e9:.1f} billion "
                "parameters. log_kl: true logs it all the same; log_kl: false leaves this warning out."
            )
        return logs

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        self.reader.check_prompts(problems)

    def traits(self, problem: Problem) -> Traits:
        return self.reader.traits(problem)

    # --- the source --------------------------------------------------------------------------------

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        rollouts = self.source.sample(problems, step, sampling_round)
        self._make_room()
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        answers = self.source.answer(problems, sampled)
        self._make_room()
        return answers

    def sample_ahead(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        """Sample the rollouts of the next step, and score them, before the updates of this step."""
        rollouts = in_order(self.ranks.gather(self.sample(problems, step, 0)))
        self.learner.score_ahead(rollouts, [self.reader.prompt_ids(problem) for problem in problems])
        return rollouts

    def score(self, rollouts: Sequence[Rollout]) -> list[Reading | None]:
        """The agent's current log-probabilities of each rollout after its own prompt; None if it cannot read it.

        For its own rollouts it returns those recorded while sampling, without a pass. For these, and for rollouts of a
        source with another vocabulary, it also returns where tokens end.
        """
        retokenizer = self.reader.retokenizer
        prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
        rendered = {position: self.reader.render(prompt) for position, prompt in prompts.items()}
        ends = {position: retokenizer.end_of(ids) for position, ids in rendered.items()}
        tokens, _ = self.reader.tokens(rollouts, rendered, self.index)
        foreign = {row: ids for row, ids in tokens.items() if rollouts[row].source != self.index}
        logps: dict[int, Any] = {}
        if foreign:
            texts = texts_of(rendered, {row: rollouts[row].prompt_index for row in foreign}, foreign)
            logps = self.learner.score_within_memory(texts, rollouts[0].step)
            self._make_room()

        def reading(row: int, rollout: Rollout) -> Reading | None:
            if row not in tokens:
                return None
            own = rollout.source == self.index
            said = rollout.logps or () if own else logps[row].tolist()
            if not own and rollout.vocabulary == retokenizer.vocabulary:
                return Reading(said)
            return Reading(said, retokenizer.text_ends(tokens[row], rollout, ends[rollout.prompt_index]))

        return [reading(row, rollout) for row, rollout in enumerate(rollouts)]

    # --- the learner -------------------------------------------------------------------------------

    def learn(self, lesson: Lesson) -> LearnResult:
        """Make one optimizer update for each mini-batch of the step's rollouts; then imitate, if that is due."""
        prompts = dict(enumerate(self.reader.render(prompt) for prompt in lesson.prompts))
        tokens, dropped = self.reader.tokens(lesson.rollouts, prompts, self.index)
        if self.config.mask_truncated_completions:
            for row, rollout in enumerate(lesson.rollouts):
                if rollout.finish_reason == "length":
                    tokens.pop(row, None)
                    dropped[row] = "truncated"
        with self.learner.at_work():
            result = self.learner.learn(lesson, Minibatch.of(lesson, prompts, tokens, self.index))
            result.dropped = dropped
            if lesson.examples:
                self._keep(lesson, prompts)
            if lesson.imitates:
                result.metrics |= self.imitator.imitate(lesson.step, lesson.imitation_rate)
        self._make_room()
        return result

    def _make_room(self) -> None:
        """If the GPU is short of memory, give back what only makes the agent's next turn faster: the memory of the
        sampler's cache, captured graphs and what they hold, and memory that torch keeps for later."""
        if self.opened.policy.short_of_memory():
            self.source.engine.release()
            self.opened.policy.free_memory()

    def _keep(self, lesson: Lesson, prompts: dict[int, list[int]]) -> None:
        """Keep right answers for imitation, except those that this agent cannot read."""
        own_right: defaultdict[int, list[bool]] = defaultdict(list)
        for rollout in lesson.rollouts:
            if rollout.source == self.index:
                own_right[rollout.prompt_index].append(self.algorithm.imitation.is_right(rollout.reward))
        tokens, _ = self.reader.tokens(lesson.examples, prompts, self.index)
        for row, ids in tokens.items():
            rollout = lesson.examples[row]
            right = own_right[rollout.prompt_index]
            solved = sum(right) / max(len(right), 1)
            self.imitator.keep(Row(prompts[rollout.prompt_index], ids), lesson.step, rollout.logp_sum, solved)

    # --- checkpoints -------------------------------------------------------------------------------

    def save(self, model_dir: Path, state_file: Path) -> None:
        self.opened.save(model_dir, self.weights)
        write_state(state_of(state_file, self.ranks.rank), self.state_dict())
        if self.ranks.size > 1:
            dist.barrier()

    def load(self, model_dir: Path, state_file: Path) -> None:
        self.opened.load(model_dir, self.weights)
        place = self.device if self.ranks.size > 1 else torch.device("cpu")
        self.load_state_dict(read_state(state_of(state_file, self.ranks.rank), place))

    def state_dict(self) -> dict[str, Any]:
        """The agent's state that a checkpoint must hold besides the weights."""
        return {**self.learner.state_dict(), "imitation": self.imitator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
        if "imitation" in state:  # runs of earlier versions have none
            self.imitator.load_state_dict(state["imitation"])


def state_of(state_file: Path, rank: int) -> Path:
    """The file in which a rank keeps its part of the agent's state."""
    return state_file.with_suffix(f".rank{rank}") if rank else state_file


def in_order(rollouts: list[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.prompt_index, rollout.index))
