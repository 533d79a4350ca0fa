"""The keeper process of a reward function: starts `child.py`, watches its memory, and ends it with its descendants.

It is run by its path and imports only the standard library and no user code, so that nothing can block it.
It ends when the child does, when `worker.py` shuts the control socket, or when the process of `worker.py` is gone.
On Linux, every process that the function starts stays a descendant of the keeper, even a daemon or a new session.
If the child ended without being told to, the keeper's last message on the control socket says how: MEMORY, "exit code
3" or "SIGABRT".
"""

import contextlib
import os
import signal
import socket
import sys
import time

LINUX = sys.platform == "linux"
TICK = 0.05
"""Seconds between two checks of the memory. A process that fills 10 GB per second is noticed half a GB late."""
SCAN = 0.5
"""Seconds between two searches for new processes of the function; a search takes a millisecond or more."""
ENDING = 5.0
"""Seconds that killed processes get to end."""
MEMORY = "memory"
"""The keeper's last message about a child that used too much memory."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(calls: int) -> int:
    """Start `child.py` in its own session, so that signals to its process group stay there; returns its process id."""
    path = os.path.join(os.path.dirname(__file__), "child.py")
    pid = os.fork()
    if pid == 0:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execv(sys.executable, [sys.executable, "-P", "-u", path, str(calls)])
    os.close(calls)
    return pid


def descendants(root: int) -> list[int]:
    """All descendants of a process; an empty list on systems other than Linux."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if LINUX else []:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = [root]
    for parent in found:  # the list grows during the loop
        found += [pid for pid, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def resident(pid: int) -> int:
    """Bytes of a process in memory, including mapped files; pages that processes share count for each of them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def proportional(pid: int) -> int:
    """Bytes of a process in memory without mapped files, which the system can drop, as weights of a model on a GPU.
    A page that several processes share is divided among them. This is slower than `resident`."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        sizes = [int(line.split()[1]) for line in file if line.startswith((b"Pss_Anon:", b"Pss_Shmem:"))]
        if sizes:
            return sum(sizes) * 1024
    return resident(pid)


def watch(pid: int, control: socket.socket, parent: int, memory: int) -> str:
    """Wait until the child ends or must be killed; returns how it ended, or "" if the parent ends it or is gone."""
    family, due = [pid], 0.0
    while os.getppid() == parent:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return how(os.waitstatus_to_exitcode(status))
        now = time.monotonic()
        if memory and now >= due:
            family = descendants(os.getpid())
            due = now + SCAN
        if memory and sum(map(resident, family)) > memory and sum(map(proportional, family)) > memory:
            return MEMORY
        with contextlib.suppress(TimeoutError):
            control.recv(1)  # waits for a TICK; nothing is ever sent, so it returns only if the socket was shut
            break
    return ""


def how(code: int) -> str:
    """How a process ended, in words: "exit code 3" or "SIGABRT"."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")


def end(pid: int) -> None:
    """Kill all descendants of this process, including those it inherits because their own parent has ended."""
    if not LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            for each in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def main(calls: int, control: int, parent: int, memory: int) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    channel = socket.socket(fileno=control)
    channel.set_inheritable(False)
    channel.settimeout(TICK)
    pid = start(calls)
    word = watch(pid, channel, parent, memory)
    end(pid)
    with contextlib.suppress(OSError):  # nobody listens any more
        channel.sendall(word.encode())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
