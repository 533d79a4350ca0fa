"""Rewards of completions: `exact`, `math`, reasoning-gym's scorers, a length penalty, and users' own functions.

Code that may hang or crash runs in child processes. A verifier that fails never turns a reward into 0: the
rollout gets None, and the verdict says why. A bug in a user's function ends the run with an error that names its place.
"""

import copy
import math
import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hacrl.config.given import GivenReward, name_of
from hacrl.errors import UserError, require
from hacrl.tasks import child
from hacrl.tasks.child import RewardFunction
from hacrl.tasks.problem import Prompt
from hacrl.tasks.worker import Reply, Unpicklable, Worker, pickled

Completion = str | list[dict[str, str]]
"""A completion as in TRL: a text if the prompt is a text, one assistant message if it is chat messages."""
Lengths = Sequence[int] | None
"""How many tokens each completion has; None: there is no length penalty."""
Reward: TypeAlias = "str | GivenReward | RewardFunction | SoftOverlong"

MEMORY_GIB = 4.0
"""GiB of memory that the process of a reward function may use, including the processes that it starts."""
BATCH = 16
"""Most completions that a process of `math` or GYM judges in one call."""
GYM = "reasoning-gym"
"""Name of the reward of tasks from reasoning-gym; their problems have the columns it needs."""
RESERVED = {"prompt", "prompts", "completion", "completions"}
"""Columns of the data that reward functions do not get under their own names."""


@dataclass(frozen=True)
class Verdict:
    """The result of a reward function, or of the weighted sum of several, for one completion."""

    reward: float | None
    """None if no function applies other than a length penalty, or if a function failed."""
    problem: Literal["error", "timeout"] | None = None
    """How a function failed; None if none failed."""
    detail: str = ""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Each function's value, before weighting."""


def exact(completions: list[Completion], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 if the completion, or its last line, equals the answer apart from white space, else 0.0."""
    words = [(text.split(), text.rstrip().rpartition("\n")[2].split()) for text in map(_text_of, completions)]
    return [float(gold.split() in whole_or_last_line) for whole_or_last_line, gold in zip(words, answer, strict=True)]


def _text_of(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


class Verifier(ExitStack):
    """Scores completions with a weighted sum of reward functions; on exit, ends their processes.

    Each function is "exact", "math", GYM, a `SoftOverlong`, a user's "module:function", "path/to/file.py:function" or
    `GivenReward`, or a Python callable. `math` and GYM run in `workers` processes; `timeout` limits their seconds for
    one completion. A user's function has a process of its own; `call_timeout` limits one call. `memory_gib` limits the
    memory of each of these processes. `exact` and callables run in this process, without limits.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[Reward, float]],
        *,
        timeout: float = 10.0,
        call_timeout: float = 120.0,
        workers: int = 2,
        memory_gib: float | None = MEMORY_GIB,
    ) -> None:
        super().__init__()
        names = [_name(reward) for reward, _ in rewards]
        if not names:
            raise UserError("Expected at least one reward function, got none.")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"Two reward functions are called {twice}: give each a name of its own, def NAME(...).")
        self._weights = {name: weight for name, (_, weight) in zip(names, rewards, strict=True)}
        self._scorers: dict[str, Scorer] = {}
        with ExitStack() as started:  # ends the processes of the others if a function cannot be loaded
            for name, (reward, _) in zip(names, rewards, strict=True):
                self._scorers[name] = _scorer(reward, timeout, call_timeout, workers, memory_gib)
                started.callback(self._scorers[name].close)
            self.push(started.pop_all())

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: dict[str, list[Any]],
        num_tokens: Lengths = None,
    ) -> list[Verdict]:
        """Return a verdict on each completion. Each of the data's `columns` has a value per completion."""
        wrapped: list[Completion] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        extra = {key: values for key, values in columns.items() if key not in RESERVED}
        for key, values in extra.items():
            if len(values) != len(wrapped):
                raise ValueError(f"column {key} has {len(values)} values for {len(wrapped)} completions")
        if not wrapped:
            return []
        arguments = {"prompts": list(prompts), "completions": wrapped, **extra}
        by_function = [scorer.score(arguments, num_tokens) for scorer in self._scorers.values()]
        rows = enumerate(zip(*by_function, strict=True))
        return [self._combine(index, dict(zip(self._scorers, row, strict=True))) for index, row in rows]

    def _combine(self, index: int, verdicts: dict[str, Verdict]) -> Verdict:
        """Combine the verdicts of all functions on the completion at this index."""
        values = {name: verdict.reward for name, verdict in verdicts.items()}
        for name, verdict in verdicts.items():
            if verdict.problem is not None:
                return Verdict(None, verdict.problem, f"{name} {verdict.detail}", values)
        weighted = [self._weights[name] * value for name, value in values.items() if value is not None]
        judged = any(values[name] is not None for name in values if not isinstance(self._scorers[name], SoftOverlong))
        total = math.fsum(weighted) if judged else None
        if total is not None and not abs(total) <= child.LARGEST:
            summed = f"The weighted sum of the rewards ({', '.join(self._weights)}) is {total:g} for completion {index}"
            expected = f"expected a number from {-child.LARGEST:g} to {child.LARGEST:g}"
            raise UserError(f"{summed}, {expected}: lower the weights in task.reward.")
        return Verdict(total, parts=values)


