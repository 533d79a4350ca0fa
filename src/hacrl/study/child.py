"""The process that starts the runs of a study: it imports once what takes seconds, and forks for each run.

It answers the messages of the study, which `next_run` describes. It never starts a thread and never uses a GPU, because
neither survives a fork.
"""

import os
import runpy
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from hacrl.processes import end_with_parent, hear, tell

Order = tuple[list[str], dict[str, str], Path]
"""A run to start: arguments of `hacrl train`, changes of the environment, and the log."""
GRACE = 10.0
"""Seconds that an interrupted run has to end by itself."""


def next_run(connection: Connection) -> Order | None:
    """Fork for each `Order` and answer with the process id; answer None with the exit codes of runs that have ended.

    Returns in each fork, with its order, and in this process once the study has closed the connection, with None.
    """
    running: set[int] = set()
    try:
        while True:
            order: Order | None = hear(connection)
            if order is None:
                codes = ended()
                running -= codes.keys()
                tell(connection, codes)
            elif pid := os.fork():
                running.add(pid)
                tell(connection, pid)
            else:
                connection.close()
                return order
    except (EOFError, ConnectionError):
        end(running)
        return None


def ended() -> dict[int, int]:
    """Exit codes by process id of the runs that have ended since the last call; -9 stands for signal 9."""
    codes = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:  # none is left
        pass
    return codes


def end(running: set[int]) -> None:
    """End runs with SIGINT, and by force after `GRACE` seconds."""
    deadline = time.monotonic() + GRACE
    for pid in running:
        os.kill(pid, signal.SIGINT)
    while running := running - ended().keys():
        time.sleep(0.05)
        for pid in running if time.monotonic() > deadline else ():
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    if sys.platform == "linux":  # elsewhere system libraries may not survive a fork; each run imports this itself
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a package that looks for GPUs must not start CUDA
        import hacrl.agents.agent  # noqa: F401
    import torch

    order = next_run(Connection(int(sys.argv[1])))
    if order is None:
        os._exit(0)  # without taking apart what was imported, which takes a second
    end_with_parent()
    torch.set_num_threads(torch.get_num_threads())  # its pool of threads is not usable after a fork until this is set
    arguments, environment, log = order
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv = ["hacrl", "train", *arguments]
    runpy.run_module("hacrl.cli", run_name="__main__")


if __name__ == "__main__":
    main()
