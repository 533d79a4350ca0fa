"""Child processes end with their parent, and the parent learns how a child ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hacrl.errors import UserError
from hacrl.processes import Child, how_it_ended

ANSWERING = """
import sys, time
from multiprocessing.connection import Connection
from hacrl.processes import end_with_parent, hear, tell
end_with_parent()
connection = Connection(int(sys.argv[1]))
tell(connection, hear(connection) + int(sys.argv[2]))
time.sleep(600)
"""
ASKING = """
from hacrl.processes import Child
child = Child("answering", "1", threads=1)
print(child.pid, child.ask(41), flush=True)
child.wait()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering.py").write_text(ANSWERING)
    (tmp_path / "asking.py").write_text(ASKING)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_with_its_parent_even_in_the_middle_of_its_work() -> None:
    command = [sys.executable, "-m", "asking"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, answer = map(int, parent.stdout.readline().split())
        assert answer == 42
        assert is_running(pid)
        assert os.getsid(pid) == pid  # Ctrl-C for the parent's group does not reach it
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lost_child_is_an_error_that_says_how_it_ended() -> None:
    child = Child("answering", "1", threads=1)
    assert child.ask(1) == 2
    child.kill()
    with pytest.raises(UserError, match=f"child process {child.pid} was ended by signal SIGKILL"):
        child.ask(1)
    child.end()


def test_codes_in_words() -> None:
    told = [how_it_ended(code) for code in (3, -6, -40)]
    assert told == ["exited with code 3", "was ended by signal SIGABRT", "was ended by signal 40"]
