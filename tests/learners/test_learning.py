"""The learner: what it leaves out has no gradient, and what it does in pieces is the same as in one."""

import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hacrl.agents.agent import Agent
from hacrl.algorithms import (
    FTIS,
    GRPO,
    GSPO,
    HACPO,
    LUFFY,
    OPD,
    TOPR,
    Algorithm,
    Naive,
    RobustHACPO,
    SuccessGated,
    Swarm,
)
from hacrl.config import AgentConfig
from hacrl.decoder.plain import completion_logprobs
from hacrl.decoder.scoring import TokenLogprobs
from hacrl.errors import UserError
from hacrl.learners.lesson import LearnResult, Lesson
from hacrl.learners.weights import MasterWeights
from hacrl.rollouts.retokenize import Dropped
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.metrics import exchange_metrics, learning_metrics
from tiny_models import compute_in_full, distance, logprobs_one_by_one

MODELS = ["llama-plus", "neox-pair", "qwen3-bpe"]
"""Three architectures and three tokenizers; the first is the learner."""
PROBLEMS = ArithmeticTask().heldout("test", 3)
TEMPERATURE = 1.5
ADVANTAGES = [0.0, 1.2, -0.7, 0.0, 0.4, -1.5]
LOG_RATIOS = [-0.1, 2e-4, 0.05, -0.5, -1e-4, -0.02, -12.0]
"""Of others' rollouts: inside and outside of every band, on both sides, and beyond the clamp."""
OMEGAS = [1.0, 0.8, 1.3]
ONE, SEVERAL = [[0, 1, 2]], [[0, 1], [2], [1], [2, 0]]

CASES: dict[str, tuple[Algorithm, int]] = {
    "gspo": (GSPO(), 1),
    "gspo, beta": (GSPO(beta=0.3), 1),
    "grpo": (GRPO(), 1),
    "grpo, beta": (GRPO(beta=0.3), 1),
    "opd": (OPD(), 1),
    "opd, beta": (OPD(beta=0.3), 1),
    "opd, cispo, entropy": (OPD(entropy_coef=0.2, loss_type="cispo", epsilon_high=1.0), 1),
    "naive": (Naive(), 2),
    "naive, three, beta": (Naive(beta=0.3), 3),
    "naive, own ratio": (Naive(ratio="own"), 2),
    "naive, own ratio, three, beta": (Naive(ratio="own", beta=0.3), 3),
    "hacpo, alone": (HACPO(), 1),
    "hacpo": (HACPO(), 2),
    "hacpo, three": (HACPO(), 3),
    "hacpo, alpha 0": (HACPO(alpha=0.0), 2),
    "hacpo, three, alpha 3": (HACPO(alpha=3.0, delta=0.6), 3),
    "hacpo, no cross clip": (HACPO(cross_clip=False), 2),
    "hacpo, bytes": (HACPO(ratio_unit="byte"), 2),
    "hacpo, three, beta, bytes": (HACPO(beta=0.3, ratio_unit="byte", cross_weight=0.5), 3),
    "swarm": (Swarm(), 2),
    "swarm, three, beta": (Swarm(beta=0.3, share=0.3), 3),
    "ftis": (FTIS(), 2),
    "ftis, three": (FTIS(cap=1.0, kl_max=0.3), 3),
    "success_gated": (SuccessGated(), 2),
    "success_gated, three": (SuccessGated(transfer_weight=0.5), 3),
    "luffy": (LUFFY(), 2),
    "luffy, three, beta": (LUFFY(beta=0.3), 3),
    "topr": (TOPR(), 2),
    "topr, three, beta": (TOPR(beta=0.3), 3),
    "gspo, entropy": (GSPO(entropy_coef=0.2), 1),
    "gspo, cispo, beta, entropy": (GSPO(beta=0.3, entropy_coef=0.2, loss_type="cispo", epsilon_high=1.0), 1),
    "grpo, cispo, beta": (GRPO(beta=0.3, loss_type="cispo", epsilon_high=1.0), 1),
    "grpo, dr_grpo, beta": (GRPO(beta=0.3, loss_type="dr_grpo"), 1),
    "naive, cispo": (Naive(loss_type="cispo", epsilon_high=1.01), 2),
    "hacpo, three, dapo, beta": (HACPO(beta=0.3, cross_weight=0.5, loss_type="dapo"), 3),
    "swarm, three, bnpo": (Swarm(share=0.3, loss_type="bnpo"), 3),
    "hacpo_robust, three, dr_grpo, entropy": (RobustHACPO(entropy_coef=0.2, loss_type="dr_grpo"), 3),
    "hacpo_robust": (RobustHACPO(), 2),
    "hacpo_robust, three, beta": (RobustHACPO(beta=0.3, cross_weight=0.5), 3),
}


def make_agent(algorithm: Algorithm, index: int = 0, trace: bool = False, **settings: Any) -> Agent:
    options: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 30,
        "temperature": TEMPERATURE,
        "log_kl": False,
        # Nearly plain gradient descent: Adam's own division would make much of rounding.
        "adam_epsilon": 1.0,
        "max_grad_norm": 1e9,
    }
    config = AgentConfig(id=f"agent{index}", model=f"zoo:{MODELS[index]}", **{**options, **settings})
    return Agent(config, index, algorithm, seed=0, trace=trace)


@pytest.fixture(scope="module")
def sampled() -> list[list[Rollout]]:
    """Four rollouts of each problem by each model. Some of the last one's are too long for the learner."""
    agents = [make_agent(GSPO(), index, max_completion_length=T) for index, T in enumerate((30, 16, 22))]
    return [agent.sample(PROBLEMS, step=1, sampling_round=0) for agent in agents]


