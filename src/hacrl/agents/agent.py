"""One agent: a policy that samples completions and learns from its own and from others'."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hacrl.agents.loading import (
    Bases,
    check_vocabulary,
    end_of_turn_ids,
    load_base,
    load_model,
    load_tokenizer,
    looks_positions_up,
    positions_of,
    source_of,
    vocabulary_of,
)
from hacrl.algorithms import Algorithm, Reading
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, naming
from hacrl.errors import UserError, warn
from hacrl.learners.imitation import Imitator
from hacrl.learners.learner import Learner, LearnResult, Lesson
from hacrl.learners.lora import Adapter, base_model, with_same_weights
from hacrl.learners.supervised import Row
from hacrl.learners.updating import read_state
from hacrl.learners.weights import MasterWeights, cast_parameters
from hacrl.rollouts.engine import Engine, SamplingParams
from hacrl.rollouts.engines import engine_of
from hacrl.rollouts.prompts import Beginning, check_ids, has_unknown, render
from hacrl.rollouts.retokenize import Dropped, Retokenizer, decode, readable_ids
from hacrl.rollouts.rollout import Completion, Rollout
from hacrl.rollouts.vllm import VLLM, Sampler, VLLMEngine
from hacrl.seeding import ADAPTER, EVALUATE, SAMPLE, derive_seed
from hacrl.tasks.problem import Problem, Prompt


def vllm_of(config: AgentConfig) -> VLLM:
    """vLLM with an agent's model, in this process."""
    length = config.max_prompt_length + config.max_completion_length
    return VLLM(source_of(config), config.dtype, length, config.sampling_batch_size, config.temperature, config.vllm)


@dataclass(frozen=True)
class Traits:
    """How an agent reads and writes text: whether others can use its rollouts depends on it."""

    has_chat_template: bool
    vocabulary: str
    """Equal for two agents whose token ids mean the same tokens."""
    opened_block: str
    """The block that its prompts open for completions, for example <think>; empty: none."""