class Scorer(ABC):
    """Runs one reward function, in this process or in others."""

    @abstractmethod
    def score(self, arguments: dict[str, Any], num_tokens: Lengths) -> list[Verdict]:
        """A verdict for each of `arguments["completions"]`, which have `num_tokens` tokens."""

    def close(self) -> None:
        """End the function's processes, if it has any."""


@dataclass(frozen=True)
class SoftOverlong(Scorer):
    """DAPO's length penalty: 0 up to `soft_punish_cache` tokens before the maximum, then falling to -1."""

    max_completion_length: int
    soft_punish_cache: int

    def score(self, arguments: dict[str, Any], num_tokens: Lengths) -> list[Verdict]:
        if num_tokens is None:
            return [Verdict(None)] * len(arguments["completions"])
        return [Verdict(self.penalty(length)) for length in num_tokens]

    def penalty(self, length: int) -> float:
        """The penalty on a completion of `length` tokens."""
        over = length - (self.max_completion_length - self.soft_punish_cache)
        if over <= 0:
            return 0.0
        return -over / self.soft_punish_cache if over < self.soft_punish_cache else -1.0


class InProcess(Scorer):
    """Calls a reward function in this process, without limits."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._attempt(child.usable, function)

    def score(self, arguments: dict[str, Any], num_tokens: Lengths) -> list[Verdict]:
        own = copy.deepcopy(arguments)  # the function may change them
        return [Verdict(value) for value in self._attempt(child.call, self._function, own)]

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            raise _broken(_name(self._function), child.explain(error)) from error


class InOneChild(Scorer):
    """Calls a user's function in one child process, once for all completions."""

    def __init__(self, reward: str | GivenReward, call_timeout: float, memory_gib: float | None) -> None:
        self._spec, self._call_timeout = reward if isinstance(reward, str) else reward.name, call_timeout
        self._worker = Worker(_for_child(reward), path=[str(Path.cwd()), *sys.path], memory_gib=memory_gib)
        loading = self._worker.load()
        if loading.outcome != "returned":
            raise _broken(self._spec, loading.detail)

    def score(self, arguments: dict[str, Any], num_tokens: Lengths) -> list[Verdict]:
        reply = self._worker.call(arguments, self._call_timeout)
        if reply.outcome in ("raised", "memory", "unloadable"):
            raise _broken(self._spec, reply.detail)
        return _verdicts(reply, len(arguments["completions"]))

    def close(self) -> None:
        self._worker.close()


