"""How many bytes a parameter learning keeps, and that what saves memory computes the same."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hacrl.agents.agent import Agent
from hacrl.algorithms import HACPO
from hacrl.config import AgentConfig
from hacrl.learners import learner as learner_module
from hacrl.learners import parts
from hacrl.learners.lesson import Lesson
from hacrl.learners.parts import Parts, sketch
from hacrl.learners.ranks import ALONE
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask

PROBLEMS = ArithmeticTask().train(0, 4)
MODELS = ("llama-plus", "llama-minus")


def make_agent(index: int = 0, **settings: Any) -> Agent:
    options = {"num_generations": 2, "max_completion_length": 12, "log_kl": False, "dtype": "bfloat16"}
    options |= {"max_logprob_gap": 10.0, "learning_rate": 1e-4}
    config = AgentConfig(id=f"agent{index}", model=f"zoo:{MODELS[index]}", **{**options, **settings})
    return Agent(config, index, HACPO(delta=1.0), seed=0)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Two rollouts of each problem by each of two agents."""
    return [rollout for index in range(2) for rollout in make_agent(index).sample(PROBLEMS, 1, 0)]


def lesson_of(rollouts: list[Rollout]) -> Lesson:
    advantages = torch.tensor([1.0 if rollout.index else -1.0 for rollout in rollouts], dtype=torch.float64)
    return Lesson(
        1, [problem.prompt for problem in PROBLEMS], rollouts, advantages, torch.ones_like(advantages),
        [[0, 1], [2, 3]], 1e-4,
    )  # fmt: skip


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def resident(agent: Agent) -> float:
    """Bytes a parameter of weights, float32 weights, gradients and moments."""
    weights = [*agent.model.parameters(), *agent.weights.weights]
    moments = [value for state in agent.learner.optimizer.state.values() for value in state.values() if value.dim()]
    return bytes_of([*weights, *(weight.grad for weight in weights), *moments]) / sum(
        parameter.numel() for parameter in agent.model.parameters()
    )


def learned(agent: Agent, rollouts: list[Rollout]) -> tuple[list[float], Any]:
    """Bytes a parameter after each update, and the result."""
    apply, found = agent.learner.apply, list[float]()

    def noting(*given: Any) -> bool:
        done = apply(*given)
        found.append(resident(agent))
        return done

    agent.learner.apply = noting  # type: ignore[method-assign]
    return found, agent.learn(lesson_of(rollouts))


@pytest.mark.parametrize(("gradient_dtype", "bytes_"), [("float32", 18), ("bfloat16", 16)])
def test_bfloat16_training_keeps_18_bytes_a_parameter(
    gradient_dtype: str, bytes_: int, rollouts: list[Rollout]
) -> None:
    """Weights 2, float32 weights 4, moments 8, gradients 4 or 2; and no gradients while others work."""
    agent = make_agent(gradient_dtype=gradient_dtype)
    found, result = learned(agent, rollouts)
    assert result.metrics["updates"] == 2
    assert result.metrics["grad_norm_foreign"] > 0
    assert found == pytest.approx([bytes_, bytes_], abs=0.02)
    assert resident(agent) == pytest.approx(14, abs=0.02)


def test_gradients_in_bfloat16_are_nearly_the_same(rollouts: list[Rollout]) -> None:
    moved = []
    for dtype in ("float32", "bfloat16"):
        agent = make_agent(gradient_dtype=dtype, adam_epsilon=1.0)
        before = torch.cat([weight.detach().flatten().clone() for weight in agent.weights.weights])
        agent.learn(lesson_of(rollouts))
        moved.append(torch.cat([weight.detach().flatten() for weight in agent.weights.weights]) - before)
    assert torch.cosine_similarity(*moved, dim=0) > 0.999


def test_moving_idle_states_changes_nothing(rollouts: list[Rollout]) -> None:
    both = [make_agent(offload_idle=offload) for offload in (False, True)]
    for agent in both:
        agent.learn(lesson_of(rollouts))
    for left, right in zip(*(agent.weights.weights for agent in both), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("exact", [10**9, 0])
def test_norms_of_two_parts_of_a_gradient(exact: int) -> None:
    """A large gradient is not copied, and its second part's norm is right to a few per thousand."""
    torch.manual_seed(0)
    shapes = [(700, 900), (5_000_000,), (3,)]
    first, second = ([torch.randn(shape) * scale for shape in shapes] for scale in (1.0, 0.3))
    split = Parts(first, ALONE, exact)
    assert float(split.first) == pytest.approx(norm(first), rel=1e-5)
    both = [a + b for a, b in zip(first, second, strict=True)]
    assert float(split.second(both)) == pytest.approx(norm(second), rel=1e-5 if exact else 5e-3)
    assert bytes_of(split.kept) == (4 * parts.SKETCH if not exact else 4 * sum(map(torch.numel, first)))


def test_a_sketch_is_linear() -> None:
    torch.manual_seed(0)
    a, b = (list(torch.randn(2, 100)) for _ in range(2))
    together = sketch([x + y for x, y in zip(a, b, strict=True)], size=64)
    assert torch.allclose(together, sketch(a, size=64) + sketch(b, size=64), atol=1e-5)


def test_logged_norms_of_a_large_model_are_those_of_a_small_one(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_agent().learn(lesson_of(rollouts)).metrics

    def never_exact(gradients: list[Tensor], ranks: Any) -> Parts:
        return Parts(gradients, ranks, exact=0)

    monkeypatch.setattr(learner_module, "Parts", never_exact)
    metrics = make_agent().learn(lesson_of(rollouts)).metrics
    for name in ("grad_norm", "grad_norm_own", "grad_norm_foreign"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-2)


def norm(tensors: list[Tensor]) -> float:
    return float(np.linalg.norm([float(tensor.norm()) for tensor in tensors]))
