"""The example of stored rollouts, with fewer and smaller steps: the small model learns from the large one's answers."""

from pathlib import Path

import pytest

from hacrl.config import RunConfig
from hacrl.rollouts.lines import read_rollouts
from hacrl.run import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "stored"
SHORT = ["max_steps=2", "prompts_per_step=8", "rollouts_per_update=32", "log_kl=false"]


def test_the_two_runs(tmp_path: Path) -> None:
    yesterday, today = tmp_path / "yesterday", tmp_path / "today"
    train(RunConfig.load(str(EXAMPLE / "yesterday.yaml"), [*SHORT, f"output_dir={yesterday}", "task.eval_size=2"]))
    source = f"sources.past.rollouts={yesterday}"
    summary = train(RunConfig.load(str(EXAMPLE / "today.yaml"), [*SHORT, f"output_dir={today}", source])).summary
    assert summary["agents"]["small"]["start_accuracy"] == pytest.approx(0.414, abs=0.005)
    stored, given = (
        {
            (str(line["prompt"]), line["text"], line["reward"], round(line["logp_sum"], 6))
            for step in (1, 2)
            for line in read_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl")
            if line["source"] == source
        }
        for run, source in ((yesterday, "large"), (today, "past"))
    )
    assert given == stored
    assert summary["sources"]["past"]["rollouts"] == 64
