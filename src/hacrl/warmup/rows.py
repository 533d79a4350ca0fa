"""The rows one agent learns from, in its tokens, by position in an endless stream."""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from hacrl.agents.agent import Agent
from hacrl.config.task import TaskConfig
from hacrl.config.warmup import DataConfig, WarmupConfig
from hacrl.errors import UserError
from hacrl.learners.supervised import Row
from hacrl.rollouts.retokenize import Dropped
from hacrl.tasks import build_task
from hacrl.tasks.dataset import Example, load_examples
from hacrl.tasks.task import Interleaving

MAX_DROPPED_IN_A_ROW = 1000


@dataclass(frozen=True)
class Source:
    """Rows of one file or task. A place without a usable row has the reason why."""

    train: Callable[[int], Row | str]
    heldout: list[Row]
    dropped: Counter[str]
    """Rows that the agent cannot use, by reason, of those known beforehand."""
    size: int | None
    """Rows to train on; None: endless."""
    digest: str
    """Digest of all rows that are known beforehand."""


class Rows:
    """All sources of one agent, interleaved by their weights."""

    def __init__(self, agent: Agent, data: Sequence[DataConfig], config: WarmupConfig) -> None:
        self.agent = agent
        self.sources = [self._source(part, config) for part in data]
        self._order = Interleaving([part.weight for part in data])
        self.dropped = sum((source.dropped for source in self.sources), Counter[str]())
        self.heldout = [row for source in self.sources for row in source.heldout]
        self.digests = [source.digest for source in self.sources]

    def check(self) -> None:
        """UserError if there is nothing to learn from."""
        known = self.dropped.copy()
        self.take(0, 1)
        self.dropped = known

    def take(self, position: int, count: int) -> tuple[list[Row], int]:
        """The `count` usable rows from `position` on, and the position after them."""
        rows: list[Row] = []
        in_a_row = 0
        before = self._order.before(position)
        while len(rows) < count:
            (part,) = self._order.parts(position, 1)
            row = self.sources[part].train(before[part])
            before[part] += 1
            position += 1
            if isinstance(row, Row):
                rows.append(row)
                in_a_row = 0
                continue
            self.dropped[row] += 1
            in_a_row += 1
            if in_a_row == MAX_DROPPED_IN_A_ROW:
                raise UserError(self._none_usable(self.dropped, "the task"))
        return rows, position

    def encode(self, example: Example) -> Row:
        """As in a rollout, prompt and completion apart; Dropped if the agent cannot use it."""
        config, agent = self.agent.config, self.agent
        prompt = agent.reader.render(example.prompt)
        if len(prompt) > config.max_prompt_length:
            raise Dropped("prompt_too_long")
        end = agent.reader.retokenizer.end_of(prompt)
        completion = [*agent.reader.retokenizer.encode(example.completion, end), agent.reader.stop_ids[0]]
        if len(completion) > config.max_completion_length:
            raise Dropped("completion_too_long")
        if agent.reader.limits.positions is not None and len(prompt) + len(completion) > agent.reader.limits.positions:
            raise Dropped("beyond_positions")
        return Row(prompt, completion)

    def _source(self, data: DataConfig, config: WarmupConfig) -> Source:
        if data.file is not None:
            return self._from_file(data.file, load_examples(data.file, split=data.split, subset=data.subset), config)
        assert data.task is not None
        return self._from_task(data.task, config)

    def _from_file(self, file: str, examples: Sequence[Example], config: WarmupConfig) -> Source:
        """Epoch after epoch, each shuffled by (seed, file, epoch). The prompt alone decides what is held out."""
        usable: dict[bool, list[Row]] = {True: [], False: []}
        dropped: Counter[str] = Counter()
        for example in examples:
            try:
                usable[_fraction(example.question) < config.eval_share].append(self.encode(example))
            except Dropped as reason:
                dropped[str(reason)] += 1
        rows = usable[False]
        if not rows:
            raise UserError(self._none_usable(dropped, file))

        @lru_cache(maxsize=2)
        def order(epoch: int) -> list[int]:
            places = list(range(len(rows)))
            random.Random(f"{config.seed}/{file}/{epoch}").shuffle(places)
            return places

        def train(position: int) -> Row:
            epoch, offset = divmod(position, len(rows))
            return rows[order(epoch)[offset]]

        return Source(train, usable[True][: config.eval_size], dropped, len(rows), _digest(rows + usable[True]))

    def _from_task(self, task_config: TaskConfig, config: WarmupConfig) -> Source:
        """Problems with the task's own completions; held out is its validation split, never its test."""
        task, _ = build_task(for_validation(task_config, config.eval_size), config.seed)
        with task.verifier:
            pass  # nothing is verified: end its processes

        def train(position: int) -> Row | str:
            (problem,) = task.train(position, 1)
            try:
                return self.encode(Example(problem.prompt, task.solution(problem)))
            except Dropped as reason:
                return str(reason)

        heldout, dropped = [], Counter[str]()
        for problem in task.eval_problems:
            try:
                heldout.append(self.encode(Example(problem.prompt, task.solution(problem))))
            except Dropped as reason:
                dropped[str(reason)] += 1
        return Source(train, heldout, dropped, None, _digest(heldout))

    def _none_usable(self, dropped: Counter[str], where: str) -> str:
        config = self.agent.config
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "all are held out"
        meanings = {
            "prompt_too_long": f"max_prompt_length is {config.max_prompt_length}",
            "completion_too_long": f"max_completion_length is {config.max_completion_length}",
            "beyond_positions": f"its model has {self.agent.reader.limits.positions} positions for both",
            "not_reversible": "its tokenizer cannot spell the text",
        }
        why = "; ".join(meaning for reason, meaning in meanings.items() if reason in dropped)
        return f"Agent {config.id} can use no row of {where} ({reasons})" + (f": {why}." if why else ".")


def for_validation(task: TaskConfig, eval_size: int) -> TaskConfig:
    if task.train is not None or any(part.train is not None for part in task.mixture):
        raise UserError("data.task: a task from data has no completions to learn from: give its file as data.file.")
    if any(source.curriculum is not None for source in (task, *task.mixture)):
        raise UserError("data.task: a warm-up has no curriculum. Give the options of one stage as options.")
    if task.mixture:
        parts = [part.model_copy(update={"eval_split": "validation"}) for part in task.mixture]
        return task.model_copy(update={"mixture": parts, "eval_size": eval_size})
    return task.model_copy(update={"eval_split": "validation", "eval_size": eval_size})


def _fraction(text: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


def _digest(rows: Sequence[Row]) -> str:
    digest = blake2b(digest_size=16)
    for row in rows:
        digest.update(array("q", [len(row.prompt), len(row.completion), *row.prompt, *row.completion]))
    return digest.hexdigest()
