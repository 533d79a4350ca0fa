"""`hacrl demo`: two agents learn together, by HACPO and by robust HACPO, and each alone, for the same rollouts."""

import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from hacrl.cli.common import Overrides
from hacrl.cli.common import console as terminal
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.live.summary import new_table
from hacrl.signs import doing

EVIDENCE = Path(__file__).parent / "demo_seeds.json"
"""Gain over GSPO of each agent and algorithm in `docs/results/demo.yaml`: the mean, and how many seeds are ahead."""
NO_EVIDENCE = "You changed the demo's settings; its results over five seeds hold for the original ones only."
NOT_COMPARED: dict[str, Any] = {
    **dict.fromkeys(("output_dir", "report_to", "seed", "device"), True),
    "agents": {"__all__": {"device": True}},
}
"""Settings that leave the evidence valid: it is of several seeds, and holds on a CPU and on a GPU."""

TITLES = {
    "gspo": "Alone: GSPO, each agent learns from its own rollouts",
    "hacpo": "Together: HACPO as published, each agent learns from the rollouts of both",
    "hacpo_robust": "Together: robust HACPO, each agent learns what both got right, also once more at the end",
}


def demo(
    output_dir: Annotated[str | None, Option(help="Default: the next free runs/demo-N.")] = None,
    overrides: Overrides = None,
) -> None:
    """Train two agents alone (GSPO) and together (HACPO, robust HACPO), and compare."""
    run_demo(terminal, output_dir, overrides or [])


def run_demo(console: Console, output_dir: str | None, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """Train with each algorithm in turn, print the comparison, and return the summaries by algorithm."""
    with doing("starting"):
        from hacrl.run import train

    numbered = (Path("runs") / f"demo-{number}" for number in itertools.count(1))
    base = Path(output_dir) if output_dir else next(path for path in numbered if not path.exists())
    if base.exists() and any(base.iterdir()):
        raise UserError(f"{base} is not empty. Choose another --output-dir.")
    started = time.monotonic()
    summaries, as_checked = {}, True
    for algorithm, title in TITLES.items():
        named = [f"algorithm.name={algorithm}", f"output_dir={base / algorithm}"]
        config = RunConfig.load("demo", [*overrides, *named])
        as_checked &= same_experiment(config, RunConfig.load("demo", named))
        console.rule(title, align="left")
        summaries[algorithm] = train(config, console=console, title=title).summary
    print_result(console, summaries, base, time.monotonic() - started, as_checked)
    return summaries


def same_experiment(config: RunConfig, checked: RunConfig) -> bool:
    """Whether the evidence for one config holds for the other."""
    return config.model_dump(exclude=NOT_COMPARED) == checked.model_dump(exclude=NOT_COMPARED)


def print_result(
    console: Console, summaries: dict[str, dict[str, Any]], base: Path, seconds: float, as_checked: bool
) -> None:
    from hacrl.live.progress import duration

    columns = ("agent", "start", "GSPO", "HACPO", "robust HACPO", "robust HACPO − GSPO", "rollouts of its own, each")
    table = new_table("Accuracy on held-out problems", *columns)
    for agent_id, alone in summaries["gspo"]["agents"].items():
        final = {name: summary["agents"][agent_id]["final_accuracy"] for name, summary in summaries.items()}
        accuracies = [f"{value:.3f}" for value in (alone["start_accuracy"], *final.values())]
        gain = f"{100 * (final['hacpo_robust'] - final['gspo']):+.1f} points"
        table.add_row(agent_id, *accuracies, gain, f"{alone['rollouts']:,}")
    console.print(table)
    spent = [f"{name} {summary['rollouts']:,}" for name, summary in summaries.items()]
    console.print(f"Rollouts sampled: {', '.join(spent)}. Time: {duration(seconds)}. Files: {base}", highlight=False)
    console.print(evidence() if as_checked else NO_EVIDENCE, highlight=False)
    hacrl = "hacrl" if shutil.which("hacrl") else os.path.relpath(Path(sys.executable).with_name("hacrl"))
    steps = [
        (f"{hacrl} report {base / 'hacpo_robust'}", "one page to look at: curves, who learned from whom, every answer"),
        (f"{hacrl} rollouts {base / 'hacpo_robust'} --prompt 0", "the answers to one prompt, here"),
        (f"{hacrl} eval {base / 'hacpo_robust'} --problems 5000", "measure again, on more problems"),
        (f"{hacrl} train team", "three agents with three tokenizers"),
        (f"{hacrl} train my.yaml", "your own models: README.md has a config to start from"),
    ]
    width = max(len(command) for command, _ in steps)
    console.print("\nNext:")
    for command, purpose in steps:
        console.print(f"  {command:<{width}}   {purpose}", highlight=False, soft_wrap=True)


def evidence() -> str:
    """One sentence on how far the gain holds over seeds."""
    data = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    seeds, titles = data["seeds"], {"hacpo": "HACPO", "hacpo_robust": "robust HACPO"}
    told = []
    for agent, gains in data["gains"].items():
        own = [f"{titles[name]} {100 * gain:+.1f} ({ahead} of {seeds} ahead)" for name, (gain, ahead) in gains.items()]
        told.append(f"{agent} {', '.join(own)}")
    return f"Checked over {seeds} seeds, mean gain over GSPO in points: {'; '.join(told)}."
