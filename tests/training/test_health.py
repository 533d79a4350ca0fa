"""The warning when collaboration is idle or harmful."""

from typing import Any

import pytest

from hacrl.algorithms import FTIS, HACPO, Algorithm, RobustHACPO, Swarm
from hacrl.config import RunConfig
from hacrl.run import train
from hacrl.training.health import WINDOW, CollaborationCheck


def step(kept: float | None = 0.5, cosine: float | None = 0.1, dropped: int = 0) -> dict[str, Any]:
    metrics: dict[str, Any] = {"a/from_b/dropped": dropped}
    if kept is not None:
        metrics |= {"a/from_b/kept": kept, "a/from_b/ratio_mean": 0.52, "a/from_b/lower_mean": 0.8}
        metrics["a/from_b/upper_mean"] = 1.0
    if cosine is not None:
        metrics["a/grad_cosine"] = cosine
    return metrics


def said(steps: list[dict[str, Any]], algorithm: Algorithm | None = None) -> list[str]:
    check = CollaborationCheck(["a", "b"], algorithm or HACPO())
    return [text for metrics in steps for text in check.warnings(metrics)]


def test_nothing_is_said_of_a_run_that_shares() -> None:
    assert said([step()] * 50) == []


def test_idle_is_said_once_with_the_reason() -> None:
    (text,) = said([step()] * 5 + [step(kept=0.0, cosine=None)] * 30)
    assert "agent a has used none of the others' rollouts" in text
    assert "b: mean s 0.52, band 0.80 to 1.00" in text


def test_one_kept_rollout_in_the_window_is_not_idle() -> None:
    steps = [step(kept=0.1 if n % WINDOW == 0 else 0.0, cosine=None) for n in range(50)]
    assert said(steps) == []


def test_without_anything_to_learn_from_it_is_not_idle() -> None:
    assert said([step(kept=None, cosine=None)] * 30) == []


def test_what_cannot_be_read_makes_it_idle() -> None:
    (text,) = said([step(kept=None, cosine=None, dropped=7)] * 30)
    assert "b: 7 rollouts it cannot read" in text


def test_opposed_gradients_are_said_once() -> None:
    (text,) = said([step(cosine=-0.2)] * 30)
    assert "pointed against its own (mean cosine -0.20)" in text
    assert said([step(cosine=0.2 if n % 2 else -0.25) for n in range(40)]) == []


def test_advice_is_what_the_algorithm_has() -> None:
    idle, opposed = [step(kept=None, cosine=None, dropped=7)] * WINDOW, [step(cosine=-0.2)] * WINDOW
    for algorithm, band, weight in ((HACPO(), True, True), (RobustHACPO(), False, True), (Swarm(), False, False)):
        assert ("hacpo_robust" in said(idle, algorithm)[0]) == band
        assert ("cross_weight" in said(opposed, algorithm)[0]) == weight


def test_a_band_is_named_where_there_is_one() -> None:
    far = step(kept=0.0, cosine=None) | {"a/from_b/lower_mean": 0.0, "a/from_b/upper_mean": float("inf")}
    (text,) = said([far] * WINDOW, FTIS())
    assert "b: mean s 0.52). A foreign rollout with A < 0 is left out where" in text
    assert "band" not in text
    (text,) = said([step(kept=0.0, cosine=None)] * WINDOW, HACPO())
    assert "A foreign rollout teaches only inside its band: where s lies between" in text


def test_an_idle_run_warns(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A band so narrow that no foreign rollout is in it."""
    config = RunConfig.load(
        "state",
        [
            f"output_dir={tmp_path / 'run'}",
            f"max_steps={WINDOW}",
            "prompts_per_step=4",
            "task.eval_size=1",
            "eval_every=0",
            "save_every=0",
            "algorithm.name=hacpo",
            "algorithm.delta=0.000001",
            "algorithm.delta_step=0",
        ],
    )
    train(config)
    assert sum("Collaboration is idle" in record.message for record in caplog.records) == 2