def _for_child(reward: str | GivenReward) -> str | bytes:
    """A user's function in the form in which a child takes it."""
    if isinstance(reward, str):
        source, _, function = reward.rpartition(":")
        return f"{Path(source).expanduser().resolve() if source.endswith('.py') else source}:{function}"
    try:
        return pickled(reward.function)
    except Unpicklable as error:
        advice = (
            "create what cannot be copied (locks, connections) inside the function, or name it path/to/file.py:function"
        )
        raise _broken(reward.name, f"cannot be sent to the process that runs it ({error}): {advice}") from error


class Pool(Scorer):
    """Child processes that run a built-in function of `math_reward.py` or `gym_reward.py`.

    `score` judges a batch a call, within the time limit of a single completion. If the call fails, each completion of
    the batch gets its own call. So the verdicts equal those of single calls, with far fewer calls.
    """

    def __init__(self, function: str, timeout: float, workers: int, memory_gib: float | None = MEMORY_GIB) -> None:
        kind, package = ("gym", "reasoning_gym") if function == "gym" else ("math", "math_verify")
        require(f"The reward {kind}", kind, package)
        self._kind, self._timeout, self._closed = kind, timeout, False
        self._columns = ("entry", "generator", "options", "form") if kind == "gym" else ("answer",)
        source = Path(__file__).with_name(f"{kind}_reward.py")
        self._workers = [Worker(f"{source}:{function}", sys.path, memory_gib) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=kind)

    def score(self, arguments: dict[str, Any], num_tokens: Lengths = None) -> list[Verdict]:
        texts = [_text_of(completion) for completion in arguments["completions"]]
        rows = list(zip(texts, *(arguments[column] for column in self._columns), strict=True))
        size = min(BATCH, math.ceil(len(rows) / len(self._workers)))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [verdict for verdicts in self.threads.map(self._score_batch, batches) for verdict in verdicts]

    def _score_batch(self, rows: list[tuple[Any, ...]]) -> list[Verdict]:
        columns = zip(("completions", *self._columns), map(list, zip(*rows, strict=True)), strict=True)
        reply = self.call(dict(columns))
        if reply.outcome == "returned" or len(rows) == 1 or self._closed:
            return _verdicts(reply, len(rows))
        return [verdict for row in rows for verdict in self._score_batch([row])]

    def call(self, arguments: dict[str, Any]) -> Reply:
        """Call the function in an idle process; waits for one if all are busy."""
        worker = self._idle.get()
        try:
            reply = worker.call(arguments, self._timeout)
        finally:
            self._idle.put(worker)
        if reply.outcome == "unloadable":
            raise _broken(self._kind, reply.detail)
        return reply

    def close(self) -> None:
        self._closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


def _scorer(reward: Reward, timeout: float, call_timeout: float, workers: int, memory_gib: float | None) -> Scorer:
    if isinstance(reward, SoftOverlong):
        return reward
    if isinstance(reward, GivenReward):
        return InOneChild(reward, call_timeout, memory_gib)
    if reward == "exact" or not isinstance(reward, str):
        return InProcess(exact if isinstance(reward, str) else reward)
    if reward in ("math", GYM):
        return Pool("gym" if reward == GYM else "math", timeout, workers, memory_gib)
    if not all(reward.rpartition(":")):
        yours = "a function of yours is written module:function or path/to/file.py:function"
        raise UserError(f"There is no reward {reward!r}: exact and math are built in, and {yours}.")
    return InOneChild(reward, call_timeout, memory_gib)


def _name(reward: Reward) -> str:
    """The name of a reward in metrics: the function's own name, as in TRL."""
    if isinstance(reward, SoftOverlong):
        return "soft_overlong"
    if isinstance(reward, GivenReward):
        return reward.name
    return reward.rpartition(":")[2] if isinstance(reward, str) else name_of(reward)


def _broken(name: str, detail: str) -> UserError:
    return UserError(f"Reward function {name} {detail}.")


def _verdicts(reply: Reply, count: int) -> list[Verdict]:
    """Turn the reply to a call on `count` completions into verdicts: one for each, or one failure for all."""
    if reply.outcome == "returned":
        return [Verdict(value) for value in reply.values]
    return [Verdict(None, "timeout" if reply.outcome == "timeout" else "error", reply.detail)] * count
