"""Actors in the processes that `RayExecutor` starts: an agent, one rank of an agent, or an agent's vLLM."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ray
from hacrl import __version__
from hacrl.agents.model import vllm_of
from hacrl.agents.processes import Member
from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.execution.executor import files_of
from hacrl.execution.memory import keep_freed_memory, measured, peak_resident_gib
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from ray import exceptions

CHUNK = 64 * 2**20
"""Bytes of a checkpoint that are sent at once."""
Key = tuple[int, int, int]
"""What identifies a rollout within its step: its source, its prompt's position and its number."""


@dataclass
class AgentReply:
    """Reply of an agent's process to a call."""

    value: Any
    seconds: float
    peak_memory: float | None
    """Peak GPU memory during the call, in GiB; None on a CPU."""
    resident: float
    """Peak resident memory of the process so far, in GiB."""
    warnings: list[str]


class WarningsKept(logging.Handler):
    """Logging handler that keeps warnings until they are sent with the next reply."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class AgentProcess:
    """Actor that runs an agent, or one rank of it, for `RayExecutor`. It handles one call at a time, in order."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.warnings = WarningsKept()
        logging.getLogger("hacrl").addHandler(self.warnings)
        self.files: tempfile.TemporaryDirectory[str] | None = None

    def place(self) -> tuple[str, str, int]:
        """Id and address of the node, and the process id."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def free_port(self) -> int:
        with socket.create_server(("", 0)) as server:
            port: int = server.getsockname()[1]
        return port

    def open(self, version: str, member: Member, sampler: Any) -> AgentReply:
        """Load the model. `sampler` is a `SamplerProcess` or None."""
        if version != __version__:
            raise UserError(
                f"Agent {member.config.id}: hacrl is {__version__} on its node and {version} here. "
                "Install the same on all."
            )
        self.member = member
        remote: Any = None if sampler is None else RemoteSampler(sampler, member.config)
        self.agent = member.agent(remote)
        return self._reply(lambda: None)

    def call(self, name: str, *args: Any) -> AgentReply:
        return self._reply(lambda: self.member.ask(self.agent, name, *args))

    def learn(self, lesson: Lesson, keys: list[Key], *parts: dict[Key, Rollout]) -> AgentReply:
        """Learn from a lesson whose rollouts, in the order of `keys`, are in `parts`."""
        known = {key: rollout for part in parts for key, rollout in part.items()}
        return self.call("learn", replace(lesson, rollouts=[known[key] for key in keys]))

    def save(self, folder: str | None) -> AgentReply:
        """Save the agent into this folder; without a folder, into temporary files that `read` returns."""
        if folder is None:
            self.files = tempfile.TemporaryDirectory(prefix="hacrl-")
            (self._root / "state").mkdir()
        return self.call("save", *files_of(Path(folder or self._root), self.member.config.id))

    def file_names(self) -> list[str]:
        if self.files is None:
            return []
        return [str(path.relative_to(self._root)) for path in sorted(self._root.rglob("*")) if path.is_file()]

    def read(self, name: str, offset: int) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def write(self, name: str, chunk: bytes) -> None:
        """Append to a temporary file that `load` reads."""
        if self.files is None:
            self.files = tempfile.TemporaryDirectory(prefix="hacrl-")
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(chunk)

    def load(self, folder: str | None) -> AgentReply:
        return self.call("load", *files_of(Path(folder or self._root), self.member.config.id))

    def forget_files(self) -> None:
        if self.files is not None:
            self.files.cleanup()
            self.files = None

    @property
    def _root(self) -> Path:
        assert self.files is not None
        return Path(self.files.name)

    def _reply(self, work: Callable[[], Any]) -> AgentReply:
        value, seconds, peak = measured(self.agent.device, work)
        warnings, self.warnings.messages = self.warnings.messages, []
        return AgentReply(value, seconds, peak, peak_resident_gib(), warnings)


class SamplerProcess:
    """Actor that runs the vLLM of one agent in its own process."""

    def open(self, config: AgentConfig) -> None:
        self.vllm = vllm_of(config)

    def ask(self, name: str, *args: Any) -> Any:
        return getattr(self.vllm, name)(*args)


class RemoteSampler:
    """Proxy in the agent's process that forwards calls of a `Sampler` to a `SamplerProcess`."""

    def __init__(self, actor: Any, config: AgentConfig) -> None:
        self.actor = actor
        answer_of(actor.open.remote(config))

    def reload(self, weights: dict[str, Tensor]) -> None:
        # Many weights are views of joined matrices, and each would be sent with its whole matrix; tied ones are one.
        copies = {(w.data_ptr(), w.shape): w.to("cpu", copy=True) for w in weights.values()}
        by_name = {name: copies[w.data_ptr(), w.shape] for name, w in weights.items()}
        answer_of(self.actor.ask.remote("reload", by_name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: answer_of(self.actor.ask.remote(name, *args))


def answer_of(asked: Any) -> Any:
    """Wait for a process's answer; an error raised in the process is raised here unchanged."""
    try:
        return ray.get(asked)
    except exceptions.RayTaskError as error:
        raise error.cause from error