@pytest.fixture(scope="module")
def rollouts(sampled: list[list[Rollout]]) -> dict[str, list[list[Rollout]]]:
    """The same, with others' log-probabilities such that the learner's ratios, in tokens or in bytes, are known."""
    agent = make_agent(GSPO())
    made: dict[str, list[list[Rollout]]] = {}
    for unit in ("token", "byte"):
        log_ratios = itertools.cycle(LOG_RATIOS)
        made[unit] = [sampled[0]]
        for foreign in sampled[1:]:
            changed = []
            for rollout, log_ratio in zip(foreign, log_ratios, strict=False):
                try:
                    ids = agent.reader.retokenizer(rollout)
                except Dropped:
                    changed.append(rollout)
                    continue
                with torch.no_grad():
                    prompt = agent.reader.render(rollout.prompt)
                    logp = float(logprobs_one_by_one(agent.model, prompt, ids, TEMPERATURE)[range(len(ids)), ids].sum())
                if unit == "token":
                    mean = logp / len(ids) - log_ratio
                else:
                    mean = (logp - log_ratio * rollout.num_bytes) / rollout.num_tokens
                changed.append(dataclasses.replace(rollout, logps=[mean] * rollout.num_tokens))
            made[unit].append(changed)
    return made


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns an agent into one that computes in float64, and its starting model into another one."""

    def turn(agent: Agent) -> Agent:
        models = [agent.model]
        if agent.learner.reference is not None:
            models.append(agent.learner.reference.__self__.model)
            with torch.no_grad():
                for parameter in models[1].parameters():
                    parameter.mul_(1.02)
        for model in models:
            compute_in_full(model.double(), monkeypatch)
        return agent

    return turn


def lesson_of(
    rollouts: Sequence[Rollout], minibatches: list[list[int]] = ONE, advantages: Sequence[float] = ADVANTAGES
) -> Lesson:
    N = len(rollouts)
    return Lesson(
        step=1,
        prompts=[problem.prompt for problem in PROBLEMS],
        rollouts=list(rollouts),
        advantage_N=torch.tensor(list(itertools.islice(itertools.cycle(advantages), N)), dtype=torch.float64),
        omega_N=torch.tensor([OMEGAS[rollout.source] for rollout in rollouts], dtype=torch.float64),
        minibatches=minibatches,
        learning_rate=1e-4,
    )


def lesson_for(
    algorithm: Algorithm, agents: int, rollouts: dict[str, list[list[Rollout]]], minibatches: list[list[int]] = ONE
) -> Lesson:
    unit = algorithm.ratio_unit if isinstance(algorithm, HACPO) else "token"
    lesson = lesson_of([rollout for own in rollouts[unit][:agents] for rollout in own], minibatches)
    if isinstance(algorithm, OPD):  # none for some, of which one in three has no A either
        sizes = [rollout.num_tokens for rollout in lesson.rollouts]
        lesson.token_advantages = [np.sin(row * np.arange(1.0, n + 1)) * (row % 4 > 0) for row, n in enumerate(sizes)]
    return lesson


def moves(agent: Agent, start: list[Tensor]) -> list[Tensor]:
    return [weight.detach() - was for weight, was in zip(agent.weights.weights, start, strict=True)]


def learn(agent: Agent, lesson: Lesson) -> tuple[list[list[Tensor]], LearnResult]:
    """The gradient of each update, and the result."""
    taken: list[list[Tensor]] = []

    def take(*_: Any) -> None:
        taken.append([weight.grad.clone() for weight in agent.weights.weights])

    handle = agent.learner.optimizer.register_step_pre_hook(take)
    result = agent.learn(lesson)
    handle.remove()
    return taken, result


# --- what is left out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_fast_gradient_is_the_plain_one(case: str, rollouts: dict[str, list[list[Rollout]]], exact: Any) -> None:
    """In the first update and in later ones; so are the weights after them, and what is reported."""
    algorithm, agents = CASES[case]
    lesson = lesson_for(algorithm, agents, rollouts, SEVERAL)
    fast, plain = (exact(make_agent(algorithm, fast=is_fast)) for is_fast in (True, False))
    start = [weight.detach().clone() for weight in plain.weights.weights]
    gradients, result = learn(fast, lesson)
    expected_gradients, expected = learn(plain, lesson)
    assert len(gradients) == len(expected_gradients) == len(SEVERAL)
    assert all(max(float(gradient.abs().max()) for gradient in update) > 0 for update in gradients)
    for update, expected_update in zip(gradients, expected_gradients, strict=True):
        assert distance(update, expected_update) < 1e-9
    assert distance(moves(fast, start), moves(plain, start)) < 1e-9
    assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-9)
    assert result.dropped == expected.dropped
    assert (len(result.dropped) > 0) == (agents == 3)

    # Work was saved, and exactly what has no gradient.
    records = expected.records
    foreign = torch.tensor([lesson.rollouts[row].source != 0 for row in records["row"]])
    teaches = torch.from_numpy(records["advantage"] != 0)
    uses_all_own = algorithm.beta > 0 or algorithm.entropy_coef > 0
    needed = torch.where(foreign, teaches & torch.from_numpy(records["kept"]), teaches | uses_all_own)
    tokens = torch.from_numpy(records["num_tokens"])
    assert expected.metrics["tokens_trained"] == int(tokens.sum())
    assert result.metrics["tokens_trained"] == int(tokens[needed].sum())
    if agents > 1:
        assert (foreign & needed).any()
        leaves_out = isinstance(algorithm, HACPO | Naive | FTIS) and case not in (
            "hacpo, no cross clip",
            "naive, cispo",
        )
        if not algorithm.rescores_foreign:  # then the clip acts from the second update on, if at all
            assert (foreign & teaches & ~needed).any() == leaves_out


WRITTEN_OUT = ["gspo, beta", "grpo, beta", "opd, beta", "naive", "hacpo, three", "hacpo, three, beta, bytes"]
WRITTEN_OUT += ["swarm, three, beta", "ftis", "ftis, three", "success_gated, three", "luffy, three, beta"]
WRITTEN_OUT += ["topr, three, beta"]
WRITTEN_OUT += ["hacpo_robust, three, beta", "naive, own ratio, three, beta"]
WRITTEN_OUT += [
    case for case in CASES if any(option in case for option in ("entropy", "cispo", "dr_grpo", "dapo", "bnpo"))
]


@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_the_gradient_is_that_of_the_objective_written_out(
    case: str, rollouts: dict[str, list[list[Rollout]]], exact: Any
) -> None:
    """One sequence after the other through the model itself, in formulas of their own.

    Twice, at a learning rate of 0: nothing is left over from the first update.
    """
    algorithm, agents = CASES[case]
    lesson = dataclasses.replace(lesson_for(algorithm, agents, rollouts, [[0, 1, 2]] * 2), learning_rate=0.0)
    check_written_out(exact(make_agent(algorithm)), lesson)


def test_with_the_same_vocabulary_token_ratios_are_taken_token_by_token(exact: Any) -> None:
    """As the source recorded them, and not its sum."""
    algorithm = FTIS(kl_max=2.0)
    settings = {"temperature": TEMPERATURE, "num_generations": 4, "max_completion_length": 16}
    other = Agent(AgentConfig(id="other", model="zoo:llama-minus", **settings), 1, algorithm, seed=0)
    agent = make_agent(algorithm)
    rollouts = [*agent.sample(PROBLEMS, step=1, sampling_round=0), *other.sample(PROBLEMS, step=1, sampling_round=0)]
    assert {rollout.vocabulary for rollout in rollouts} == {agent.reader.retokenizer.vocabulary}
    check_written_out(exact(agent), dataclasses.replace(lesson_of(rollouts, [[0, 1, 2]] * 2), learning_rate=0.0))


def check_written_out(agent: Agent, lesson: Lesson) -> None:
    usable: dict[int, list[int]] = {}
    for row, rollout in enumerate(lesson.rollouts):
        try:
            usable[row] = rollout.token_ids if rollout.source == 0 else agent.reader.retokenizer(rollout)
        except Dropped:
            continue
    losses = [-written_out(agent, lesson, usable, update) for update in range(2)]
    expected = [list(torch.autograd.grad(loss, list(agent.model.parameters()))) for loss in losses]
    gradients, result = learn(agent, lesson)
    for update, expected_update in zip(gradients, expected, strict=True):
        assert distance(update, expected_update) < 1e-9
    assert result.metrics["loss"] == pytest.approx((losses[0] + losses[1]).item() / 2, rel=1e-9)


def written_out(agent: Agent, lesson: Lesson, usable: dict[int, list[int]], update: int) -> Tensor:
    """The objective of one update of all rollouts, whose tokens are given."""
    algorithm: Any = agent.algorithm
    objective = torch.zeros((), dtype=torch.float64)
    sources = [lesson.rollouts[row].source for row in usable]
    own_tokens = sum(len(ids) for row, ids in usable.items() if lesson.rollouts[row].source == 0)
    size = 1.0  # the number of tokens by which a rollout counts, or its share of the longest possible one
    if algorithm.loss_type in ("bnpo", "dapo", "cispo"):
        sources = [lesson.rollouts[row].source for row, ids in usable.items() for _ in ids]
    for row, ids in usable.items():
        rollout, advantage = lesson.rollouts[row], float(lesson.advantage_N[row])
        added_T = torch.from_numpy(lesson.token_advantages[row]) if lesson.token_advantages else 0.0
        prompt, source = agent.reader.render(rollout.prompt), rollout.source
        logp_TV = logprobs_one_by_one(agent.model, prompt, ids, TEMPERATURE)
        logp_T = logp_TV[range(len(ids)), ids]
        if algorithm.loss_type != "grpo":
            size = len(ids) / (agent.config.max_completion_length if algorithm.loss_type == "dr_grpo" else 1)
        old_T = torch.tensor(rollout.logps, dtype=torch.float64)
        if algorithm.rescores_foreign and source:
            old_T = logp_T.detach()  # the learner has not moved
        count = num_in_mean(algorithm, sources, source) / size
        if isinstance(algorithm, TOPR):
            likelier = (logp_T.detach().sum() - old_T.sum()).clamp(max=0).exp() if advantage < 0 else 1.0
            objective = objective + likelier * advantage * (logp_T - logp_T.detach()).mean().exp() / count
        elif isinstance(algorithm, RIVALS) and source:
            same = rollout.vocabulary == agent.reader.retokenizer.vocabulary
            spread_T = torch.full_like(logp_T, float(old_T.sum()) / len(ids)).detach()
            objective = objective + rival_term(algorithm, logp_T, old_T if same else spread_T, advantage) / count
        elif isinstance(algorithm, RobustHACPO) and source:
            s = ((logp_T.detach().sum() - old_T.sum()) / len(ids)).clamp(-10, 10).exp()
            term = s.clamp(max=1) * OMEGAS[source] * advantage * (logp_T - logp_T.detach()).mean().exp()
            objective = objective + algorithm.cross_weight * term / count
        elif isinstance(algorithm, HACPO) and source:
            ratio = (logp_T.mean() - old_T.mean()).exp()
            if algorithm.ratio_unit == "byte":
                ratio = ((logp_T.sum() - old_T.sum()) / rollout.num_bytes).exp()
            clipped = ratio.clamp(1 - algorithm.delta + update * algorithm.delta_step, 1.0)
            term = clipped * clipped.detach() ** algorithm.alpha * OMEGAS[source] * advantage
            objective = objective + algorithm.cross_weight * term / count
        else:
            by_token = isinstance(algorithm, GRPO | OPD)
            ratio = (logp_T - old_T).exp() if by_token else (logp_T.mean() - old_T.mean()).clamp(-10, 10).exp()
            clipped = ratio.clamp(1 - algorithm.epsilon, 1 + algorithm.epsilon_high)
            term = torch.minimum(ratio * (advantage + added_T), clipped * (advantage + added_T)).mean()
            if algorithm.loss_type == "cispo":
                weight = ratio.detach().clamp(max=algorithm.epsilon_high)
                log_p = logp_T if by_token else logp_T.mean()
                term = (weight * (advantage + added_T) * (1 + log_p - log_p.detach())).mean()
            objective = objective + term / count
        if algorithm.beta and source == 0:
            start = agent.learner.reference.__self__.model
            with torch.no_grad():
                start_T = logprobs_one_by_one(start, prompt, ids, TEMPERATURE)[range(len(ids)), ids]
            kl = ((start_T - logp_T).exp() - (start_T - logp_T) - 1).mean()
            objective = objective - algorithm.beta * kl / sources.count(0) * size
        if algorithm.entropy_coef and source == 0:
            entropy = -(logp_TV.exp() * logp_TV).sum() / own_tokens
            objective = objective + algorithm.entropy_coef * entropy
    return objective


RIVALS = (Swarm, FTIS, SuccessGated, LUFFY)


def rival_term(algorithm: Any, logp_T: Tensor, old_T: Tensor, advantage: float) -> Tensor:
    """What a foreign rollout contributes under one of the other methods that share."""
    now_T = logp_T.detach()
    if isinstance(algorithm, FTIS):
        kl = ((now_T - old_T).exp() - (now_T - old_T) - 1).mean()
        if advantage < 0 and kl > algorithm.kl_max:
            return torch.zeros_like(kl)
        weight_T = (now_T - old_T).clamp(-10, 10).exp().clamp(max=algorithm.cap)
        return advantage * (weight_T * (logp_T - now_T).exp()).mean()
    if isinstance(algorithm, LUFFY):
        return advantage * (logp_T.exp() / (logp_T.exp() + algorithm.gamma)).mean()
    scale = algorithm.transfer_weight if isinstance(algorithm, SuccessGated) else 1.0
    return scale * advantage * (logp_T - now_T).mean().exp()


def num_in_mean(algorithm: Algorithm, sources: list[int], source: int) -> float:
    """How many rollouts share a mean with one of this source."""
    if isinstance(algorithm, HACPO | RobustHACPO | SuccessGated | LUFFY):
        return sources.count(source)
    if isinstance(algorithm, Swarm):
        own, others = sources.count(0), set(sources) - {0}
        return (1 - algorithm.share) * own + algorithm.share * (len(sources) - own) / len(others)
    return len(sources)


class Counting:
    """A scorer that remembers the completions it was given."""

    def __init__(self, agent: Agent) -> None:
        self.inner, self.seen = agent.learner.policy.scorer, []
        agent.learner.policy.scorer = self

    def __call__(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> TokenLogprobs:
        self.seen += [(torch.is_grad_enabled(), tuple(completion)) for completion in completions]
        return self.inner(prompts, completions, temperature)


def test_rollouts_that_teach_nothing_are_not_even_looked_at(rollouts: dict[str, list[list[Rollout]]]) -> None:
    lesson = lesson_for(HACPO(), 2, rollouts)
    for trace in (False, True):
        agent = make_agent(HACPO(), trace=trace)
        counting = Counting(agent)
        result = agent.learn(lesson)
        with_gradient = [ids for has_gradient, ids in counting.seen if has_gradient]
        if trace:
            assert len(counting.seen) == len(with_gradient) == len(lesson.rollouts) - len(result.dropped)
            assert sorted(result.records["row"].tolist()) == sorted(set(result.records["row"].tolist()))
            assert len(result.records["row"]) == len(counting.seen)
        else:
            assert all(result.records["advantage"] != 0)
            assert set(result.records["row"].tolist()) <= {
                row for row in range(len(lesson.rollouts)) if lesson.advantage_N[row] != 0
            }
            own = torch.tensor([lesson.rollouts[row].source == 0 for row in result.records["row"]])
            kept = torch.from_numpy(result.records["kept"])
            assert len(with_gradient) == int((own | kept).sum())
            assert len(counting.seen) - len(with_gradient) == int((~own).sum())


@pytest.mark.parametrize("silent", [(), (0,), (1,), (0, 1)], ids=["nobody", "own", "others", "all"])
@pytest.mark.parametrize("case", ["hacpo", "naive"])
def test_a_trace_does_not_change_the_metrics(
    case: str, silent: tuple[int, ...], rollouts: dict[str, list[list[Rollout]]], exact: Any
) -> None:
    """In the first of two updates, the rollouts of some agents all have the advantage 0."""
    algorithm, agents = CASES[case]
    lesson = lesson_for(algorithm, agents, rollouts, [[0, 1], [2]])
    for row, rollout in enumerate(lesson.rollouts):
        if rollout.source in silent and rollout.prompt_index < 2:
            lesson.advantage_N[row] = 0.0
    collected = []
    for trace in (True, False):
        result = learn(exact(make_agent(algorithm, trace=trace)), lesson)[1]
        metrics = learning_metrics(result, lesson, 0)
        metrics |= exchange_metrics(0, ("own", "other"), lesson, result, torch.ones(2, 2))
        apart = ("tokens_trained", "tokens_forward", "logprob_gap", "kl")
        collected.append({name: value for name, value in metrics.items() if not name.startswith(apart)})
    assert collected[0].keys() == collected[1].keys()
    assert collected[0] == pytest.approx(collected[1], rel=1e-8, abs=1e-10)
    assert {"grad_norm", "grad_norm_own", "grad_norm_foreign", "entropy", "gradient_mass", "from_other/ess"} <= {
        *collected[0]
    }


# --- batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_the_size_of_a_pass_does_not_change_the_gradient(
    fast: bool, rollouts: dict[str, list[list[Rollout]]], exact: Any
) -> None:
    algorithm = HACPO(beta=0.3)
    lesson = lesson_for(algorithm, 2, rollouts, SEVERAL[:2])
    collected, passes = [], []
    for micro_batch_size, batch_tokens in ((None, 10**6), (None, 60), (1, 0), (3, 0)):
        agent = exact(make_agent(algorithm, fast=fast, micro_batch_size=micro_batch_size))
        agent.learner.batch_tokens = batch_tokens
        sizes: list[int] = []
        inner = agent.learner.policy.scorer

        def counting(prompts: Any, completions: Any, temperature: float, inner: Any = inner, sizes: Any = sizes) -> Any:
            sizes.append(len(prompts))
            return inner(prompts, completions, temperature)

        agent.learner.policy.scorer = counting
        collected.append(learn(agent, lesson)[0])
        passes.append((len(sizes), max(sizes)))
    for gradients in collected[1:]:
        for update, expected in zip(gradients, collected[0], strict=True):
            assert distance(update, expected) < 1e-9
    assert passes[0] < passes[1] < passes[2]
    assert [largest for _, largest in passes[2:]] == [1, 3]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
def test_passes_side_by_side_add_up_to_the_same(rollouts: dict[str, list[list[Rollout]]], exact: Any) -> None:
    """To the bit, whichever thread is faster: gradients, weights and notes."""
    algorithm = HACPO(beta=0.3)
    lesson = lesson_for(algorithm, 2, rollouts, SEVERAL[:2])
    collected = []
    for threads in (1, 2, 2):
        torch.set_num_threads(1)
        agent = exact(make_agent(algorithm, micro_batch_size=2))
        torch.set_num_threads(threads)
        assert agent.learner.policy.workers == threads
        collected.append(learn(agent, lesson))
        assert torch.get_num_threads() == threads
    (alone, expected), (gradients, result), (again, again_result) = collected
    for update, update_alone, update_again in zip(gradients, alone, again, strict=True):
        assert distance(update, update_alone) < 1e-9
        assert distance(update, update_again) == 0
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)
    assert result.metrics == again_result.metrics
    for name, column in result.records.items():
        assert column.tolist() == pytest.approx(expected.records[name].tolist(), rel=1e-9, abs=1e-12)


class Small(Counting):
    """A device whose memory does not hold passes of more than `limit` tokens of completions, after the first one."""

    def __init__(self, agent: Agent, limit: int) -> None:
        super().__init__(agent)
        self.limit, self.refused = limit, 0

    def __call__(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> TokenLogprobs:
        if self.seen and sum(map(len, completions)) > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(prompts, completions, temperature)


@pytest.mark.parametrize("recompute_logprobs", [False, True])
@pytest.mark.parametrize("micro_batch_size", [8, None])
def test_out_of_memory_makes_passes_smaller_and_changes_nothing_else(
    micro_batch_size: int | None,
    recompute_logprobs: bool,
    rollouts: dict[str, list[list[Rollout]]],
    exact: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = HACPO(delta=1.0)
    lesson = lesson_for(algorithm, 2, rollouts, SEVERAL)
    collected = []
    for limit in (10**6, 75):
        settings = {"micro_batch_size": micro_batch_size, "recompute_logprobs": recompute_logprobs}
        agent = exact(make_agent(algorithm, **settings))
        agent.learner.batch_tokens = 400
        small = Small(agent, limit)
        with caplog.at_level(logging.WARNING, "hacrl"):
            collected.append(learn(agent, lesson))
        assert (small.refused > 0) == (limit == 75)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == small.refused
    assert all(message.startswith("Agent agent0: out of memory in step 1; ") for message in messages)
    if micro_batch_size:
        # The largest pass had four or five rollouts.
        assert [message.partition("; ")[2] for message in messages] == ["micro_batch_size is now 2."]
        assert agent.learner.micro_batch_size == 2
    else:
        said = [re.fullmatch(r".*; a pass now takes (\d+) tokens\.", message) for message in messages]
        assert all(match is not None and 30 < int(match[1]) < 100 for match in said)  # half of the largest one
        assert agent.learner.batch_tokens < 100
    (expected, undisturbed), (gradients, result) = collected
    for update, expected_update in zip(gradients, expected, strict=True):
        assert distance(update, expected_update) < 1e-9
    # Nothing of the passes that failed is counted or written down twice.
    assert result.metrics == pytest.approx(undisturbed.metrics, rel=1e-6, abs=1e-9)
    assert sorted(result.records["row"].tolist()) == sorted(undisturbed.records["row"].tolist())


@pytest.mark.parametrize("micro_batch_size", [4, None])
def test_one_rollout_that_does_not_fit_is_an_error(
    micro_batch_size: int | None, rollouts: dict[str, list[list[Rollout]]]
) -> None:
    agent = make_agent(GSPO(), micro_batch_size=micro_batch_size)
    before = [weight.detach().clone() for weight in agent.weights.weights]
    Small(agent, 0).seen.append((False, ()))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        agent.learn(lesson_for(GSPO(), 1, rollouts))
    assert all(torch.equal(weight, was) for weight, was in zip(agent.weights.weights, before, strict=True))


def test_the_loss_is_that_of_the_updates_that_were_made(sampled: list[list[Rollout]]) -> None:
    lesson = lesson_of(sampled[0], [[1], [2]])
    expected = make_agent(GSPO()).learn(lesson).metrics["loss"]
    lesson.minibatches.insert(0, [0])
    first = [row for row, rollout in enumerate(lesson.rollouts) if rollout.prompt_index == 0]
    lesson.advantage_N[first] = math.inf
    metrics = make_agent(GSPO()).learn(lesson).metrics
    assert (metrics["updates"], metrics["nonfinite_updates"]) == (2, 1)
    assert metrics["loss"] == expected


# --- old log-probabilities -----------------------------------------------------------------------------


def shifted(rollouts: Sequence[Rollout], by: float) -> list[Rollout]:
    return [dataclasses.replace(rollout, logps=[logp + by for logp in rollout.logps]) for rollout in rollouts]


@pytest.mark.parametrize("fast", [True, False])
def test_recomputed_logprobs_are_the_learners_before_the_first_update(
    fast: bool, sampled: list[list[Rollout]], exact: Any
) -> None:
    """A sampler that is off by 0.01 would put every rollout outside GSPO's clip."""
    lesson = lesson_of(shifted(sampled[0], 0.01), SEVERAL)
    with pytest.raises(UserError, match=r"outside the clip before any update .* recompute_logprobs: true"):
        make_agent(GSPO(), fast=fast).learn(lesson)
    agent = exact(make_agent(GSPO(), fast=fast, recompute_logprobs=True))
    gradients, result = learn(agent, lesson)
    first = result.records["update"] == 0
    assert abs(result.records["log_ratio"][first]).max() < 1e-12
    assert abs(result.records["log_ratio"][~first]).max() > 1e-6
    # Told all the same: how far the sampler is off.
    assert result.metrics["logprob_gap"] == pytest.approx(0.01, abs=1e-4)
    assert result.metrics["logprob_gap_clipped"] == 0
    # The updates are those from a sampler that is not off, to its own rounding.
    expected, _ = learn(exact(make_agent(GSPO(), fast=fast)), lesson_of(sampled[0], SEVERAL))
    for update, expected_update in zip(gradients, expected, strict=True):
        assert distance(update, expected_update) < 1e-4


