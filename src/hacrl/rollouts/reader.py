"""Turns prompts, and the completions of other agents, into the tokens of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.config import AgentConfig
from hacrl.errors import UserError, warn
from hacrl.rollouts.prompts import Beginning, check_ids, has_unknown, render
from hacrl.rollouts.retokenize import Dropped, Retokenizer, readable_ids
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.problem import Problem, Prompt


@dataclass(frozen=True)
class Traits:
    """How an agent reads and writes text, which decides whether others can use its rollouts."""

    has_chat_template: bool
    vocabulary: str
    """A fingerprint that is equal for two agents whose token ids mean the same tokens."""
    opened_block: str
    """The block that the agent's prompts open for completions, for example <think>; empty if there is none."""


@dataclass(frozen=True)
class Limits:
    """Which tokens, and how many of them, a model can read."""

    vocabulary: int
    """Number of rows in the model's embedding."""
    positions: int | None
    """Number of tokens that the model was made for; None if its config does not say."""
    looks_up: bool
    """Whether the model looks positions up in a table, so that longer texts are impossible."""


class Reader:
    """The tokenizer of an agent, with its chat template, its limits and its end-of-turn tokens."""

    def __init__(self, config: AgentConfig, tokenizer: Tokenizer, stop_ids: list[int], limits: Limits) -> None:
        self.config, self.tokenizer, self.stop_ids, self.limits = config, tokenizer, stop_ids, limits
        self.readable = readable_ids(tokenizer, stop_ids)
        self.retokenizer = Retokenizer(tokenizer, stop_ids[0], config.max_completion_length)

    def traits(self, problem: Problem) -> Traits:
        """Say how this agent reads and writes text. `problem` is any problem of the run."""
        opened = self.retokenizer.end_of(self.render(problem.prompt)).opened
        return Traits(bool(self.tokenizer.chat_template), self.retokenizer.vocabulary, opened)

    def render(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, or only a `Beginning` if there are far too many."""
        ids = render(self.tokenizer, self.config, prompt, self.config.max_prompt_length)
        check_ids(ids, self.limits.vocabulary, self.tokenizer, self.config)
        return ids

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Return the token ids of a problem's prompt; UserError if too many. Not all can be checked beforehand."""
        ids = self.render(problem.prompt)
        if len(ids) > self.config.max_prompt_length:
            own = f"agents.{self.config.id}.max_prompt_length={len(ids)}"
            advice = "max_prompt_length alone is that of all agents without their own."
            raise self._too_long(problem.id, ids, f"Continue the run with {own} or more; {advice}")
        return ids

    def tokens(
        self, rollouts: Sequence[Rollout], prompts: Mapping[int, list[int]], agent: int
    ) -> tuple[dict[int, list[int]], dict[int, str]]:
        """Return completions in this agent's tokens, and why others are dropped, by row; `prompts` are its tokens."""
        ends = {r.prompt_index: self.retokenizer.end_of(prompts[r.prompt_index]) for r in rollouts if r.source != agent}
        tokens, dropped = dict[int, list[int]](), dict[int, str]()
        for row, rollout in enumerate(rollouts):
            try:
                own = rollout.source == agent
                tokens[row] = rollout.token_ids if own else self.retokenizer(rollout, ends[rollout.prompt_index])
            except Dropped as reason:
                dropped[row] = str(reason)
        return tokens, dropped

    def check_prompts(self, problems: Sequence[Problem]) -> None:
        """Raise UserError if a prompt is too long; warn if the tokenizer does not know some characters."""
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

    def _check_positions(self) -> None:
        """Raise UserError if the model has too few positions; warn if it can compute more than it was made for."""
        config, positions = self.config, self.limits.positions
        wanted = config.max_prompt_length + config.max_completion_length
        if positions is None or wanted <= positions:
            return
        told = (
            f"max_prompt_length ({config.max_prompt_length}) and max_completion_length "
            f"({config.max_completion_length}) allow {wanted} tokens, but {config.model} has {positions} positions"
        )
        if self.limits.looks_up:
            raise UserError(f"agents.{config.id}: {told}. Lower one of them.")
        warn(f"Agent {config.id}: {told}. It was not made for longer texts: lower one of them, unless all are shorter.")
