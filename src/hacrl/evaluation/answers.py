"""The path of every evaluation: a model that only answers, its answers, and their verdicts."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, cached_property
from typing import Any

from hacrl.agents import loading
from hacrl.agents.model import AgentModel
from hacrl.config import AgentConfig
from hacrl.decoder.policy import naming
from hacrl.errors import UserError, warn
from hacrl.evaluation.figures import Line
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.prompts import Beginning, check_ids, has_unknown, render
from hacrl.rollouts.retokenize import decode
from hacrl.rollouts.rollout import Completion
from hacrl.signs import doing
from hacrl.sources.policy import PolicySource
from hacrl.tasks.boxed import stated
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Pool, Verdict, Verifier

VERIFY_SECONDS = 10.0
"""Time that the judgement of one completion may take."""

Score = Callable[[Sequence[Problem], Sequence[str]], list[Verdict]]
"""A verdict on the text that answers each problem."""


def answer_line(problem: Problem, text: str, finish_reason: str, num_tokens: int, verdict: Verdict) -> Line:
    """All that is known of an answer."""
    asked = {"prompt_id": problem.id, "part": problem.part, "prompt": problem.prompt, "answer": problem.answer}
    given = {"text": text, "finish_reason": finish_reason, "num_tokens": num_tokens, "stated": stated(text)}
    return asked | given | {"reward": verdict.reward, "problem": verdict.problem, "detail": verdict.detail}


class Answerer:
    """A model that answers and never learns. Tokenizer and weights are loaded when they are first used.

    On held-out problems it answers as in training. On benchmarks (`as_trained` is False) the built-in decoder samples,
    adapters are merged into the weights, prompts may be as long as the model's positions allow, and a system prompt
    that the model's chat template does not take stands behind the problem.
    """

    def __init__(self, config: AgentConfig, as_trained: bool = True) -> None:
        self.config, self.as_trained = config, as_trained

    @cached_property
    def tokenizer(self) -> Any:
        return loading.load_tokenizer(self.config)

    @cached_property
    def model_config(self) -> Any:
        return loading.load_model_config(self.config)

    @cached_property
    def positions(self) -> float:
        return loading.positions_of(self.model_config) or math.inf

    @cached_property
    def source(self) -> PolicySource:
        """The opened model, without gradients and without a learner."""
        changes = {} if self.as_trained else {"lora": None, "engine": "native"}
        opened = AgentModel(self.config.model_copy(update=changes), index=0, seed=0)
        opened.freeze()
        return opened.source()

    def answers(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], score: Score, temperature: float, seed: int
    ) -> list[Line]:
        """Sample one completion of each problem's prompt, and have them judged. Temperature 0 is greedy decoding."""
        source = self.source
        with doing("answering", len(prompts)):
            completions = self.complete(prompts, temperature, seed)
        texts = [decode(source.reader.tokenizer, completion.content_ids) for completion in completions]
        with doing("judging"):
            verdicts = score(problems, texts)
        rows = zip(problems, texts, completions, verdicts, strict=True)
        return [answer_line(problem, text, own.finish_reason, len(own.token_ids), v) for problem, text, own, v in rows]

    def complete(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> list[Completion]:
        """One completion of each prompt."""
        config, room = self.config, self.config.max_completion_length
        if not self.as_trained:
            room = int(min(room, self.positions - max(map(len, prompts))))
        params = SamplingParams(1, room, temperature, config.top_p, config.top_k, tuple(config.stop))
        with naming(config, updates=0):
            return [completion for (completion,) in self.source.engine.sample(prompts, params, seed)]

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of a prompt. If it is too long, UserError as in training; on benchmarks all ids, or a `Beginning`
        if they are far too many for the model."""
        if self.as_trained:
            return self.source.reader.prompt_ids(problem)
        ids = render(self.tokenizer, self.asked_with, problem.prompt, self.positions)
        rows: int | None = getattr(self.model_config.get_text_config(), "vocab_size", None)
        if rows is not None:  # configs of published code may call it otherwise
            check_ids(ids, rows, self.tokenizer, self.config)
        return ids

    @cached_property
    def asked_with(self) -> AgentConfig:
        """The settings for benchmarks: base models have no chat template, and some templates know no system role."""
        config = self.config
        if config.system_prompt:
            try:
                render(self.tokenizer, config, "1 + 1 = ?")
            except UserError:
                end = "" if self.tokenizer.chat_template else "\n"
                suffix = f"\n{config.system_prompt}{end}{config.prompt_suffix}"
                return config.model_copy(update={"system_prompt": None, "prompt_suffix": suffix})
        return config

    def check(self, benchmark: str, prompts: Sequence[Sequence[int]]) -> None:
        """UserError if no problem of a benchmark fits into the model; warnings if some do not, leave too little for an
        answer, or have characters that it does not know."""
        model, positions = self.config.model, self.positions
        if any(has_unknown(self.tokenizer, prompt) for prompt in prompts):
            warn(f"{benchmark}: prompts have characters that the tokenizer of {model} does not know.")
        lengths, wanted = [len(prompt) for prompt in prompts], self.config.max_completion_length
        too_long = sum(length >= positions for length in lengths)
        if too_long == len(lengths):
            least = "at least " if any(isinstance(prompt, Beginning) for prompt in prompts) else ""
            shortest = f"{benchmark}: the shortest prompt has {least}{min(lengths)} tokens"
            raise UserError(f"{shortest}, and {model} has {positions} positions.")
        if too_long:
            warn(f"{benchmark}: {too_long} prompts do not fit into {model} ({positions} positions): counted as wrong.")
        if short := sum(positions - wanted < length < positions for length in lengths):
            leave = f"{benchmark}: {short} prompts leave less than {wanted} tokens for a completion"
            warn(f"{leave}, because {model} has {positions} positions.")


class Judge(ExitStack):
    """Verdicts and votes on mathematical answers, by math-verify in processes that are started when first needed."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__()
        self.workers = workers or min(os.cpu_count() or 1, 8)

    @cached_property
    def _verifier(self) -> Verifier:
        return self.enter_context(Verifier([("math", 1.0)], timeout=VERIFY_SECONDS, workers=self.workers))

    @cached_property
    def _comparing(self) -> Pool:
        return self.pool("same_answer")

    def pool(self, function: str) -> Pool:
        """Processes that run a function of math_reward.py until this judge is left."""
        return self.enter_context(closing(Pool(function, VERIFY_SECONDS, self.workers)))

    def score(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Verdict]:
        """A verdict on each text against the answer of its problem."""
        answers = [problem.answer for problem in problems]
        return self._verifier.score([problem.prompt for problem in problems], texts, {"answer": answers})

    def votes(self, groups: Sequence[Sequence[Line]]) -> list[list[int | None]]:
        """Number the completions of each problem by answer: 0 is the right answer, equal wrong ones share a number."""
        return list(self._comparing.threads.map(self._votes, groups))

    def _votes(self, group: Sequence[Line]) -> list[int | None]:
        different: list[str] = []

        @cache
        def number(text: str) -> int | None:
            """The number of a wrong answer; None if it cannot be compared."""
            reply = self._comparing.call({"completions": [text], "others": [different]})
            place = reply.values[0] if reply.outcome == "returned" else None
            if place == -1:
                different.append(text)
                return len(different)
            return None if place is None else int(place) + 1

        numbers: dict[float | None, int | None] = {1.0: 0, None: None}
        return [numbers[line["reward"]] if line["reward"] in numbers else number(line["text"]) for line in group]