def test_recomputed_logprobs_hold_for_every_token_and_not_for_others_rollouts(
    rollouts: dict[str, list[list[Rollout]]], exact: Any
) -> None:
    algorithm = HACPO()
    lesson = lesson_for(algorithm, 2, rollouts)
    lesson.rollouts[:12] = shifted(lesson.rollouts[:12], 0.01)
    agent = exact(make_agent(algorithm, recompute_logprobs=True, trace=True))
    records = agent.learn(lesson).records
    exactly = dict(zip(records["row"].tolist(), records["log_ratio"].tolist(), strict=True))
    assert max(abs(exactly[row]) for row in range(12)) < 1e-12
    ratios = iter(LOG_RATIOS * 2)
    for row in range(12, 24):
        wanted = max(next(ratios), -10.0)
        if row in exactly:
            assert exactly[row] == pytest.approx(wanted, abs=1e-5)
    grpo = exact(make_agent(GRPO(), recompute_logprobs=True))
    result = grpo.learn(lesson_of(lesson.rollouts[:12]))
    assert abs(result.records["weight"] - 1).max() < 1e-12


def test_foreign_ratios_can_be_taken_to_the_learner_before_its_first_update(
    rollouts: dict[str, list[list[Rollout]]], exact: Any
) -> None:
    """Other tokens than the source's, and a first update that moves the learner."""
    algorithm = Naive(ratio="own")
    lesson = lesson_for(algorithm, 2, rollouts, [[0, 1, 2]] * 2)
    agent = exact(make_agent(algorithm, trace=True))
    records = agent.learn(dataclasses.replace(lesson, learning_rate=0.5)).records
    foreign = np.array([lesson.rollouts[row].source == 1 for row in records["row"].tolist()])
    first, second = (foreign & (records["update"] == update) for update in range(2))
    assert first.sum() == second.sum() > 3
    assert abs(records["log_ratio"][first]).max() < 1e-12
    moved = (records["logp_sum"][second] - records["logp_sum"][first]) / records["num_tokens"][first]
    assert abs(moved).max() > 1e-6
    assert records["log_ratio"][second] == pytest.approx(moved, abs=1e-12)


