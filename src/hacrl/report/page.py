"""`hacrl report`: one HTML file with everything inside, which opens offline and loads nothing."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from hacrl.errors import UserError, require
from hacrl.report.collect import Data, run_data, study_data
from hacrl.report.rollouts import Chunks
from hacrl.signs import doing
from hacrl.training.run_dir import write_atomically

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("dom.js", "charts.js", "run.js", "rollouts.js", "study.js", "main.js")
"""The parts of the page's script, in the order in which they build on each other."""
GENERATOR = '<meta name="generator" content="hacrl report">'
MEGABYTE = 1_000_000


@doing("writing the report")
def write_report(target: Path, output: Path | None = None, max_mb: float = 30.0) -> Path:
    """Write the report of a run or a study, and return its path."""
    if (target / "study.json").is_file():
        study, folders = study_data(target)
        data: Data = {
            "kind": "study",
            "title": study["title"] or study["name"] or target.resolve().name,
            "study": study,
        }
    elif (target / "config.yaml").is_file():
        run = run_data(target)
        data = {"kind": "run", "title": run["name"], "run": run}
        folders = [target]
    else:
        raise UserError(f"{target} is neither a run (it has no config.yaml) nor a study (it has no study.json).")
    output = output or target / "report.html"
    check_replaceable(output)
    page = render(data, [Chunks(folder) if folder else None for folder in folders], max_mb)
    write_atomically(output, page)
    return output


def check_replaceable(output: Path) -> None:
    """UserError unless the file does not exist or is an earlier report."""
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder. Give the name of a file.")
    if not output.parent.is_dir():
        raise UserError(f"--output: there is no folder {output.parent}. Make it, or choose another place.")
    if output.exists():
        with output.open("rb") as file:
            if GENERATOR.encode() not in file.read(1_000):
                raise UserError(f"{output} exists and is not a report of ours. Choose another --output.")


def render(data: Data, runs: list[Chunks | None], max_mb: float) -> str:
    """The page. `runs` are the rollouts of the run, or of each run of the study, in its order."""
    budget = max_mb * MEGABYTE
    fixed = len(page(data, []).encode())
    if fixed > budget:
        raise UserError(
            f"--max-mb {max_mb:g} is too small: without any rollouts the report has {fixed / MEGABYTE:.1f} MB."
        )
    waiting = sum(chunks is not None and bool(chunks.steps) for chunks in runs)
    room = 0.98 * (budget - fixed)
    blocks: list[tuple[str, str]] = []
    listing: list[Data] = []
    for i, chunks in enumerate(runs):
        steps: list[int] = []
        if chunks is not None and chunks.steps:
            # What one run does not need is left to those after it.
            steps = chunks.within(room / waiting)
            waiting -= 1
            room -= sum(len(chunks.chunk(step)) + 100 for step in steps)
            blocks += [(f"rollouts-{i}-{step}", chunks.chunk(step)) for step in steps]
        listing.append({"steps": steps, "of": len(chunks.steps) if chunks else 0})
    return page({**data, "rollouts": listing, "max_mb": max_mb}, blocks)


def page(data: Data, blocks: list[tuple[str, str]]) -> str:
    """The HTML with its data and the blocks of rollouts, each with the id of its element."""
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    require("`hacrl report`", "report", "plotly")
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs()
    policy = (
        f"default-src 'none'; script-src {script_hash(script)} {script_hash(plotly)}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    chunks = "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blocks)
    parts = {
        "GENERATOR": GENERATOR,
        "POLICY": policy,
        "STYLE": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "DATA": embedded(data),
        "ROLLOUTS": chunks,
        "PLOTLY": plotly,
        "SCRIPT": script,
    }
    # One pass over the template, so that nothing inside a part is taken for a place.
    pieces = (ASSETS / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def script_hash(script: str) -> str:
    """The name of an inline script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element: no character of it means anything to HTML."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
