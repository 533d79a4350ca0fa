"""`make demo`: the demo pair learns together with HACPO, and each alone with GSPO, for the same rollouts."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.training.progress import duration
from hacrl.training.run import train

EVIDENCE = Path(__file__).parent / "demo_seeds.json"
"""What `benchmarks/demo_seeds.py` found over several seeds."""

TITLES = {"gspo": "Alone: GSPO, every agent uses its own rollouts", "hacpo": "Together: HACPO, every agent uses both's"}


def run_demo(console: Console, output_dir: str | None, overrides: list[str]) -> dict[str, dict[str, Any]]:
    base = Path(output_dir) if output_dir else next_free(Path("runs"))
    if base.exists() and any(base.iterdir()):
        raise UserError(f"{base} is not empty. Choose another --output-dir.")
    started = time.monotonic()
    summaries = {}
    for algorithm, title in TITLES.items():
        config = RunConfig.load("demo", [*overrides, f"algorithm.name={algorithm}", f"output_dir={base / algorithm}"])
        console.rule(title, align="left")
        summaries[algorithm] = train(config, console=console, title=title).summary
    print_result(console, summaries, base, time.monotonic() - started)
    return summaries


def next_free(folder: Path) -> Path:
    number = 1
    while (folder / f"demo-{number}").exists():
        number += 1
    return folder / f"demo-{number}"


def print_result(console: Console, summaries: dict[str, dict[str, Any]], base: Path, seconds: float) -> None:
    alone, together = summaries["gspo"]["agents"], summaries["hacpo"]["agents"]
    table = Table(title="Accuracy on held-out problems", title_justify="left")
    for name in ("agent", "start", "alone (GSPO)", "together (HACPO)", "gain", "rollouts of its own, each"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent_id, agent in together.items():
        before, after = alone[agent_id]["final_accuracy"], agent["final_accuracy"]
        gain = f"{100 * (after - before):+.1f} points"
        accuracies = [f"{value:.3f}" for value in (agent["start_accuracy"], before, after)]
        table.add_row(agent_id, *accuracies, gain, f"{agent['rollouts']:,}")
    console.print(table)
    spent = [f"{name} {summary['rollouts']:,}" for name, summary in summaries.items()]
    console.print(f"Rollouts sampled: {', '.join(spent)}. Time: {duration(seconds)}. Files: {base}", highlight=False)
    console.print(evidence(), highlight=False)
    hacrl = "hacrl" if shutil.which("hacrl") else os.path.relpath(Path(sys.executable).with_name("hacrl"))
    steps = [
        (f"{hacrl} report {base / 'hacpo'}", "one page to look at: curves, who learned from whom, every answer"),
        (f"{hacrl} rollouts {base / 'hacpo'} --prompt 0", "the answers to one prompt, here"),
        (f"{hacrl} eval {base / 'hacpo'} --problems 5000", "measure again, on more problems"),
        (f"{hacrl} train team", "three agents with three tokenizers"),
        (f"{hacrl} train my.yaml", "your own models: README.md has a config to start from"),
    ]
    width = max(len(command) for command, _ in steps)
    console.print("\nNext:")
    for command, purpose in steps:
        console.print(f"  {command:<{width}}   {purpose}", highlight=False, soft_wrap=True)


def evidence() -> str:
    """One sentence on how far the gain holds over seeds."""
    if not EVIDENCE.is_file():
        return "This is one seed; the demo has not been checked over several."
    data = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    gains = [
        f"{agent} {100 * row['mean_gain']:+.1f} points ({row['seeds_ahead']} of {data['seeds']} seeds ahead)"
        for agent, row in data["agents"].items()
    ]
    return f"Checked over {data['seeds']} seeds, mean gain of HACPO over GSPO: {'; '.join(gains)}."
