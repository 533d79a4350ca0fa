"""Warnings when there is nothing to learn, and when collaboration is idle or harmful."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hacrl.algorithms import FTIS, GSPO, HACPO, OPD, Algorithm, RobustHACPO, Swarm
from hacrl.config import RunConfig
from hacrl.rollouts import retokenize
from hacrl.run import train
from hacrl.training.health import FEW, REMEDIES, WINDOW, Health, findings
from hacrl.training.run_dir import RunDir


def step(kept: float | None = 0.5, cosine: float | None = 0.1, dropped: int = 0) -> dict[str, Any]:
    metrics: dict[str, Any] = {"a/from_b/dropped": dropped}
    if kept is not None:
        metrics |= {"a/from_b/kept": kept, "a/from_b/ratio_mean": 0.52, "a/from_b/lower_mean": 0.8}
        metrics["a/from_b/upper_mean"] = 1.0
    if cosine is not None:
        metrics["a/grad_cosine"] = cosine
    return metrics


def config_of(algorithm: Algorithm | None = None, **changes: Any) -> RunConfig:
    agents = [{"id": name, "model": "zoo:llama-plus"} for name in ("a", "b")]
    data = {"algorithm": algorithm or HACPO(), "agents": agents, "task": {"name": "arithmetic"}, "prompts_per_step": 4}
    return RunConfig.from_dict({**data, "num_generations": 4, "max_completion_length": 64, **changes})


def said(steps: list[dict[str, Any]], algorithm: Algorithm | None = None) -> list[str]:
    health = Health(config_of(algorithm))
    return [text for metrics in steps for text in health.warnings(metrics)]


def test_nothing_is_said_of_a_run_that_shares() -> None:
    assert said([step()] * 50) == []


def test_idle_is_said_once_with_the_reason() -> None:
    (text,) = said([step()] * 5 + [step(kept=0.0, cosine=None)] * 30)
    assert "agent a has used none of the others' rollouts" in text
    assert "b: mean s 0.52, band 0.80 to 1.00" in text


def test_rollouts_without_a_reward_are_told_with_the_reasons() -> None:
    counts = {"a/unverified": 16, "a/verifier_timeouts": 5, "a/verifier_errors": 0, "b/unverified": 7}
    (text,) = said([{**step(), **counts}] * 30)
    assert text == (
        "In the last 5 steps 100 % of the rollouts of agent a got no reward and were left out: the function took too "
        "long: raise task.reward_timeout or task.reward_call_timeout (25); every function returned None (55)."
    )
    assert len(findings(config_of(), [{**step(), **counts, "step_time": 1.0}])) == 1


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


# --- nothing to learn ----------------------------------------------------------------------------------


def learning(
    reward: float = 0.5, equal: float = 0.5, clipped: float = 0.1, others_equal: float = 0.5, **more: Any
) -> dict[str, Any]:
    own = {"a/reward": reward, "a/frac_reward_zero_std": equal, "a/completions/clipped_ratio": clipped}
    return {"step_time": 1.0, "b/reward": 0.5, "b/frac_reward_zero_std": others_equal, **own, **more}


def test_a_healthy_run_is_quiet() -> None:
    steps = [learning(equal=0.85, clipped=0.45, **{"a/from_b/dropped/too_long": 7})] * 50
    for algorithm in (GSPO(), HACPO()):
        assert said(steps, algorithm) == []
    assert findings(config_of(), steps) == ["Agent a dropped 350 of b (too_long: raise its max_completion_length)."]
    assert findings(config_of(), [learning(**{"a/from_b/dropped/empty": n == 0}) for n in range(50)]) == [
        "Agent a dropped 1 of b (empty)."
    ]


def test_rewards_that_are_all_the_same_are_said_once_after_the_first_steps() -> None:
    nothing = [learning(reward=0.0, equal=1.0)] * 30
    assert said(nothing[: FEW - 1], GSPO()) == []
    (text,) = said(nothing, GSPO())
    assert text.startswith("In the last 5 steps every rollout of agent a had the reward 0, so it learned nothing.")
    assert "easier problems, a curriculum or more num_generations (now 4)" in text
    (text,) = said([learning(reward=1.0, equal=1.0)] * 30, GSPO())
    assert "had the reward 1, so it learned nothing" in text
    assert "take harder problems" in text
    assert "easier" not in text
    (text,) = findings(config_of(GSPO()), nothing)
    assert text.startswith("In all 30 steps every rollout of agent a had the reward 0")


def test_groups_without_spread() -> None:
    (text,) = said([learning(reward=0.01 * n, equal=0.95) for n in range(FEW)], GSPO())
    assert "95 % of the groups of agent a had equal rewards, which teach nothing (mean reward 0.020)" in text


def test_what_others_found_teaches_too() -> None:
    alone = [learning(reward=0.0, equal=1.0)] * FEW
    assert said(alone, HACPO()) == []
    assert len(said(alone, GSPO())) == 1
    both = learning(reward=0.0, equal=1.0, others_equal=1.0, **{"b/reward": 0.0})
    assert len(said([both] * FEW, HACPO())) == 2
    assert said([both | {"b/reward": 1.0}] * FEW, HACPO()) == []
    assert said([both] * FEW, OPD()) == []  # teachers' scores teach
    assert said([both | {f"{name}/imitation/tokens": 9.0 for name in ("a", "b")}] * FEW, HACPO()) == []


def test_completions_that_are_cut_off() -> None:
    (text,) = said([learning(clipped=0.8)] * 30)
    assert "80 % of the completions of agent a were cut off. Raise max_completion_length (now 64)." in text
    (text,) = findings(config_of(), [learning(clipped=0.8)] * 3)
    assert text.startswith("In all 3 steps 80 % of the completions")


def test_rollouts_that_are_dropped_with_the_reason() -> None:
    (text,) = said([learning(**{"a/from_b/dropped/unopened_block": 12, "a/from_b/dropped": 12})] * FEW)
    assert "agent a could not use most of the others' rollouts: 60 of b (unopened_block: only one of the" in text
    assert said([learning(**{"a/from_b/dropped/unopened_block": 4, "a/from_b/dropped": 4})] * FEW) == []


def test_every_reason_has_a_remedy() -> None:
    source = Path(retokenize.__file__).read_text(encoding="utf-8")
    assert {*re.findall(r'Dropped\("(\w+)"\)', source), "truncated"} == REMEDIES.keys()


def test_a_run_with_nothing_to_learn_says_so(tmp_path: Path) -> None:
    """A model that cannot end its answers in so few tokens: all are cut off and wrong."""
    settings = ["max_completion_length=1", f"max_steps={FEW + 2}", "prompts_per_step=2", "task.eval_size=1"]
    settings += ["algorithm.name=gspo", "eval_every=0", "save_final=false", f"output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "hacrl.cli", "train", "state", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    in_all, step = f"note In all {FEW + 2} steps", f"Step {FEW}: In the last {FEW} steps"
    for agent in RunDir(tmp_path / "run").config().agents:
        for trouble in (f"every rollout of agent {agent.id} had the reward 0", f"agent {agent.id} were cut off"):
            for text, before in ((done.stderr, step), (done.stdout, in_all)):
                (line,) = [line for line in text.splitlines() if trouble in line]
                assert line.startswith(before)
