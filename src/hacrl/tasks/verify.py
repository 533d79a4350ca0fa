"""Rewards of completions: `exact`, `math`, reasoning-gym's scorers, a penalty on length, and users' own functions.

Whatever may hang or crash runs in child processes. A verifier that fails never turns a reward into 0: the
rollout gets None, and the verdict says why. A mistake in a user's function ends the run with its place.
"""

import copy
import importlib.util
import inspect
import math
import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from hacrl.errors import UserError
from hacrl.tasks import child
from hacrl.tasks.child import RewardFunction
from hacrl.tasks.problem import Prompt
from hacrl.tasks.worker import Reply, Worker

Completion = str | list[dict[str, str]]
"""As in TRL: a text after a text prompt, one assistant message after chat messages."""

MEMORY_GIB = 4.0
"""Memory of the process of a reward function, with the processes that it starts."""
BATCH = 16
"""Completions that such a process judges in one call, at most."""
GYM = "reasoning-gym"
"""The reward of tasks from reasoning-gym, whose problems have the columns it needs."""
RESERVED = {"prompt", "prompts", "completion", "completions"}
"""Columns that are not passed on under their own names."""


@dataclass(frozen=True)
class Verdict:
    reward: float | None
    """The weighted sum of the parts; None if no function applies, or only a penalty on length, or one failed."""
    problem: Literal["error", "timeout"] | None = None
    detail: str = ""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Each function's value, before weighting."""


@dataclass(frozen=True)
class Part:
    """What one reward function says about one completion."""

    value: float | None
    problem: Literal["error", "timeout"] | None = None
    detail: str = ""


