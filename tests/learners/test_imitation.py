"""Supervised updates on right answers, against plain transformers and plain torch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import FAST
from hacrl.agents.agent import Agent
from hacrl.algorithms import GSPO, Imitation
from hacrl.config import AgentConfig
from hacrl.learners.lesson import Lesson
from hacrl.learners.supervised import Imitator, Row
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask

PROBLEMS = ArithmeticTask().train(0, 3)
RATE = 1e-3


def make_agent(model: str, index: int = 0, **imitation: Any) -> Agent:
    # A large epsilon: Adam's own division would make much of rounding.
    settings: dict[str, Any] = {"num_generations": 4, "max_completion_length": 40, "adam_epsilon": 1e-3, "fast": FAST}
    config = AgentConfig(id=f"agent{index}", model=f"zoo:{model}", log_kl=False, **settings)
    return Agent(config, index, GSPO(imitation=Imitation(**imitation)), seed=0)


def lesson_of(rollouts: list[Rollout], step: int = 1, imitates: bool = True) -> Lesson:
    """Nothing to reinforce, all rollouts to keep."""
    ones_N = torch.ones(0, dtype=torch.float64)
    prompts = [problem.prompt for problem in PROBLEMS]
    return Lesson(step, prompts, [], ones_N, ones_N, [], 0.0, rollouts, imitates, RATE)


def weights_of(agent: Agent) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in agent.model.parameters()]


def finetuned_plainly(model: str, batches: list[list[Row]], rates: list[float]) -> list[Tensor]:
    """The same updates with transformers and torch alone, one row after the other."""
    agent = make_agent(model)
    plain = agent.model.float()
    optimizer = torch.optim.AdamW(plain.parameters(), eps=1e-3, weight_decay=0.0)
    for rows, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        tokens = sum(len(row.completion) for row in rows)
        for row in rows:
            ids = torch.tensor([row.prompt + row.completion])
            logp = plain(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
            loss = -logp[range(len(row.completion)), row.completion].sum() / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    return weights_of(agent)


def assert_close(weights: list[Tensor], expected: list[Tensor]) -> None:
    for own, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("restart", [False, True])
def test_imitation_is_plain_fine_tuning_on_the_answers(restart: bool) -> None:
    """Own and foreign ones, in passes whose learning rate falls; with `restart` from the first weights."""
    options = {"when": "end", "epochs": 2.0, "batch_size": 8, "rate": 3.0, "restart": restart}
    agent, other = make_agent("llama-plus", **options), make_agent("neox-pair", 1)
    rollouts = agent.sample(PROBLEMS, 1, 0) + other.sample(PROBLEMS, 1, 0)
    before = weights_of(agent)
    if restart:  # what the run has learned is given up
        with torch.no_grad():
            for parameter in agent.model.parameters():
                parameter.add_(0.1)
    result = agent.learn(lesson_of(rollouts))
    rows = [answer.row for answer in agent.imitator.answers]
    assert len(rows) == 24
    assert rows[0] == Row(agent.reader.render(PROBLEMS[0].prompt), rollouts[0].token_ids)
    assert agent.imitator.answers[-1].logp == pytest.approx(rollouts[-1].logp_sum / len(rows[-1].completion))
    texts = [agent.reader.tokenizer.decode(row.completion[:-1]) for row in rows[12:]]
    assert texts == [rollout.text for rollout in rollouts[12:]]
    batches = agent.imitator._batches(1)
    assert [len(batch) for batch in batches] == [8] * 6
    expected = finetuned_plainly("llama-plus", batches, [6 / 100 * 3 * RATE * (1 - n / 6) for n in range(6)])
    assert_close(weights_of(agent), expected)
    assert not torch.equal(weights_of(agent)[0], before[0])
    assert (result.metrics["imitation/answers"], result.metrics["imitation/updates"]) == (24, 6)
    assert result.metrics["imitation/tokens"] == 2 * sum(len(row.completion) for row in rows)


def test_each_pass_has_all_answers_in_another_order() -> None:
    imitator = Imitator(make_agent("llama-plus").learner, Imitation(epochs=2.5, batch_size=4), index=0, seed=5)
    for place in range(8):
        imitator.keep(Row([1], [place]), 3, -float(place), solved=0.5)
    places = [row.completion[0] for batch in imitator._batches(step=3) for row in batch]
    first, second, rest = places[:8], places[8:16], places[16:]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert len(rest) == len(set(rest)) == 4


def test_in_every_step_only_its_own_answers_are_imitated() -> None:
    agent = make_agent("llama-plus", when="step", epochs=1.0)
    rollouts = agent.sample(PROBLEMS, 1, 0)
    optimizer = agent.learner.optimizer
    for step in (1, 2):
        result = agent.learn(lesson_of(rollouts, step))
        assert result.metrics["imitation/answers"] == 12
        assert agent.imitator.answers == []
    assert agent.learner.optimizer is optimizer


def test_kept_answers_survive_a_checkpoint() -> None:
    agent = make_agent("llama-plus", when="end")
    rollouts = agent.sample(PROBLEMS, 1, 0)
    result = agent.learn(lesson_of(rollouts, imitates=False))
    assert not any(name.startswith("imitation") for name in result.metrics)
    again = make_agent("llama-plus", when="end")
    again.load_state_dict(agent.state_dict())
    assert again.imitator.answers == agent.imitator.answers != []
    assert [(answer.step, answer.solved) for answer in again.imitator.answers] == [(1, 0.0)] * 12
    assert again.imitator._batches(1) == agent.imitator._batches(1)


def test_with_confidence_answers_are_drawn_as_their_sources_were_sure_of_them() -> None:
    """Two answers, of which a token was 1/2 and 1/4 likely: with the power 2, one is drawn four times as often."""
    imitator = Imitator(make_agent("llama-plus").learner, Imitation(epochs=5000.0 / 2, confidence=2.0), 0, seed=0)
    imitator.keep(Row([1], [5, 6]), 1, 2 * math.log(0.5), solved=0.0)
    imitator.keep(Row([1], [7, 8, 9]), 1, 3 * math.log(0.25), solved=0.75)
    drawn = [row.completion for batch in imitator._batches(1) for row in batch]
    assert len(drawn) == 5000
    # Of 5,000 draws with probability 0.8, the share has a standard deviation of 0.0057.
    assert drawn.count([5, 6]) / 5000 == pytest.approx(0.8, abs=0.03)


def test_with_focus_prompts_that_the_learner_solves_are_drawn_less_often() -> None:
    """It solved one prompt never and one three times of four: with the power 1, one is drawn four times as often."""
    imitator = Imitator(make_agent("llama-plus").learner, Imitation(epochs=5000.0 / 2, focus=1.0), 0, seed=0)
    imitator.keep(Row([1], [5]), 1, -1.0, solved=0.0)
    imitator.keep(Row([2], [6]), 1, -9.0, solved=0.75)
    drawn = [row.completion for batch in imitator._batches(1) for row in batch]
    assert drawn.count([5]) / 5000 == pytest.approx(0.8, abs=0.03)


def test_how_often_the_learner_solved_a_prompt_is_of_its_own_answers() -> None:
    agent, other = make_agent("llama-plus", when="end"), make_agent("neox-pair", 1)
    own, foreign = agent.sample(PROBLEMS, 1, 0), other.sample(PROBLEMS, 1, 0)
    for place, rollout in enumerate([*own, *foreign]):
        rollout.reward = 1.0 if place in (0, 4, 5, 6, 7) or rollout.source == 1 else 0.0
    lesson = replace(lesson_of(foreign, imitates=False), rollouts=[*own, *foreign])
    lesson.advantage_N = lesson.omega_N = torch.ones(24, dtype=torch.float64)
    agent.learn(lesson)
    assert [answer.solved for answer in agent.imitator.answers] == [0.25] * 4 + [1.0] * 4 + [0.0] * 4


def test_answers_of_earlier_steps_are_drawn_again_and_then_forgotten() -> None:
    options = Imitation(when="step", epochs=1.0, memory=2)
    imitator = Imitator(make_agent("llama-plus").learner, options, index=0, seed=0)
    seen = set()
    for step in range(1, 12):
        for place in (0, 1):
            imitator.keep(Row([1], [4 + place]), step, -1.0, 0.0)
        drawn = [row for batch in imitator._batches(step) for row in batch]
        assert len(drawn) == 2
        seen |= {step - next(answer.step for answer in imitator.answers if answer.row is one) for one in drawn}
        assert imitator.imitate(step, RATE)["imitation/answers"] == (2 if step == 1 else 4)
        assert [answer.step for answer in imitator.answers] == [step] * 2
    assert seen == {0, 1}
    assert imitator.imitate(12, RATE) == {"imitation/answers": 2, "imitation/updates": 0}
    assert imitator.answers == []


def test_without_a_right_answer_nothing_changes() -> None:
    agent = make_agent("llama-plus", when="end", restart=True)
    before = weights_of(agent)
    result = agent.learn(lesson_of([]))
    assert result.metrics["imitation/answers"] == 0
    assert all(torch.equal(own, wanted) for own, wanted in zip(weights_of(agent), before, strict=True))


def test_a_run_without_a_right_answer_says_that_nothing_is_imitated(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent("llama-plus", when="end", min_reward=0.5)
    before = weights_of(agent)
    result = agent.learn(lesson_of([], step=3))
    assert result.metrics["imitation/updates"] == 0
    assert all(map(torch.equal, weights_of(agent), before))
    assert "Agent agent0: nothing to imitate" in caplog.text
    assert "a reward of at least 0.5 (algorithm.imitation.min_reward)" in caplog.text
