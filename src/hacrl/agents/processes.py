"""One agent in several processes (FSDP): what a rank does, and the ranks that are started on this machine.

`ShardedAgent` starts ranks here and calls them through pipes; `RayExecutor` does so on a cluster.
"""

import logging
import os
import sys
import tempfile
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hacrl.agents.agent import Agent, in_order
from hacrl.agents.loading import resolve_device
from hacrl.algorithms import Algorithm
from hacrl.config import AgentConfig
from hacrl.errors import TrainingDiverged, UserError
from hacrl.learners.ranks import ALONE, join_ranks
from hacrl.processes import Child, end_with_parent, hear, tell
from hacrl.rollouts.vllm import Sampler

SHARED = ("sample", "answer")
"""Calls that every rank answers for its share. The first rank alone answers all other calls."""


@dataclass(frozen=True)
class Member:
    """What a process must know to be one rank of an agent, or the whole agent."""

    config: AgentConfig
    index: int
    algorithm: Algorithm
    seed: int
    trace: bool
    rank: int
    meeting_point: str

    def agent(self, sampler: Sampler | None = None) -> Agent:
        """Load the agent. If it is divided among several processes, meet the other ranks first."""
        config, ranks = self.config, ALONE
        if config.fsdp > 1:
            logging.getLogger("hacrl").disabled = self.rank > 0  # one warning is enough
            ranks = join_ranks(self.rank, config.fsdp, self.meeting_point, resolve_device(config.device))
        return Agent(config, self.index, self.algorithm, self.seed, self.trace, sampler=sampler, ranks=ranks)

    def ask(self, agent: Agent, name: str, *args: Any) -> Any:
        """Call a method of the agent, and return this rank's part of the answer."""
        answer = getattr(agent, name)(*args)
        return answer if name in SHARED or self.rank == 0 else None


def joined(name: str, parts: list[Any]) -> Any:
    """Join the parts of all ranks into the answer to a call."""
    if name == "sample":
        return in_order([rollout for part in parts for rollout in part])
    if name == "answer":
        return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]
    return parts[0]


class ShardedAgent:
    """An agent whose ranks are processes on this machine."""

    def __init__(self, config: AgentConfig, index: int, algorithm: Algorithm, seed: int, trace: bool = False) -> None:
        self.config, self.index = config, index
        self.device = torch.device("cpu")  # where this process does its part of the work
        self.folder = tempfile.TemporaryDirectory(prefix="hacrl-")
        threads = max(torch.get_num_threads() // config.fsdp, 1)
        first = resolve_device(config.device)
        self.processes: list[Child] = []
        self.end = weakref.finalize(self, end_all, self.processes)
        for rank in range(config.fsdp):
            self.processes.append(Child(__name__, threads=threads))
            device = f"cuda:{(first.index or 0) + rank}" if first.type == "cuda" else "cpu"
            own = config.model_copy(update={"device": device})
            meeting_point = f"file://{self.folder.name}/meeting"
            tell(self.processes[-1].connection, Member(own, index, algorithm, seed, trace, rank, meeting_point))
        self._answers()  # wait until all ranks have loaded the model

    def __getattr__(self, name: str) -> Any:
        """Return a method of `Agent` that calls all ranks and joins their answers."""
        if not callable(getattr(Agent, name, None)):
            raise AttributeError(f"an agent has no method {name!r}")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        for process in self.processes:
            tell(process.connection, (name, args))
        return joined(name, self._answers())

    def _answers(self) -> list[Any]:
        """Wait for an answer from each rank. The first error ends all: others may be waiting for the failed one."""
        connections = [process.connection for process in self.processes]
        answers: dict[Connection, Any] = {}
        while len(answers) < len(connections):
            for ready in wait([connection for connection in connections if connection not in answers]):
                assert isinstance(ready, Connection)
                try:
                    answers[ready] = hear(ready)
                except (EOFError, ConnectionError):
                    answers[ready] = RuntimeError(f"A process of agent {self.config.id} has ended.")
                if isinstance(answers[ready], Exception):
                    self.end()
                    raise answers[ready]
        return [answers[connection] for connection in connections]


def end_all(processes: Sequence[Child]) -> None:
    for process in processes:
        process.end()


def serve(connection: Connection) -> None:
    """Run as a rank: answer calls until the caller is gone."""
    member: Member = hear(connection)
    agent = member.agent()
    tell(connection, None)
    while True:
        name, args = hear(connection)
        tell(connection, member.ask(agent, name, *args))


def main() -> None:
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except (EOFError, ConnectionError):  # the run has ended
        pass
    except (UserError, TrainingDiverged) as error:
        tell(connection, error)
    except Exception:
        tell(connection, RuntimeError(traceback.format_exc()))
    os._exit(0)  # does not wait for ranks that may never come


if __name__ == "__main__":
    main()
