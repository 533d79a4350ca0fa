"""When agents imitate, and which answers they keep."""

import pytest

from hacrl.algorithms import GSPO, RFT, Algorithm, Imitation


def schedule(algorithm: Algorithm, max_steps: int = 5) -> list[str]:
    """What happens in each step: (r)einforce, (k)eep answers, (i)mitate."""
    plan = []
    for step in range(1, max_steps + 1):
        happens = {
            "r": algorithm.reinforces(step, max_steps),
            "k": algorithm.keeps_answers(step, max_steps),
            "i": algorithm.imitation.due(step, max_steps),
        }
        plan.append("".join(letter for letter, does in happens.items() if does))
    return plan


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GSPO(), ["r", "r", "r", "r", "r"]),
        (GSPO(imitation=Imitation(when="end")), ["rk", "rk", "rk", "rk", "rki"]),
        (GSPO(imitation=Imitation(when="step")), ["rki"] * 5),
        (RFT(), ["rk", "rk", "rk", "rk", "rki"]),
        (RFT(reinforce="never"), ["k", "k", "k", "k", "ki"]),
        (RFT(reinforce="never", imitation=Imitation(when="step")), ["ki"] * 5),
        (RFT(reinforce="after", imitation=Imitation(when="middle")), ["k", "ki", "r", "r", "r"]),
        (RFT(reinforce="before"), ["r", "r", "k", "k", "ki"]),
    ],
    ids=str,
)
def test_the_schedule(algorithm: Algorithm, expected: list[str]) -> None:
    assert schedule(algorithm) == expected


@pytest.mark.parametrize("when", ["middle", "end"])
def test_a_run_of_one_step_imitates_once(when: str) -> None:
    assert schedule(RFT(imitation=Imitation(when=when)), 1) == ["rki"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, "epochs"),
        ({"rate": -1}, "rate"),
        ({"batch_size": 0}, "batch_size"),
        ({"memory": 0}, "memory"),
        ({"focus": -1}, "focus"),
        ({"confidence": 1001}, "confidence"),
        ({"min_reward": 1e10}, "1e"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Imitation(**options)


def test_rft_without_imitation_is_refused() -> None:
    with pytest.raises(ValueError, match="gspo"):
        RFT(imitation=Imitation())


def test_what_is_told() -> None:
    assert Imitation().sentence() is None
    told = RFT().imitation.sentence()
    assert told is not None
    assert "everybody's, with a reward of at least 1" in told
    assert "from the weights it began the run with" in told
    drawn = str(Imitation(when="step", memory=8, confidence=16, focus=1).sentence())
    assert "right answers of the last 8 steps" in drawn
    assert "2.5 times as many as the step added, drawn more often the surer their source was of them" in drawn
    assert "and the more often the agent itself failed the prompt, in updates of 64" in drawn
    assert "from the weights" not in str(Imitation(when="step", restart=True).sentence())
