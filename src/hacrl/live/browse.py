"""Prints the rollouts of a run for a person to read: `hacrl rollouts`."""

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from hacrl.errors import CONTROL, UserError, harmless
from hacrl.files import Line, each_line
from hacrl.rollouts.lines import ROLLOUT
from hacrl.tasks.problem import Prompt
from hacrl.training.run_dir import RunDir

MAX_CHARACTERS = 2_000
GAP = "  "
UNKNOWN: Line = {"index": 0, "reward": None, "num_tokens": 0, "logp_sum": None, "finish_reason": "–"}
"""Fields that rollouts of earlier versions may lack, as they are shown."""
OWN = ("#", "reward", "tokens", "logp/token", "ended")
"""Columns about the rollout itself."""
USES = ("A", "s", "kept")
"""Columns about each learner's use of it: advantage, ratio, and whether it was kept."""


def show_rollouts(
    console: Console,
    run_path: Path,
    step: int | None,
    prompt: int | None,
    agent: str | None,
    limit: int,
    as_json: bool = False,
) -> None:
    """Print the rollouts of a step, the newest unless one is given, prompt by prompt; `limit` prompts at most."""
    run = RunDir.open(run_path)
    steps = run.steps("rollouts")
    if not steps:
        raise UserError(f"{run_path} has no rollouts yet.")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{run_path} has no rollouts of step {step}; there are steps {steps[0]} to {steps[-1]}.")
    groups: dict[str, list[tuple[str, Line]]] = {}
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


def _show_group(console: Console, step: int, position: int, group: list[Line]) -> None:
    """Print the prompt, then the answers of one source after the other, right ones first."""
    console.print(Panel(prompt_text(group[0]["prompt"]), title=f"step {step}, prompt {position}", title_align="left"))
    learners = list(dict.fromkeys(name for line in group for name in line.get("learners", {})))
    rows: dict[str, list[tuple[Line, list[str]]]] = {line["source"]: [] for line in group}
    for line in sorted(group, key=lambda line: (line["reward"] is None, -(line["reward"] or 0), line["index"])):
        rows[line["source"]].append((line, _cells(line, learners)))
    header = [*OWN, *USES * len(learners)]
    every = [header, *(cells for own in rows.values() for _, cells in own)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    fitting = len(learners)
    while console.is_terminal and fitting and _width(widths[: len(OWN) + len(USES) * fitting]) > console.width:
        fitting -= 1
    widths = widths[: len(OWN) + len(USES) * fitting]
    room = console.width - _width(widths) - len(GAP)
    texts = [_text(line) for line in group]
    beside = all("\n" not in text.plain and text.cell_len <= room for text in texts)
    if learners:
        console.print(_names(learners[:fitting], widths), soft_wrap=True)
    console.print(Text(_row(header, widths) + (f"{GAP}text" if beside else ""), style="dim"), soft_wrap=True)
    for source, own in rows.items():
        total = _summary([line for line, _ in own])
        console.print(Text.assemble((_plain(source), "bold"), f": {total}"), soft_wrap=True)
        for line, cells in own:
            _show_rollout(console, line, Text(_row(cells, widths)), widths, beside)
    if fitting < len(learners):
        missing = ", ".join(map(_plain, learners[fitting:]))
        hint = f"No room for what {missing} made of them: make the terminal wider, or use --json."
        console.print(Text(hint), style="dim")
    console.print()


def _cells(line: Line, learners: list[str]) -> list[str]:
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


def _show_rollout(console: Console, line: Line, row: Text, widths: list[int], beside: bool) -> None:
    """Print the figures of a rollout, with its text beside them or below."""
    reward, start = line["reward"], widths[0] + len(GAP)
    row.stylize("yellow" if reward is None else "green" if reward > 0 else "red", start, start + widths[1])
    if beside:
        console.print(row.append(GAP).append_text(_text(line)), soft_wrap=True)
    else:
        console.print(row, soft_wrap=True)
        console.print(Padding(_text(line), (0, 0, 0, start)))


def _names(learners: list[str], widths: list[int]) -> Text:
    """The names of learners over their columns; long ones are cut."""
    names = [" " * _width(widths[: len(OWN)])]
    for k, name in enumerate(map(_plain, learners)):
        first = len(OWN) + len(USES) * k
        span = _width(widths[first : first + len(USES)])
        names.append(name[:span].ljust(span))
    return Text(GAP.join(names).rstrip(), style="dim")


def _width(widths: list[int]) -> int:
    """How wide neighbouring columns are together."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _row(cells: list[str], widths: list[int]) -> str:
    """Cells in columns of these widths; those that have no column are left out."""
    return GAP.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))


def _summary(lines: list[Line]) -> str:
    """How many of a source's answers are right."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    right = sum(reward > 0 for reward in rewards)
    if set(rewards) <= {0, 1}:
        text = f"{right} of {len(lines)} right"
    else:
        text = f"mean reward {sum(rewards) / len(rewards):.3g}, {right} of {len(lines)} above 0"
    return text if len(rewards) == len(lines) else f"{text}, {len(lines) - len(rewards)} not judged"


def _text(line: Line) -> Text:
    return shortened(line["text"] if "detail" not in line else f"{line['text']} ({line['detail']})")


def _plain(text: str) -> str:
    return shortened(text).plain


def prompt_text(prompt: Prompt) -> Text:
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return shortened(prompt)


def shortened(text: str) -> Text:
    """Text of a model as it can be shown: without markup and control codes, and not too long."""
    shown = harmless(text[:MAX_CHARACTERS])
    return Text(shown + (f" … ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""))
