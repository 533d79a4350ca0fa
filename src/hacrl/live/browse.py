"""The rollouts of a run, for a person to read."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from hacrl.errors import CONTROL, UserError, harmless
from hacrl.tasks.problem import Prompt
from hacrl.training.files import each_line
from hacrl.training.records import ROLLOUT
from hacrl.training.run_dir import RunDir

MAX_CHARACTERS = 2_000
GAP = "  "
UNKNOWN: dict[str, Any] = {"index": 0, "reward": None, "num_tokens": 0, "logp_sum": None, "finish_reason": "–"}
"""What is shown of a rollout that does not say it."""
USES = ("A", "s", "kept")
"""What is shown of a learner's use of a rollout: advantage, ratio, and whether it was kept."""


def show_rollouts(
    console: Console,
    run_path: Path,
    step: int | None,
    prompt: int | None,
    agent: str | None,
    limit: int,
    as_json: bool = False,
) -> None:
    run = RunDir.open(run_path)
    steps = run.steps("rollouts")
    if not steps:
        raise UserError(f"{run_path} has no rollouts yet.")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{run_path} has no rollouts of step {step}; there are steps {steps[0]} to {steps[-1]}.")
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for text, line in each_line(run.step_file("rollouts", step), ROLLOUT):
        name = line.get("prompt_id", str(line["prompt"]))
        groups.setdefault(name, []).append((text, UNKNOWN | line))
    if not groups:
        raise UserError(f"{run.step_file('rollouts', step)} is empty. Choose another --step.")
    if agent is not None and agent not in {line["source"] for group in groups.values() for _, line in group}:
        raise UserError(f"{run_path} has no agent {agent}.")
    names = list(groups)
    if prompt is not None:
        if not 0 <= prompt < len(names):
            raise UserError(f"Step {step} has prompts 0 to {len(names) - 1}, not {prompt}.")
        names = [names[prompt]]
    for name in names[:limit]:
        shown = [(text, line) for text, line in groups[name] if agent in (None, line["source"])]
        if as_json:
            for text, _ in shown:
                console.print(Text(CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)), soft_wrap=True)
        elif shown:
            _show_group(console, step, list(groups).index(name), [line for _, line in shown])
    if len(names) > limit and not as_json:
        console.print(f"{len(names) - limit} more prompts: --prompt N or --limit N.")


def _show_group(console: Console, step: int, position: int, group: list[dict[str, Any]]) -> None:
    """The prompt, then the answers of one source after the other, right ones first."""
    title = f"step {step}, prompt {position}"
    console.print(Panel(prompt_text(group[0]["prompt"]), title=title, title_align="left"))
    by_source: dict[str, list[dict[str, Any]]] = {}
    learners: dict[str, None] = {}
    for line in group:
        by_source.setdefault(line["source"], []).append(line)
        learners |= dict.fromkeys(line.get("learners", {}))
    for lines in by_source.values():
        lines.sort(key=lambda line: (line["reward"] is None, -(line["reward"] or 0), line["index"]))
    rows = {source: [_cells(line, list(learners)) for line in lines] for source, lines in by_source.items()}
    header = ["#", "reward", "tokens", "logp/token", "ended", *(name for _ in learners for name in USES)]
    every = [header, *(cells for own in rows.values() for cells in own)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]

    fitting = len(learners)
    while console.is_terminal and fitting and _width(widths, fitting) > console.width:
        fitting -= 1
    used = 5 + len(USES) * fitting
    room = console.width - _width(widths, fitting) - len(GAP)
    texts = [_text(line) for line in group]
    beside = all("\n" not in text.plain and text.cell_len <= room for text in texts)
    if learners:
        # Each name stands over the columns of its learner; a long one is cut.
        spans = [_width(widths[5 + 3 * k : 8 + 3 * k], 0, 3) for k in range(fitting)]
        over = [name[:span].ljust(span) for name, span in zip(map(_plain, learners), spans, strict=False)]
        console.print(_line([" " * _width(widths, 0), *over], [0] * (1 + fitting), "dim"), soft_wrap=True)
    console.print(_line([*header[:used], "text" if beside else ""], widths[:used], "dim"), soft_wrap=True)
    for source, lines in by_source.items():
        console.print(Text.assemble((_plain(source), "bold"), f": {_summary(lines)}"), soft_wrap=True)
        for line, cells in zip(lines, rows[source], strict=True):
            reward = line["reward"]
            row = _line(cells[:used], widths[:used])
            start = widths[0] + len(GAP)
            row.stylize("yellow" if reward is None else "green" if reward > 0 else "red", start, start + widths[1])
            if beside:
                console.print(row.append(GAP).append_text(_text(line)), soft_wrap=True)
            else:
                console.print(row, soft_wrap=True)
                console.print(Padding(_text(line), (0, 0, 0, widths[0] + len(GAP))))
    if fitting < len(learners):
        missing = ", ".join(map(_plain, list(learners)[fitting:]))
        hint = f"No room for what {missing} made of them: make the terminal wider, or use --json."
        console.print(Text(hint), style="dim")
    console.print()


def _cells(line: dict[str, Any], learners: list[str]) -> list[str]:
    cells = [
        str(line["index"]),
        "unverified" if line["reward"] is None else f"{line['reward']:g}",
        str(line["num_tokens"]),
        "–" if line["logp_sum"] is None else f"{line['logp_sum'] / max(line['num_tokens'], 1):.3f}",
        _plain(str(line["finish_reason"])),
    ]
    for learner in learners:
        use = line.get("learners", {}).get(learner, {})
        advantage, ratio, kept = use.get("advantage"), use.get("ratio"), use.get("kept")
        cells.append("–" if advantage is None else f"{advantage:+.2f}")
        cells.append("–" if ratio is None else f"{ratio:.4f}")
        cells.append("drop" if "dropped" in use else "–" if kept is None else "yes" if kept else "no")
    return cells


def _width(widths: list[int], learners: int, first: int = 5) -> int:
    """Columns of the terminal that the first cells and those of so many learners take."""
    taken = widths[: first + len(USES) * learners]
    return sum(taken) + len(GAP) * (len(taken) - 1)


def _line(cells: list[str], widths: list[int], style: str = "") -> Text:
    aligned = [cell.rjust(width) for cell, width in zip(cells, [*widths, 0], strict=False)]
    return Text(GAP.join(aligned).rstrip(), style=style)


def _summary(lines: list[dict[str, Any]]) -> str:
    """How many of a source's answers are right."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    right = sum(reward > 0 for reward in rewards)
    if set(rewards) <= {0, 1}:
        text = f"{right} of {len(lines)} right"
    else:
        text = f"mean reward {sum(rewards) / len(rewards):.3g}, {right} of {len(lines)} above 0"
    return text if len(rewards) == len(lines) else f"{text}, {len(lines) - len(rewards)} not judged"


def _text(line: dict[str, Any]) -> Text:
    return shortened(line["text"] if "detail" not in line else f"{line['text']} ({line['detail']})")


def _plain(text: str) -> str:
    return shortened(text).plain


def prompt_text(prompt: Prompt) -> Text:
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return shortened(prompt)


def shortened(text: str) -> Text:
    """Model text as plain text: no markup, no control codes, not endless."""
    shown = harmless(text[:MAX_CHARACTERS])
    return Text(shown + (f" … ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""))
