"""Runs the command `hacrl` for one run of a study, and ends with the study.

The study holds the other end of standard input and never writes to it. When standard input closes, the study has ended,
for whatever reason.
"""

import os
import runpy
import threading


def follow_the_study() -> None:
    """Wait for the end of the study, then end this process."""
    while os.read(0, 1):
        pass
    os._exit(1)  # at once: files of a run are whole at any moment


if __name__ == "__main__":
    threading.Thread(target=follow_the_study, daemon=True).start()
    runpy.run_module("hacrl.cli", run_name="__main__")
