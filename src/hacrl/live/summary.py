"""The table at the end of a run, with what was wrong with its learning."""

from pathlib import Path
from typing import Any

from rich.console import Console

from hacrl.terminal import decimals, new_table, note, say


def print_summary(console: Console, run_dir: Path, summary: dict[str, Any], *, already_finished: bool = False) -> None:
    """What a run has reached, what that has cost, and what was wrong with its learning."""
    from hacrl.live.progress import duration, wall_seconds
    from hacrl.training.health import findings
    from hacrl.training.run_dir import RunDir

    if already_finished:
        say(console, f"{run_dir} is already finished: {summary['steps']} steps. Nothing to do.")
    counted = ("rollouts", "updates", "unverified", "dropped")
    title = f"{summary.get('algorithm')}, {summary['steps']} steps"
    table = new_table(title, "agent", "start", "final", *counted)
    for agent_id, agent in summary["agents"].items():
        accuracies = [decimals(agent.get(name)) for name in ("start_accuracy", "final_accuracy")]
        table.add_row(agent_id, *accuracies, *(f"{agent.get(name, 0):,}" for name in counted))
    console.print(table)
    for source, given in summary.get("sources", {}).items():
        say(console, source_sentence(source, given))
    run = RunDir(run_dir)
    for finding in findings(run.config(), run.metrics()):
        note(console, finding)
    lines = f"Time: {duration(wall_seconds(summary))}\nRun: {run_dir}   look at it with: hacrl rollouts {run_dir}"
    say(console, lines)


def source_sentence(source: str, given: dict[str, Any]) -> str:
    """What a source that is no agent has given and used in a run."""
    from hacrl.live.progress import UNANSWERED

    sentence = f"Source {source}: {given.get('rollouts', 0):,} rollouts"
    if "requests" in given:
        tokens = given["prompt_tokens"] + given["answer_tokens"]
        sentence += f" from {given['requests']:,} requests with {tokens:,} tokens"
    lost = [f"{given[way]:,} {way.replace('_', ' ')}" for way in UNANSWERED if given.get(way)]
    return f"{sentence}; {', '.join(lost)}." if lost else f"{sentence}."
