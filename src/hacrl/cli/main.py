"""The program `hacrl`: its commands, and what the errors that end it look like."""

import errno
import sys
from typing import Annotated

import typer
from typer import Option

from hacrl import __version__
from hacrl.cli.common import OUT_OF_SPACE, console, fail, say
from hacrl.cli.config import config
from hacrl.cli.demo import demo
from hacrl.cli.eval import evaluate
from hacrl.cli.export import export
from hacrl.cli.init import init
from hacrl.cli.models import models_app
from hacrl.cli.report import report
from hacrl.cli.rollouts import rollouts
from hacrl.cli.studies import studies
from hacrl.cli.study import study
from hacrl.cli.train import train
from hacrl.cli.warmup import warmup
from hacrl.cli.watch import watch
from hacrl.errors import OUT_OF_MEMORY, TrainingDiverged, UserError, lack_of_memory, system_error
from hacrl.signs import Display
from hacrl.terminal import OUTPUT_CLOSED, OutputClosed, guard_logs, print_traceback

NOT_USABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)

app = typer.Typer(
    help="Heterogeneous agents learn together: reinforcement learning with verifiable rewards, shared rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (init, train, warmup, demo, study, evaluate, export, report, rollouts, watch, config, studies):
    app.command("eval" if command is evaluate else None)(command)
app.add_typer(models_app, name="models")


def print_version(asked: bool) -> None:
    if asked:
        say(f"hacrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=print_version, help="Print the version, and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that was asked for; errors that a user can fix end it with one sentence."""
    guard_logs()
    try:
        with Display(console):
            app(prog_name="hacrl")  # also for `python -m hacrl`, which a shell could not complete
    except UserError as error:
        fail(str(error), 2)
    except OutputClosed:  # as `ls | head -1` ends
        sys.exit(OUTPUT_CLOSED)
    except SystemExit as end:
        # Help texts have a console of typer's own, which ends with 1 when its output was closed.
        sys.exit(OUTPUT_CLOSED if isinstance(end.__context__, BrokenPipeError) else end.code)
    except TrainingDiverged as error:
        advice = "Checkpoints are intact: start a new run whose agents' model is RUN/checkpoint-STEP/agents/ID, with a"
        fail(f"{error} {advice} smaller learning_rate.", 1)
    except Exception as error:
        if system_error(error) in OUT_OF_SPACE:
            fail(f"The disk is full ({error}). Free some space.", 2)
        if isinstance(error, OSError) and error.errno in NOT_USABLE:
            fail(f"{error.filename} cannot be used: {error.strerror}. Choose another place.", 2)
        lack = lack_of_memory(error) if isinstance(error, RuntimeError) else None
        if lack is None:
            raise
        advice = "Lower micro_batch_size or sampling_batch_size, or give each agent its GPU."
        fail(f"Out of memory ({lack}). {advice}", OUT_OF_MEMORY)
    finally:
        sys.excepthook = print_traceback  # not before, for typer sets its own
