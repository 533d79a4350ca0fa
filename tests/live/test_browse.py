"""`hacrl rollouts`: one group, so that a person can follow who answered what and what each learner made of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import MakeConfig
from hacrl.live.browse import show_rollouts
from hacrl.run import train
from hacrl.training.run_dir import RunDir, read_jsonl


def rollout(source: str, index: int, reward: float | None, text: str, **more: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "prompt_id": "p",
        "source": source,
        "index": index,
        "prompt": "12+34+5=",
        "text": text,
        "reward": reward,
        "finish_reason": "stop",
        "num_tokens": 4,
        "logp_sum": -1.0,
        **more,
    }


def use(advantage: float, ratio: float | None = None, kept: bool = True) -> dict[str, Any]:
    return {"advantage": advantage} | ({} if ratio is None else {"ratio": ratio, "kept": kept, "weight": 1.0})


GROUP = [
    rollout("plus", 0, 0.0, "50", learners={"plus": use(-1.5, 1.0), "minus": use(-0.5, 0.756, kept=False)}),
    rollout("plus", 1, 1.0, "51", learners={"plus": use(0.75, 0.999), "minus": {"dropped": "too_long"}}),
    rollout("plus", 2, 1.0, "051", learners={"plus": use(0.0), "minus": use(0.0)}),
    rollout("minus", 0, None, "?", finish_reason="length"),
    rollout("minus", 1, 0.0, "49", learners={"minus": use(-1.0, 1.0)}),
]


@pytest.fixture
def run(tmp_path: Path, make_config: MakeConfig) -> RunDir:
    run = RunDir.create(make_config(output_dir=str(tmp_path / "run")))
    run.write_step("rollouts", 1, GROUP)
    return run


def shown(run: RunDir, width: int = 120, terminal: bool = False, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    choice = {"step": None, "prompt": None, "agent": None, "limit": 3, **options}
    show_rollouts(console, run.path, **choice)
    return console.file.getvalue()


def test_one_group(run: RunDir) -> None:
    text = shown(run)
    lines = text.splitlines()
    assert "12+34+5=" in lines[1]
    table = [line for line in lines if line and line[0] not in "╭│╰"]
    assert [line.split() for line in table] == [
        ["plus", "minus"],
        ["#", "reward", "tokens", "logp/token", "ended", "A", "s", "kept", "A", "s", "kept", "text"],
        ["plus:", "2", "of", "3", "right"],
        ["1", "1", "4", "-0.250", "stop", "+0.75", "0.9990", "yes", "–", "–", "drop", "51"],
        ["2", "1", "4", "-0.250", "stop", "+0.00", "–", "–", "+0.00", "–", "–", "051"],
        ["0", "0", "4", "-0.250", "stop", "-1.50", "1.0000", "yes", "-0.50", "0.7560", "no", "50"],
        ["minus:", "0", "of", "2", "right,", "1", "not", "judged"],
        ["1", "0", "4", "-0.250", "stop", "–", "–", "–", "-1.00", "1.0000", "yes", "49"],
        ["0", "unverified", "4", "-0.250", "length", "–", "–", "–", "–", "–", "–", "?"],
    ]
    # Aligned: what stands to the right of a column ends where its heading ends.
    heading = table[1]
    for row in (table[3], table[4], table[5], table[7], table[8]):
        assert row[: heading.index("tokens") + 6].endswith(" 4")
        assert row[: heading.index("logp/token") + 10].endswith("-0.250")
        assert row[heading.index("text") :].strip() == row.split()[-1]


def test_other_rewards_have_a_mean(run: RunDir) -> None:
    run.write_step("rollouts", 1, [rollout("plus", i, r, "x") for i, r in enumerate((0.25, -0.5, 1.0, 0.25))])
    assert "plus: mean reward 0.25, 3 of 4 above 0" in shown(run)


def test_only_one_agent(run: RunDir) -> None:
    text = shown(run, agent="minus")
    assert "minus: 0 of 2 right" in text
    assert "plus:" not in text


def test_an_older_run_has_no_learners(run: RunDir) -> None:
    run.write_step("rollouts", 1, [rollout("plus", 0, 1.0, "51")])
    assert " kept" not in shown(run)
    assert "plus: 1 of 1 right" in shown(run)


def test_long_answers_stand_below_their_numbers(run: RunDir) -> None:
    words = " ".join(f"word{n}" for n in range(60))
    run.write_step("rollouts", 1, [*GROUP[:3], rollout("minus", 2, 1.0, f"first line\n{words}\nlast line")])
    text = shown(run, width=80)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert sum(f"word{n}" in text for n in range(60)) == 60
    place = lines.index("   first line")
    assert lines[place - 1].split()[:2] == ["2", "1"]
    assert "   last line" in lines


def test_learners_that_do_not_fit_a_terminal_are_named(run: RunDir) -> None:
    learners = {f"agent{k}": use(0.5, 0.9) for k in range(4)}
    run.write_step("rollouts", 1, [rollout("agent0", 0, 1.0, "51", learners=learners)])
    narrow = shown(run, width=80, terminal=True)
    assert "No room for what agent2, agent3 made of them" in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert shown(run, width=80).count("0.9000") == 4  # into a file or a pipe: all of them


def test_json_is_what_the_file_holds(run: RunDir) -> None:
    nasty = rollout("plus", 0, 1.0, '\x1b[31m \x9b2J \u202e \u2028 [red]:smile:[/red] 🦙 \\u0041 " \n')
    run.write_step("rollouts", 1, [*GROUP, {**nasty, "prompt_id": "q"}])
    text = shown(run, width=20, as_json=True)
    assert not any(character in text for character in "\x1b\x9b\u202e\u2028")
    assert [json.loads(line) for line in text.splitlines()] == read_jsonl(run.step_file("rollouts", 1))
    second = shown(run, as_json=True, prompt=1)
    assert [json.loads(line)["prompt_id"] for line in second.splitlines()] == ["q"]
    own = shown(run, as_json=True, prompt=0, agent="minus")
    assert [json.loads(line) for line in own.splitlines()] == GROUP[3:]


def test_a_real_run_shows_what_each_learner_did(make_config: MakeConfig) -> None:
    run = RunDir(train(make_config(max_steps=1), console=Console(file=io.StringIO())).run_dir)
    text = shown(run, width=200, limit=4)
    used = [u for line in read_jsonl(run.step_file("rollouts", 1)) for u in line["learners"].values() if "ratio" in u]
    assert used
    for line in used:
        assert f"{line['advantage']:+.2f}  {line['ratio']:.4f}" in text
