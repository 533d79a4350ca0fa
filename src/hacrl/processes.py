"""Child processes that answer their parent: the ranks of an agent, and the process that forks the runs of a study.

Each has a session of its own, so that Ctrl-C in a terminal reaches only the parent. It ends when its parent ends, for
whatever reason. Reward functions may do anything, so their processes have a keeper: see tasks/keeper.py.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

from hacrl.errors import UserError


class Child(subprocess.Popen[bytes]):
    """The parent's side: a process that runs a module, and the connection to it."""

    def __init__(self, module: str, *arguments: str, threads: int) -> None:
        """Run `python -m module FD ARGUMENTS`, where FD is the module's end of the connection."""
        self.connection, theirs = Pipe()
        with theirs:
            super().__init__(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE,  # never written to: see `end_with_parent`
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )

    def ask(self, what: Any) -> Any:
        """Send a message, and wait for the answer."""
        try:
            tell(self.connection, what)
            return hear(self.connection)
        except (EOFError, ConnectionError):
            how = how_it_ended(self.wait())
            raise UserError(f"The child process {self.pid} {how}. Its work is lost; try again.") from None

    def end(self) -> None:
        """Kill the process. Those that it forked end too, if they called `end_with_parent`."""
        self.kill()
        self.wait()
        self.connection.close()
        assert self.stdin is not None
        self.stdin.close()


def end_with_parent() -> None:
    """End this process as soon as its parent is gone, which closes standard input, a pipe from the parent."""

    def follow() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)  # without cleaning up: files of a run are whole at any moment

    threading.Thread(target=follow, daemon=True).start()


def tell(connection: Connection, what: Any) -> None:
    connection.send_bytes(pickle.dumps(what))  # send() would share tensor memory, which needs both processes


def hear(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def how_it_ended(code: int) -> str:
    """An exit code as `subprocess` and `os.waitstatus_to_exitcode` return it, in words."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exited with code {code}" if code >= 0 else f"was ended by signal {names.get(-code, -code)}"
