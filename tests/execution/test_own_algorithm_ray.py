"""An algorithm in a user's file reaches the agents' processes on Ray."""

from pathlib import Path

import pytest

from conftest import MakeConfig
from hacrl.run import train
from hacrl.training.run_dir import RunDir
from integration.test_resume import assert_equal_runs

MINE = """
from dataclasses import dataclass

from hacrl.algorithms import HACPO


@dataclass(frozen=True)
class Mine(HACPO):
    share: float = 0.5

    def mean_weights(self, source_N, learner):
        return self.share * super().mean_weights(source_N, learner)
"""


def test_it_computes_the_same_on_ray(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MINE)
    runs = {
        execution: train(
            make_config(
                algorithm={"name": "my.py:Mine", "share": 0.25},
                execution=execution,
                max_steps=1,
                output_dir=str(tmp_path / execution),
            )
        ).run_dir
        for execution in ("local", "ray")
    }
    assert_equal_runs(runs["ray"], runs["local"])
    assert RunDir(runs["ray"]).config().algorithm.name == f"{tmp_path}/my.py:Mine"
