"""The rollouts of a run, for a person to read."""

import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hacrl.errors import UserError
from hacrl.training.run_dir import RunDir, read_jsonl

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, changes colours or turns the direction of the text."""
MAX_CHARACTERS = 2_000


def show_rollouts(
    console: Console, run_path: Path, step: int | None, prompt: int | None, agent: str | None, limit: int
) -> None:
    run = RunDir.open(run_path)
    steps = run.steps("rollouts")
    if not steps:
        raise UserError(f"{run_path} has no rollouts yet.")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{run_path} has no rollouts of step {step}; there are steps {steps[0]} to {steps[-1]}.")
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in read_jsonl(run.step_file("rollouts", step)):
        groups.setdefault(line["prompt_id"], []).append(line)
    if agent is not None and agent not in {line["source"] for group in groups.values() for line in group}:
        raise UserError(f"{run_path} has no agent {agent}.")
    names = list(groups)
    if prompt is not None:
        if not 0 <= prompt < len(names):
            raise UserError(f"Step {step} has prompts 0 to {len(names) - 1}, not {prompt}.")
        names = [names[prompt]]
    for name in names[:limit]:
        _show_group(console, step, list(groups).index(name), groups[name], agent)
    if len(names) > limit:
        console.print(f"{len(names) - limit} more prompts: --prompt N or --limit N.")


def _show_group(console: Console, step: int, position: int, group: list[dict[str, Any]], agent: str | None) -> None:
    prompt = group[0]["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    console.print(Panel(harmless(prompt), title=f"step {step}, prompt {position}", title_align="left"))
    table = Table(show_lines=False)
    for name in ("source", "reward", "tokens", "logp/token", "ended", "text"):
        table.add_column(name, justify="left" if name in ("source", "text") else "right")
    for line in group:
        if agent is None or line["source"] == agent:
            reward = line["reward"]
            colour = "yellow" if reward is None else "green" if reward > 0 else "red"
            table.add_row(
                Text(line["source"]),
                Text("unverified" if reward is None else f"{reward:g}", style=colour),
                str(line["num_tokens"]),
                f"{line['logp_sum'] / max(line['num_tokens'], 1):.3f}",
                line["finish_reason"],
                harmless(line["text"] if "detail" not in line else f"{line['text']} ({line['detail']})"),
            )
    console.print(table)


def harmless(text: str) -> Text:
    """Model text as plain text: no markup, no control codes, not endless."""
    shown = CONTROL.sub(lambda match: ascii(match.group())[1:-1], text[:MAX_CHARACTERS])
    return Text(shown + (f" … ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""))
