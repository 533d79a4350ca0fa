"""`hacrl report`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import finite, say


def report(
    target: Annotated[Path, Argument(metavar="RUN_OR_STUDY", help="The folder of a run or of a study.")],
    output: Annotated[Path | None, Option(help="Default: report.html in that folder.")] = None,
    max_mb: Annotated[
        float,
        Option(
            min=0.1, max=10_000, callback=finite, help="Largest size; above it, rollouts of some steps are left out."
        ),
    ] = 30.0,
) -> None:
    """Write one HTML file that shows a run or a study: curves, who learned from whom, every rollout."""
    from hacrl.report.page import write_report

    written = write_report(target, output, max_mb)
    say(f"{written} ({written.stat().st_size / 1e6:.1f} MB): open it in a browser.")