def exact(completions: list[Completion], answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the completion, or its last line, equals the answer up to white space, else 0.0."""
    return [_exact(text_of(completion), gold) for completion, gold in zip(completions, answer, strict=True)]


def _exact(text: str, gold: str) -> float:
    last_line = text.rstrip().rpartition("\n")[2]
    return float(gold.split() in (text.split(), last_line.split()))


def text_of(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


class Verifier:
    """Weighted reward functions.

    Each is "exact", "math", GYM, a `SoftOverlong`, a user's "module:function" or "path/to/file.py:function", or a
    Python callable.
    `timeout` limits `math` and GYM on one completion, in `workers` processes. `call_timeout` limits one call of a
    user's function, which has a process of its own. `memory_gib` limits the memory of each of these processes. `exact`
    and callables run here, without a limit.
    """

    def __init__(
        self,
        rewards: Sequence[tuple["str | RewardFunction | SoftOverlong", float]],
        *,
        timeout: float = 10.0,
        call_timeout: float = 120.0,
        workers: int = 2,
        memory_gib: float | None = MEMORY_GIB,
    ) -> None:
        names = [_name(reward) for reward, _ in rewards]
        if not names or len(set(names)) < len(names):
            raise UserError(f"Expected reward functions with names of their own, got {', '.join(names) or 'none'}.")
        self._weights = {name: weight for name, (_, weight) in zip(names, rewards, strict=True)}
        self._scorers: dict[str, Scorer] = {}
        try:
            for name, (reward, _) in zip(names, rewards, strict=True):
                self._scorers[name] = _scorer(reward, timeout, call_timeout, workers, memory_gib)
        except BaseException:
            self.close()
            raise

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: dict[str, list[Any]],
        num_tokens: Sequence[int] | None = None,
    ) -> list[Verdict]:
        """One verdict for each completion, in order. `columns` are those of the data, a value for each.

        Without `num_tokens` there is no penalty on length.
        """
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
        lengths = {"num_tokens": num_tokens}
        by_function = {
            name: scorer.score(arguments | lengths if isinstance(scorer, SoftOverlong) else arguments)
            for name, scorer in self._scorers.items()
        }
        return [
            self._combine(index, {name: parts[index] for name, parts in by_function.items()})
            for index in range(len(wrapped))
        ]

    def _combine(self, index: int, parts: dict[str, Part]) -> Verdict:
        values = {name: part.value for name, part in parts.items()}
        for name, part in parts.items():
            if part.problem is not None:
                return Verdict(None, part.problem, f"{name} {part.detail}", values)
        weighted = [self._weights[name] * value for name, value in values.items() if value is not None]
        judged = any(values[name] is not None for name in values if not isinstance(self._scorers[name], SoftOverlong))
        total = sum(weighted) if judged else None
        if total is not None and not abs(total) <= child.LARGEST:
            raise UserError(
                f"The weighted sum of the rewards ({', '.join(self._weights)}) is {total:g} for completion {index}, "
                f"expected a number from {-child.LARGEST:g} to {child.LARGEST:g}: lower the weights in task.reward."
            )
        return Verdict(total, parts=values)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Scorer(ABC):
    """One reward function, where it runs."""

    @abstractmethod
    def score(self, arguments: dict[str, Any]) -> list[Part]:
        """A part for each of `arguments["completions"]`."""

    def close(self) -> None:
        """End its processes, if it has any."""


@dataclass(frozen=True)
class SoftOverlong(Scorer):
    """DAPO's penalty on length: 0 up to `soft_punish_cache` tokens before the maximum, from there down to -1."""

    max_completion_length: int
    soft_punish_cache: int

    def score(self, arguments: dict[str, Any]) -> list[Part]:
        if arguments["num_tokens"] is None:
            return [Part(None)] * len(arguments["completions"])
        return [Part(self.penalty(length)) for length in arguments["num_tokens"]]

    def penalty(self, length: int) -> float:
        over = length - (self.max_completion_length - self.soft_punish_cache)
        if over <= 0:
            return 0.0
        return -over / self.soft_punish_cache if over < self.soft_punish_cache else -1.0


class InProcess(Scorer):
    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._attempt(child.usable, function)

    def score(self, arguments: dict[str, Any]) -> list[Part]:
        own = copy.deepcopy(arguments)  # the function may change them
        return [Part(value) for value in self._attempt(child.call, self._function, own)]

    def _attempt(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            raise _broken(_name(self._function), child.explain(error)) from error


class InOneChild(Scorer):
    """A user's function: one call for all completions."""

    def __init__(self, spec: str, call_timeout: float, memory_gib: float | None) -> None:
        self._spec = spec
        self._call_timeout = call_timeout
        source, _, function = spec.rpartition(":")
        if source.endswith(".py"):
            source = str(Path(source).expanduser().resolve())
        self._worker = Worker(f"{source}:{function}", path=[str(Path.cwd()), *sys.path], memory_gib=memory_gib)
        loading = self._worker.load()
        if loading.outcome != "returned":
            raise _broken(spec, loading.detail)

    def score(self, arguments: dict[str, Any]) -> list[Part]:
        reply = self._worker.call(arguments, self._call_timeout)
        if reply.outcome == "returned":
            return [Part(value) for value in reply.values]
        if reply.outcome in ("raised", "memory", "unloadable"):
            raise _broken(self._spec, reply.detail)
        return [_failed(reply)] * len(arguments["completions"])

    def close(self) -> None:
        self._worker.close()


class Pool:
    """Processes that run one function of ours that needs a package."""

    def __init__(
        self, kind: str, function: str, package: str, timeout: float, workers: int, memory_gib: float | None
    ) -> None:
        """`kind` is the extra that brings the package, and `kind`_reward.py beside this file has the function."""
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise UserError(f"The reward {kind} needs the package {package}: run pip install 'hacrl[{kind}]'.")
        self._kind, self._timeout, self.closed = kind, timeout, False
        source = Path(__file__).with_name(f"{kind}_reward.py")
        self._workers = [Worker(f"{source}:{function}", sys.path, memory_gib) for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=kind)

    def call(self, arguments: dict[str, Any]) -> Reply:
        worker = self._idle.get()
        try:
            reply = worker.call(arguments, self._timeout)
        finally:
            self._idle.put(worker)
        if reply.outcome == "unloadable":
            raise _broken(self._kind, reply.detail)
        return reply

    @property
    def size(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class MathPool(Pool):
    def __init__(self, function: str, timeout: float, workers: int, memory_gib: float | None = MEMORY_GIB) -> None:
        super().__init__("math", function, "math-verify", timeout, workers, memory_gib)


class InManyChildren(Scorer):
    """`math` and GYM, several calls at a time.

    A call judges a batch in the time that a single completion may take; if it does not return, each of them gets a
    call of its own. So the verdicts are those of single calls, without what most calls cost.
    """

    def __init__(self, pool: Pool, columns: Sequence[str]) -> None:
        """The pool's function gets these columns beside the completions."""
        self._pool, self._columns = pool, columns

    def score(self, arguments: dict[str, Any]) -> list[Part]:
        texts = [text_of(completion) for completion in arguments["completions"]]
        rows = list(zip(texts, *(arguments[column] for column in self._columns), strict=True))
        size = min(BATCH, math.ceil(len(rows) / self._pool.size))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [part for parts in self._pool.threads.map(self._score_batch, batches) for part in parts]

    def _score_batch(self, rows: list[tuple[Any, ...]]) -> list[Part]:
        columns = zip(("completions", *self._columns), map(list, zip(*rows, strict=True)), strict=True)
        reply = self._pool.call(dict(columns))
        if reply.outcome == "returned":
            return [Part(value) for value in reply.values]
        if len(rows) == 1 or self._pool.closed:
            return [_failed(reply)] * len(rows)
        return [part for row in rows for part in self._score_batch([row])]

    def close(self) -> None:
        self._pool.close()


def _scorer(
    reward: str | RewardFunction | SoftOverlong,
    timeout: float,
    call_timeout: float,
    workers: int,
    memory_gib: float | None,
) -> Scorer:
    if isinstance(reward, SoftOverlong):
        return reward
    if not isinstance(reward, str):
        return InProcess(reward)
    if reward == "exact":
        return InProcess(exact)
    if reward == "math":
        return InManyChildren(MathPool("math", timeout, workers, memory_gib), ["answer"])
    if reward == GYM:
        pool = Pool("gym", "gym", "reasoning-gym", timeout, workers, memory_gib)
        return InManyChildren(pool, ["entry", "generator", "options", "form"])
    if not all(reward.rpartition(":")):
        raise UserError(
            f"There is no reward {reward!r}: exact and math are built in, "
            "and a function of yours is written module:function or path/to/file.py:function."
        )
    return InOneChild(reward, call_timeout, memory_gib)


def _name(reward: str | RewardFunction | SoftOverlong) -> str:
    """What metrics call it: the function's own name, as in TRL."""
    if isinstance(reward, SoftOverlong):
        return "soft_overlong"
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    return reward.__name__ if inspect.isroutine(reward) else type(reward).__name__


def _broken(name: str, detail: str) -> UserError:
    return UserError(f"Reward function {name} {detail}.")


def _failed(reply: Reply) -> Part:
    return Part(None, "timeout" if reply.outcome == "timeout" else "error", reply.detail)