class Agent:
    def __init__(
        self,
        config: AgentConfig,
        index: int,
        algorithm: Algorithm,
        seed: int,
        trace: bool = False,
        bases: Bases | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`bases` are the models that agents of this process share where they train adapters only.

        `sampler` is the agent's vLLM if it is elsewhere.
        """
        self.config, self.index, self.algorithm, self.seed = config, index, algorithm, seed
        self.tokenizer = load_tokenizer(config)
        self.adapter: Adapter | None = None
        if config.lora is None:
            self.model = load_model(config)
        else:
            base = load_base(config, {} if bases is None else bases)
            self.model = with_same_weights(base)
            self.adapter = self._adapter(self.model)
        self.device = next(self.model.parameters()).device
        self.read_tokens()
        policy = Policy(self.model, config, self.stop_ids, entropy_gradient=algorithm.entropy_coef > 0)
        self.weights = MasterWeights(self.model, policy.dtype, config.optimizer_offload)
        self.engine = self._vllm(sampler) if config.engine == "vllm" else engine_of(policy, self.tokenizer)
        reference = None
        if algorithm.beta or config.log_kl:
            model = load_model(config) if config.lora is None else with_same_weights(base)
            if config.lora is not None and base_model(source_of(config)) != source_of(config):
                self._adapter(model)  # training goes on from adapters
            start = Policy(model.requires_grad_(False), config, self.stop_ids)
            cast_parameters(start.model, policy.dtype)
            reference = start.score
        saves_work = config.fast and not trace
        self.learner = Learner(config, index, algorithm, self.weights, policy, reference, saves_work)
        self.imitator = Imitator(self.learner, algorithm.imitation, index, seed)

    def read_tokens(self) -> None:
        """What ends a turn, what is text, and how others' text becomes tokens."""
        check_vocabulary(self.model, self.tokenizer, self.config.id)
        self.vocabulary = vocabulary_of(self.model)
        self.stop_ids = end_of_turn_ids(self.model, self.tokenizer, self.config.id)
        self.readable = readable_ids(self.tokenizer, self.stop_ids)
        self.retokenizer = Retokenizer(self.tokenizer, self.stop_ids[0], self.config.max_completion_length)

    def _adapter(self, model: nn.Module) -> Adapter:
        return Adapter(model, self.config, source_of(self.config), derive_seed(self.seed, ADAPTER, self.index))

    def _vllm(self, sampler: Sampler | None) -> Engine:
        sampler = sampler or vllm_of(self.config)
        return VLLMEngine(sampler, self.model, self.tokenizer, self.stop_ids, lambda: self.learner.updates)

    # --- prompts -----------------------------------------------------------------------------------

    def traits(self, problem: Problem) -> Traits:
        return Traits(self.has_chat_template, self.retokenizer.vocabulary, self.opened_block(problem))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; only a `Beginning` of them if they are far too many."""
        ids = render(self.tokenizer, self.config, prompt, self.config.max_prompt_length)
        check_ids(ids, self.vocabulary, self.tokenizer, self.config)
        return ids

    def opened_block(self, problem: Problem) -> str:
        """The block that the agent's prompt opens for its completions, for example <think>; empty: none."""
        return self.retokenizer.end_of(self.render(problem.prompt)).opened

    def prompt_ids(self, problem: Problem) -> list[int]:
        """UserError if it is too long: a problem that was made later than those that are checked beforehand."""
        ids = self.render(problem.prompt)
        if len(ids) > self.config.max_prompt_length:
            raise self._too_long(
                problem.id,
                ids,
                f"Continue the run with agents.{self.config.id}.max_prompt_length={len(ids)} or more; "
                "max_prompt_length alone is that of all agents without their own.",
            )
        return ids

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        """UserError if some are too long; a warning if the tokenizer does not know some of their characters."""
        self._check_positions()
        longest, longest_id, unknown = list[int](), "", ""
        for problem in problems:
            ids = self.render(problem.prompt)
            if isinstance(ids, Beginning):
                raise self._too_long(problem.id, ids)
            if not unknown and has_unknown(self.tokenizer, ids):
                unknown = problem.id
            if len(ids) > len(longest):
                longest, longest_id = ids, problem.id
        if len(longest) > self.config.max_prompt_length:
            advice = f"None that was checked has more: set it to {len(longest)} or more, or keep longer problems out."
            raise self._too_long(longest_id, longest, advice)
        if unknown:
            warn(
                f"Agent {self.config.id}: prompts have characters that the tokenizer of {self.config.model} does not "
                f"know. The first is that of {unknown}."
            )

    def _too_long(self, problem_id: str, ids: list[int], advice: str = "") -> UserError:
        length = str(len(ids))
        if isinstance(ids, Beginning):
            length, advice = f"more than {length}", "Shorten it, or remove it from the data."
        return UserError(
            f"The prompt of {problem_id} has {length} tokens for agent {self.config.id}, more than max_prompt_length "
            f"({self.config.max_prompt_length}). {advice}"
        )

    @property
    def positions(self) -> int | None:
        return positions_of(self.model.config)

    def _check_positions(self) -> None:
        """UserError if there are too few; a warning where the model computes more of them than it was made for."""
        config, positions = self.config, self.positions
        wanted = config.max_prompt_length + config.max_completion_length
        if positions is None or wanted <= positions:
            return
        told = (
            f"max_prompt_length ({config.max_prompt_length}) and max_completion_length "
            f"({config.max_completion_length}) allow {wanted} tokens, but {config.model} has {positions} positions"
        )
        if looks_positions_up(self.model, positions):
            raise UserError(f"agents.{config.id}: {told}. Lower one of them.")
        warn(f"Agent {config.id}: {told}. It was not made for longer texts: lower one of them, unless all are shorter.")

    # --- sampling ----------------------------------------------------------------------------------

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[Rollout]:
        """`num_generations` rollouts of each problem, in order."""
        params = self._params(self.config.num_generations)
        prompts = [self.prompt_ids(problem) for problem in problems]
        seed = derive_seed(self.seed, SAMPLE, step, self.index, sampling_round)
        rollouts = []
        for position, group in enumerate(self._complete(prompts, params, seed)):
            end = self.retokenizer.end_of(prompts[position])
            for index, completion in enumerate(group):
                content = completion.content_ids
                rollouts.append(
                    Rollout(
                        step=step,
                        prompt_id=problems[position].id,
                        prompt=problems[position].prompt,
                        prompt_index=position,
                        source=self.index,
                        index=index,
                        text=decode(self.tokenizer, content),
                        token_ids=completion.token_ids,
                        logps=completion.logps,
                        finish_reason=completion.finish_reason,
                        ended=completion.ended,
                        special_inside=not self.readable.issuperset(content),
                        vocabulary=self.retokenizer.vocabulary,
                        policy_version=self.learner.updates,
                        lead=self.retokenizer.lead(content, end),
                        opened=end.opened,
                    )
                )
        return rollouts

    def _complete(self, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        with naming(self.config, self.learner.updates):
            return self.engine.sample(prompts, params, seed)

    def _params(self, num_generations: int) -> SamplingParams:
        config = self.config
        return SamplingParams(
            num_generations,
            config.max_completion_length,
            config.temperature,
            config.top_p,
            config.top_k,
            tuple(config.stop),
        )

    def sample_ahead(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        """Rollouts of a step before which there are updates to be made."""
        rollouts = self.sample(problems, step, 0)
        self.learner.score_ahead(rollouts, [self.prompt_ids(problem) for problem in problems])
        return rollouts

    def answer(self, problems: Sequence[Problem], sampled: bool = False) -> list[str]:
        """One answer to each problem: the greedy one, or one that is sampled as in training."""
        params, seed = SamplingParams(1, self.config.max_completion_length, 0.0, stop=tuple(self.config.stop)), 0
        if sampled:  # with the same random numbers in each evaluation: what changes is the policy
            params, seed = self._params(1), derive_seed(self.seed, EVALUATE, self.index)
        groups = self._complete([self.prompt_ids(problem) for problem in problems], params, seed)
        return [decode(self.tokenizer, completion.content_ids) for (completion,) in groups]

    # --- learning ----------------------------------------------------------------------------------

    def score(self, rollouts: Sequence[Rollout]) -> list[Reading | None]:
        """What this agent says now of each rollout, behind its own prompt; None if it cannot read it.

        Of its own it says what it recorded when it sampled them, without a pass. With another vocabulary than the
        source's, and for its own, it also says where tokens end.
        """
        prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
        rendered = {position: self.render(prompt) for position, prompt in prompts.items()}
        ends = {position: self.retokenizer.end_of(ids) for position, ids in rendered.items()}
        tokens: dict[int, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            if rollout.source != self.index:
                with suppress(Dropped):
                    tokens[row] = self.retokenizer(rollout, ends[rollout.prompt_index])
        prompt_of = {row: rollouts[row].prompt_index for row in tokens}
        logps = self.learner.score_texts(rendered, prompt_of, tokens, rollouts[0].step) if tokens else {}

        def reading(row: int, rollout: Rollout) -> Reading | None:
            own = rollout.source == self.index
            if not own and row not in tokens:
                return None
            if not own and rollout.vocabulary == self.retokenizer.vocabulary:
                return Reading(logps[row].tolist())
            ids = rollout.token_ids if own else tokens[row]
            text_ends = self.retokenizer.text_ends(ids, rollout, ends[rollout.prompt_index])
            return Reading(rollout.logps if own else logps[row].tolist(), text_ends)

        return [reading(row, rollout) for row, rollout in enumerate(rollouts)]

    def learn(self, lesson: Lesson) -> LearnResult:
        """One pass or more over the step's rollouts, an optimizer update for each mini-batch."""
        tokens: dict[int, list[int]] = {}
        dropped: dict[int, str] = {}
        prompts = [self.render(prompt) for prompt in lesson.prompts]
        foreign = {rollout.prompt_index for rollout in lesson.rollouts if rollout.source != self.index}
        ends = {position: self.retokenizer.end_of(prompts[position]) for position in foreign}
        for row, rollout in enumerate(lesson.rollouts):
            if self.config.mask_truncated_completions and rollout.finish_reason == "length":
                dropped[row] = "truncated"
                continue
            try:
                own = rollout.source == self.index
                tokens[row] = rollout.token_ids if own else self.retokenizer(rollout, ends[rollout.prompt_index])
            except Dropped as reason:
                dropped[row] = str(reason)
        result = self.learner.learn(lesson, prompts, tokens)
        result.dropped = dropped
        self._keep(lesson, prompts)
        if lesson.imitates:
            result.metrics |= self.imitator.imitate(lesson.step, lesson.imitation_rate)
        return result

    def _keep(self, lesson: Lesson, prompts: Sequence[list[int]]) -> None:
        """Keep right answers for imitation, but those that this agent cannot read."""
        if not lesson.examples:
            return
        own_right: defaultdict[int, list[bool]] = defaultdict(list)
        for rollout in lesson.rollouts:
            if rollout.source == self.index:
                own_right[rollout.prompt_index].append(self.algorithm.imitation.is_right(rollout.reward))
        for rollout in lesson.examples:
            prompt = prompts[rollout.prompt_index]
            try:
                own = rollout.source == self.index
                ids = rollout.token_ids if own else self.retokenizer(rollout, self.retokenizer.end_of(prompt))
            except Dropped:
                continue
            right = own_right[rollout.prompt_index]
            solved = sum(right) / max(len(right), 1)
            self.imitator.keep(Row(prompt, ids), lesson.step, rollout.logp_sum, solved)

    # --- checkpoints -------------------------------------------------------------------------------

    def save(self, model_dir: Path, state_file: Path) -> None:
        if self.adapter is None:
            self.model.save_pretrained(model_dir, state_dict=self.weights.state_dict(self.model))
        else:
            self.adapter.save(model_dir, self.weights)
        self.tokenizer.save_pretrained(model_dir)
        with state_file.open("wb") as file:  # an open file, because then a full disk is an OSError
            torch.save(self.state_dict(), file)

    def load(self, model_dir: Path, state_file: Path) -> None:
        if self.adapter is None:
            self.weights.load_state_dict(self.model, load_model(self.config, model_dir).state_dict())
        else:
            self.adapter.load(model_dir, self.weights)
        self.load_state_dict(read_state(state_file, torch.device("cpu")))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the weights."""
        return {**self.learner.state_dict(), "imitation": self.imitator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
        if "imitation" in state:  # runs of earlier versions have none
            self.imitator.load_state_dict(state["imitation"])
