"""A terminal for tests: a program runs in it, and what it draws becomes the text that a person would see."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable


class Screen:
    """A terminal that understands what the live table sends: it is what a person would see."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    @classmethod
    def after(cls, data: str) -> list[str]:
        """The lines that are not empty."""
        screen = cls()
        screen.feed(data)
        return [line.rstrip() for line in screen.lines if line.strip()]

    def feed(self, data: str) -> None:
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b", data):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part == "\x1b[1A":
                self.row -= 1
            elif part.startswith("\x1b"):
                assert part[-1] in "mhl", part  # colours, the cursor
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)


def in_a_terminal(code: str, *arguments: str, on_output: Callable[[str], None] = lambda drawn: None) -> str:
    """Run Python code in a terminal of 80 columns until it ends well, and return all that it has sent.

    `on_output` gets what it has sent so far, whenever there is more.
    """
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    sent = b""
    while True:
        try:
            sent += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        on_output(sent.decode("utf-8", "ignore"))
    os.close(ours)
    assert process.wait(60) == 0, sent
    return sent.decode("utf-8")
