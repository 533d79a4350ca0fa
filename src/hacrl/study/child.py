"""One run of a study: the command `hacrl`, ended when the study is gone.

The study holds the other end of standard input and never writes: the end of it is the end of the study, however
that came about.
"""

import os
import runpy
import threading


def follow_the_study() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # at once: files of a run are whole at any moment


if __name__ == "__main__":
    threading.Thread(target=follow_the_study, daemon=True).start()
    runpy.run_module("hacrl.cli", run_name="__main__")