def test_old_logprobs_are_scored_anew_when_memory_runs_out_between_them(
    sampled: list[list[Rollout]], exact: Any
) -> None:
    """The first mini-batch fits, the second does not; the sampler is off by 0.01."""
    lesson = lesson_of(shifted(sampled[0], 0.01), [[2], [0, 1]])
    agent = exact(make_agent(GSPO(), recompute_logprobs=True))
    rows = zip(lesson.rollouts, lesson.advantage_N.tolist(), strict=True)
    small = Small(agent, sum(r.num_tokens for r, advantage in rows if r.prompt_index == 2 and advantage))
    records = agent.learn(lesson).records
    assert small.refused > 0
    assert abs(records["log_ratio"]).max() < 1e-3


# --- bfloat16 ------------------------------------------------------------------------------------------


def bfloat16_agent(**settings: Any) -> Agent:
    return make_agent(GSPO(), dtype="bfloat16", **settings)


@pytest.fixture(scope="module")
def rounded() -> list[Rollout]:
    """Sampled in bfloat16."""
    return bfloat16_agent().sample(PROBLEMS, step=1, sampling_round=0)


def test_bfloat16_samples_what_the_published_model_says(rounded: list[Rollout]) -> None:
    """To bfloat16's digits: position embeddings and logits are not rounded to it."""
    agent = bfloat16_agent()
    assert {parameter.dtype for parameter in agent.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in agent.model.buffers() if buffer.is_floating_point()} == {torch.float32}
    exact = make_agent(GSPO())
    prompts = [exact.reader.render(rollout.prompt) for rollout in rounded]
    with torch.no_grad():
        scored = completion_logprobs(exact.model, prompts, [rollout.token_ids for rollout in rounded], TEMPERATURE, 0)
    gap = [
        abs(logp - float(expected))
        for rollout, row in zip(rounded, scored.logp_NT, strict=True)
        for logp, expected in zip(rollout.logps, row, strict=False)
    ]
    assert 1e-5 < sum(gap) / len(gap) < 0.02


