"""Answers of one model to the problems of benchmarks, and the judgement of answers."""

import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hacrl.agents.loading import (
    check_vocabulary,
    end_of_turn_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    positions_of,
)
from hacrl.config import AgentConfig
from hacrl.decoder.policy import Policy, naming
from hacrl.errors import UserError, warn
from hacrl.learners.weights import cast_parameters
from hacrl.rollouts.engine import Engine, SamplingParams
from hacrl.rollouts.engines import engine_of
from hacrl.rollouts.prompts import Beginning, check_ids, has_unknown, render
from hacrl.rollouts.rollout import Completion
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import MathPool, Verifier

VERIFY_SECONDS = 10.0
"""For the judgement of one completion."""

Line = dict[str, Any]
"""A completion with its verdict, as it is written down."""


class Sampler:
    """A model that answers. It is loaded when something is to be sampled."""

    def __init__(self, config: AgentConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self._checked: set[str] = set()

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config)

    @cached_property
    def engine(self) -> Engine:
        model = load_model(self.config).requires_grad_(False)
        check_vocabulary(model, self.tokenizer, self.config.id)
        policy = Policy(model, self.config, end_of_turn_ids(model, self.tokenizer, self.config.id))
        cast_parameters(model, policy.dtype)
        return engine_of(policy, self.tokenizer)

    def complete(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[Completion]:
        """One completion of each prompt."""
        with naming(self.config, updates=0):
            return [completion for (completion,) in self.engine.sample(prompts, params, seed)]

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Through the chat template; where it takes no instruction, that stands behind the problem.

        Of a prompt that is far too long for the model, a `Beginning`, which is too long too.
        """
        config, prompt = self.config, problem.prompt
        if isinstance(prompt, str) and not self.takes_instruction:
            end = "" if self.tokenizer.chat_template else "\n"
            prompt = f"{prompt}\n{config.system_prompt}{end}"
            config = config.model_copy(update={"system_prompt": None})
        ids = render(self.tokenizer, config, prompt, self.positions)
        rows: int | None = getattr(self.model_config.get_text_config(), "vocab_size", None)
        if rows is not None:  # configs of published code may call it otherwise
            check_ids(ids, rows, self.tokenizer, config)
        return ids

    @cached_property
    def takes_instruction(self) -> bool:
        """Base models have no template, and some templates know no system role."""
        if not self.config.system_prompt:
            return True
        if not self.tokenizer.chat_template:
            return False
        try:
            render(self.tokenizer, self.config, "1 + 1 = ?")
        except UserError:
            return False
        return True

    @cached_property
    def model_config(self) -> Any:
        return load_model_config(self.config)

    @cached_property
    def positions(self) -> float:
        return positions_of(self.model_config) or math.inf

    def check(self, benchmark: str, prompts: Sequence[Sequence[int]]) -> None:
        """Once for each benchmark: UserError if no problem fits into the model; warnings if some do not, leave too
        little for an answer, or have characters that it does not know."""
        if benchmark in self._checked:
            return
        self._checked.add(benchmark)
        model, positions = self.config.model, self.positions
        if any(has_unknown(self.tokenizer, prompt) for prompt in prompts):
            warn(f"{benchmark}: prompts have characters that the tokenizer of {model} does not know.")
        lengths, wanted = [len(prompt) for prompt in prompts], self.config.max_completion_length
        too_long = sum(length >= positions for length in lengths)
        if too_long == len(lengths):
            least = "at least " if any(isinstance(prompt, Beginning) for prompt in prompts) else ""
            raise UserError(
                f"{benchmark}: the shortest prompt has {least}{min(lengths)} tokens, and {model} has {positions} "
                "positions."
            )
        if too_long:
            warn(f"{benchmark}: {too_long} prompts do not fit into {model} ({positions} positions): counted as wrong.")
        short = sum(positions - wanted < length < positions for length in lengths)
        if short:
            warn(
                f"{benchmark}: {short} prompts leave less than {wanted} tokens for a completion, because {model} "
                f"has {positions} positions."
            )


class Judge:
    """Verdicts and votes, by math-verify in processes with limits. They are started when they are needed."""

    def __init__(self) -> None:
        self._workers = min(os.cpu_count() or 1, 8)
        self._verifier: Verifier | None = None
        self._pool: MathPool | None = None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *error: object) -> None:
        for part in (self._verifier, self._pool):
            if part is not None:
                part.close()

    def verdicts(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Line]:
        if self._verifier is None:
            self._verifier = Verifier([("math", 1.0)], timeout=VERIFY_SECONDS, workers=self._workers)
        answers = [problem.answer for problem in problems]
        verdicts = self._verifier.score([problem.prompt for problem in problems], texts, {"answer": answers})
        return [{"reward": v.reward, "problem": v.problem, "detail": v.detail} for v in verdicts]

    def votes(self, groups: Sequence[Sequence[Line]]) -> list[list[int | None]]:
        """Number the completions of each problem by answer: 0 is the right answer, equal wrong ones share a number."""
        if self._pool is None:
            self._pool = MathPool("same_answer", VERIFY_SECONDS, self._workers)
        return list(self._pool.threads.map(self._votes, groups))

    def _votes(self, group: Sequence[Line]) -> list[int | None]:
        assert self._pool is not None
        known: dict[str, int | None] = {}
        different: list[str] = []
        votes: list[int | None] = []
        for line in group:
            text, vote = line["text"], None
            if line["reward"] == 1:
                vote = 0
            elif line["reward"] is not None and text in known:
                vote = known[text]
            elif line["reward"] is not None:
                reply = self._pool.call({"completions": [text], "others": [different]})
                place = reply.values[0] if reply.outcome == "returned" else None
                if place == -1:
                    different.append(text)
                    place = len(different) - 1
                vote = known[text] = None if place is None else int(place) + 1
            votes.append(vote)
        return votes
