"""The rows that one agent learns from, in its tokens: an endless stream in which each row has a position."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from hacrl.config.task import TaskConfig
from hacrl.config.warmup import DataConfig, WarmupConfig
from hacrl.errors import UserError
from hacrl.learners.supervised import Row
from hacrl.rollouts.reader import Reader
from hacrl.rollouts.retokenize import Dropped
from hacrl.tasks import build_task
from hacrl.tasks.dataset import Epochs, Example, load_examples
from hacrl.tasks.problem import Problem, text_number
from hacrl.tasks.task import Interleaving

MAX_DROPPED_IN_A_ROW = 1000


@dataclass(frozen=True)
class Stream:
    """Rows of one file or task."""

    train: Callable[[int], Row | str]
    """The row at a position of the endless stream, or why the agent cannot use it."""
    heldout: list[Row]
    dropped: Counter[str]
    """How many of the rows known beforehand the agent cannot use, by reason."""
    size: int | None
    """Rows to train on; None: endless."""
    digest: str
    """Digest of all rows that are known beforehand."""


class Rows:
    """All streams of one agent, interleaved by their weights."""

    def __init__(self, reader: Reader, data: Sequence[DataConfig], config: WarmupConfig) -> None:
        self.reader = reader
        self.streams = [
            self._from_task(part.task, config) if part.task else self._from_file(part, str(part.file), config)
            for part in data
        ]
        self._order = Interleaving([part.weight for part in data])
        self.dropped = sum((stream.dropped for stream in self.streams), Counter[str]())
        self.heldout = [row for stream in self.streams for row in stream.heldout]
        self.digests = [stream.digest for stream in self.streams]

    def check(self) -> None:
        """Raise UserError if there is nothing to learn from."""
        known = self.dropped.copy()
        self.take(0, 1)
        self.dropped = known

    def take(self, position: int, count: int) -> tuple[list[Row], int]:
        """Return the next `count` usable rows from `position` on, and the position after them."""
        rows: list[Row] = []
        in_a_row = 0
        before = self._order.before(position)
        while len(rows) < count:
            (part,) = self._order.parts(position, 1)
            row = self.streams[part].train(before[part])
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

    def encode(self, example: Example) -> Row | str:
        """Return an example in the agent's tokens, prompt and completion apart as in a rollout; or why it is unfit."""
        reader, config, positions = self.reader, self.reader.config, self.reader.limits.positions
        prompt = reader.render(example.prompt)
        if len(prompt) > config.max_prompt_length:
            return "prompt_too_long"
        end = reader.retokenizer.end_of(prompt)
        try:
            completion = [*reader.retokenizer.encode(example.completion, end), reader.stop_ids[0]]
        except Dropped as reason:
            return str(reason)
        if len(completion) > config.max_completion_length:
            return "completion_too_long"
        if positions is not None and len(prompt) + len(completion) > positions:
            return "beyond_positions"
        return Row(prompt, completion)

    def _from_file(self, data: DataConfig, file: str, config: WarmupConfig) -> Stream:
        """Rows of a file: epoch after epoch, each shuffled by (seed, file, epoch)."""
        examples, share = load_examples(file, split=data.split, subset=data.subset), config.eval_share
        # The question alone decides whether a row is held out.
        encoded = [(text_number(example.question, 4) / 2**32 < share, self.encode(example)) for example in examples]
        dropped = Counter(row for _, row in encoded if isinstance(row, str))
        rows, heldout = ([row for held, row in encoded if held == of and isinstance(row, Row)] for of in (False, True))
        if not rows:
            raise UserError(self._none_usable(dropped, file))
        take, digest = Epochs(rows, f"{config.seed}/{file}").take, _digest(rows + heldout)
        return Stream(lambda position: take(position, 1)[0], heldout[: config.eval_size], dropped, len(rows), digest)

    def _from_task(self, task_config: TaskConfig, config: WarmupConfig) -> Stream:
        """Problems of a task with its own completions. The validation split is held out, the test split never read."""
        task, _ = build_task(for_validation(task_config, config.eval_size), config.seed)
        with task.verifier:
            pass  # ends the verifier's processes, because nothing is verified

        def encode(problem: Problem) -> Row | str:
            return self.encode(Example(problem.prompt, task.solution(problem)))

        encoded = [encode(problem) for problem in task.eval_problems]
        heldout = [row for row in encoded if isinstance(row, Row)]
        dropped = Counter(row for row in encoded if isinstance(row, str))
        return Stream(lambda position: encode(*task.train(position, 1)), heldout, dropped, None, _digest(heldout))

    def _none_usable(self, dropped: Counter[str], where: str) -> str:
        config = self.reader.config
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "all are held out"
        meanings = {
            "prompt_too_long": f"max_prompt_length is {config.max_prompt_length}",
            "completion_too_long": f"max_completion_length is {config.max_completion_length}",
            "beyond_positions": f"its model has {self.reader.limits.positions} positions for both",
            "not_reversible": "its tokenizer cannot spell the text",
        }
        why = "; ".join(meaning for reason, meaning in meanings.items() if reason in dropped)
        return f"Agent {config.id} can use no row of {where} ({reasons})" + (f": {why}." if why else ".")


def for_validation(task: TaskConfig, eval_size: int) -> TaskConfig:
    """Hold out `eval_size` problems of the task's validation split; UserError if it has no completions to learn."""
    if task.train is not None or any(part.train is not None for part in task.mixture):
        raise UserError("data.task: a task from data has no completions to learn from: give its file as data.file.")
    if any(source.curriculum is not None for source in (task, *task.mixture)):
        raise UserError("data.task: a warm-up has no curriculum. Give the options of one stage as options.")
    validation = {"eval_split": "validation"}
    own = {"mixture": [part.model_copy(update=validation) for part in task.mixture]} if task.mixture else validation
    return task.model_copy(update={**own, "eval_size": eval_size})


def _digest(rows: Sequence[Row]) -> str:
    digest = blake2b(digest_size=16)
    for row in rows:
        digest.update(array("q", [len(row.prompt), len(row.completion), *row.prompt, *row.completion]))
    return digest.hexdigest()