@pytest.mark.parametrize("minibatches", [ONE, SEVERAL], ids=["one update", "several"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_gspo_step_in_bfloat16(fast: bool, minibatches: list[list[int]], rounded: list[Rollout]) -> None:
    """Its rounding exceeds the clip, so old log-probabilities are recomputed; the gradient is near that of float32."""
    lesson = lesson_of(rounded, minibatches)
    agent = bfloat16_agent(fast=fast)
    (gradients, *_), result = learn(agent, lesson)
    assert result.metrics["logprob_gap_clipped"] <= 0.05
    assert result.metrics["logprob_gap"] > 1e-4
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    (expected, *_), _ = learn(make_agent(GSPO(), recompute_logprobs=True), lesson)
    flat, expected_flat = (torch.cat([g.flatten() for g in gs]) for gs in (gradients, expected))
    assert torch.cosine_similarity(flat, expected_flat, dim=0) > 0.99
    with pytest.raises(UserError, match="outside the clip"):
        bfloat16_agent(fast=fast, recompute_logprobs=False).learn(lesson)


class SmallBackward(Counting):
    """A device whose memory holds a pass of any size, but the activations of two rollouts only."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> TokenLogprobs:
        if torch.is_grad_enabled() and len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(prompts, completions, temperature)


def test_old_logprobs_are_scored_anew_when_memory_runs_out_after_them(rounded: list[Rollout]) -> None:
    """In bfloat16, those of other batches would not do."""
    agent = bfloat16_agent(micro_batch_size=8)
    SmallBackward(agent)
    result = agent.learn(lesson_of(rounded))
    assert agent.learner.micro_batch_size == 2
    assert result.metrics["logprob_gap_clipped"] == 0


def test_an_update_below_bfloat16s_resolution_is_not_lost(rounded: list[Rollout]) -> None:
    agent = bfloat16_agent(adam_epsilon=1e-8)
    lesson = dataclasses.replace(lesson_of(rounded), learning_rate=1e-6)
    start = [weight.detach().clone() for weight in agent.weights.weights]
    working = [parameter.detach().clone() for parameter in agent.model.parameters()]
    agent.learn(lesson)
    moved = [(weight.detach() - was).abs().max() for weight, was in zip(agent.weights.weights, start, strict=True)]
    assert all(0 < step < 2e-6 for step in moved)
    pairs = list(zip(working, agent.model.parameters(), strict=True))
    changed = sum(int(((was != parameter) & (was.abs() > 0.01)).sum()) for was, parameter in pairs)
    assert 0 < changed < 0.1 * sum(int((was.abs() > 0.01).sum()) for was in working)
    for parameter, weight in zip(agent.model.parameters(), agent.weights.weights, strict=True):
        assert torch.equal(parameter, weight.bfloat16())


def test_small_gradients_and_updates_add_up_behind_a_bfloat16_model() -> None:
    """Each of 64 steps of 2^-10 on a weight of 1 is below what bfloat16 can tell; together they are 2^-4."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    weights = MasterWeights(model, torch.bfloat16)
    weights.zero_grad()
    for _ in range(64):
        model(torch.full((1,), 2.0**-10, dtype=torch.bfloat16)).backward()
        assert model.weight.grad is None
    assert weights.gradients[0].item() == 2.0**-4
    for step in range(64):
        with torch.no_grad():
            weights.weights[0].add_(2.0**-10)
        weights.publish()
        assert model.weight.item() == torch.tensor(1 + (step + 1) * 2.0**-10).bfloat16().item()
    assert model.weight.item() == 1 + 2.0**-4
    weights.zero_grad()
    assert not weights.gradients[0].any()


def test_a_bfloat16_checkpoint_is_float32_and_continues_to_the_bit(rounded: list[Rollout], tmp_path: Path) -> None:
    lessons = [dataclasses.replace(lesson_of(rounded, SEVERAL), learning_rate=1e-5, step=step) for step in (1, 2)]
    whole = bfloat16_agent(adam_epsilon=1e-8)
    half = bfloat16_agent(adam_epsilon=1e-8)
    for lesson in lessons:
        whole.learn(lesson)
    half.learn(lessons[0])
    half.save(tmp_path / "model", tmp_path / "state.pt")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    names = [name for name, _ in half.model.named_parameters()]
    for name, weight in zip(names, half.weights.weights, strict=True):
        assert torch.equal(stored[name], weight)
        assert not torch.equal(weight, weight.bfloat16().float())
    resumed = bfloat16_agent(adam_epsilon=1e-8)
    resumed.load(tmp_path / "model", tmp_path / "state.pt")
    for one, other in zip(resumed.weights.weights, half.weights.weights, strict=True):
        assert torch.equal(one, other)
    resumed.learn(lessons[1])
    assert resumed.learner.updates == whole.learner.updates == 8
    for one, other in zip(resumed.weights.weights, whole.weights.weights, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


# --- memory --------------------------------------------------------------------------------------------


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with 5 MB to spare beside the optimizer: less than the activations of one rollout."""
    monkeypatch.setattr("hacrl.decoder.policy.MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {(12 * 334_272 + 5_000_000) // 1024} kB\n", "ascii")


def test_the_plain_path_computes_activations_again_too(sampled: list[list[Rollout]], exact: Any) -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept[-1] += tensor.numel()
        return tensor

    gradients = []
    for wanted in (False, True):
        agent = exact(make_agent(GSPO(), fast=False, gradient_checkpointing=wanted))
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradients.append(learn(agent, lesson_of(sampled[0]))[0][0])
    assert kept[1] < kept[0] / 4
    assert distance(*gradients) < 1e-9


@pytest.mark.usefixtures("_little_memory")
def test_activations_that_do_not_fit_are_computed_again(
    rollouts: dict[str, list[list[Rollout]]], exact: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lesson = lesson_for(GSPO(), 1, rollouts)
    settings = {"max_prompt_length": 400, "max_completion_length": 400}
    with caplog.at_level(logging.WARNING, "hacrl"):
        agents = [exact(make_agent(GSPO(), **settings, gradient_checkpointing=value)) for value in (None, False, True)]
        collected = [learn(agent, lesson)[0][0] for agent in agents]
    assert [agent.learner.policy.backbone.checkpointing for agent in agents] == [True, False, True]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Agent agent0: the activations of 800 tokens would not fit into memory")
    assert agents[1].learner.batch_tokens < agents[0].learner.batch_tokens < 2048
    for gradients in collected[1:]:
        assert distance(gradients, collected[0]) < 1e-9
    in_twos = make_agent(GSPO(), **settings, micro_batch_size=2)
    learn(in_twos, lesson)
    assert in_twos.learner.policy.backbone.checkpointing


SHIFTS = [0.02, -0.3, 0.15]
"""By how much the sampler's log-probabilities are too low, per token: alternately for rollouts."""


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("algorithm", [GSPO(), GRPO(loss_type="dapo"), TOPR()], ids=lambda kind: kind.name)
def test_own_rollouts_are_corrected_for_what_sampled_them(
    algorithm: Algorithm, mode: str, sampled: list[list[Rollout]]
) -> None:
    """All tokens of a rollout have the same shift, so that its weight is known; bounds are 0.9 and 1.1."""
    changed = [
        dataclasses.replace(rollout, logps=[logp - SHIFTS[n % 3] for logp in rollout.logps])
        for n, rollout in enumerate(sampled[0])
    ]
    lesson = lesson_of(changed, advantages=[1.0, -1.0])
    settings: dict[str, Any] = {"recompute_logprobs": True, "max_logprob_gap": 10.0}
    correction = {"correction": True, "mode": mode, "clip_max": 1.1, "clip_min": 0.9}
    correction = {f"vllm_importance_sampling_{name}": value for name, value in correction.items()}
    plain = make_agent(algorithm, **settings).learn(lesson)
    result = make_agent(algorithm, **settings, **correction).learn(lesson)
    factors, counts, beyond = [], [], []
    for row in result.records["row"].tolist():
        tokens = len(changed[row].token_ids)
        ratio = math.exp(SHIFTS[row % 3] * (tokens if mode.startswith("sequence") else 1))
        beyond.append(not 0.9 <= ratio <= 1.1)
        truncated = min(max(ratio, 0.9), 1.1)
        factors.append(truncated if mode.endswith("truncate") else 0.0 if beyond[-1] else ratio)
        counts.append(1 if mode.startswith("sequence") else tokens)
    expected = [factor * weight for factor, weight in zip(factors, plain.records["mean_weight"].tolist(), strict=True)]
    assert result.records["mean_weight"].tolist() == pytest.approx(expected, rel=1e-5)
    name = "sampling/importance_sampling_ratio"
    assert result.metrics[f"{name}/mean"] == pytest.approx(np.average(factors, weights=counts), rel=1e-5)
    assert result.metrics[f"{name}/clipped"] == pytest.approx(np.average(beyond, weights=counts), rel=1e-5)
    assert f"{name}/mean" not in plain.metrics
    objective = sum(result.records["objective"] * result.records["mean_weight"])
    assert result.metrics["loss"] == pytest.approx(-float(objective), rel=1e-5)
