"""The built-in decoder against transformers' own generate and against the model's distribution."""

import math
from collections import Counter

import pytest
import torch

from conftest import FAST
from hacrl.agents.agent import Agent
from hacrl.algorithms import GSPO
from hacrl.config import AgentConfig
from hacrl.decoder.plain import completion_logprobs
from hacrl.rollouts.engine import SamplingParams
from hacrl.tasks.arithmetic import ArithmeticTask

MODELS = ["llama-plus", "neox-pair", "qwen3-bpe", "olmo2-char"]


def load(name: str, **settings: object) -> Agent:
    return Agent(AgentConfig(id="a", model=f"zoo:{name}", log_kl=False, fast=FAST, **settings), 0, GSPO(), seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_is_that_of_generate(name: str) -> None:
    """Token for token, for prompts of different lengths in one batch."""
    agent = load(name)
    problems = ArithmeticTask().heldout("test", 13)
    prompts = [agent.reader.prompt_ids(problem) for problem in problems]
    assert len({len(prompt) for prompt in prompts}) > 1
    groups = agent.source.engine.sample(prompts, SamplingParams(1, 40, temperature=0.0), seed=0)
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        expected = agent.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_recorded_logprobs_are_the_learners(name: str) -> None:
    """What the sampler records equals what the learner computes, at the sampling temperature, before top-p."""
    agent = load(name)
    prompts = [agent.reader.prompt_ids(problem) for problem in ArithmeticTask().heldout("test", 5)]
    groups = agent.source.engine.sample(prompts, SamplingParams(3, 30, temperature=1.3, top_p=0.9, top_k=20), seed=1)
    flat = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    with torch.no_grad():
        learner = completion_logprobs(
            agent.model, [p for p, _ in flat], [c.token_ids for _, c in flat], temperature=1.3, pad_id=0
        )
    for row, (_, completion) in enumerate(flat):
        expected = learner.logp_NT[row, : len(completion.token_ids)].tolist()
        assert completion.logps == pytest.approx(expected, abs=2e-5)


def test_the_seed_alone_decides_what_is_sampled() -> None:
    agent = load("llama-plus")
    prompts = [agent.reader.prompt_ids(problem) for problem in ArithmeticTask().heldout("test", 4)]
    params = SamplingParams(4, 20, temperature=1.0)
    first, again, other = (agent.source.engine.sample(prompts, params, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_sampled_frequencies_match_the_model() -> None:
    """Chi-squared over the first token of 4,000 completions of one prompt, hot enough to have many choices."""
    agent = load("llama-weak", sampling_batch_size=4000)
    prompt = agent.reader.prompt_ids(ArithmeticTask().heldout("test", 1)[0])
    (group,) = agent.source.engine.sample([prompt], SamplingParams(4000, 2, temperature=3.0), seed=3)
    counts = Counter(completion.token_ids[0] for completion in group)
    with torch.no_grad():
        probs = agent.model(torch.tensor([prompt])).logits[0, -1].double().div(3.0).softmax(0)
    expected = {token: 4000 * float(p) for token, p in enumerate(probs) if 4000 * p >= 5}
    rest_expected = 4000 - sum(expected.values())
    rest_seen = 4000 - sum(counts[token] for token in expected)
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    statistic += (rest_seen - rest_expected) ** 2 / max(rest_expected, 1.0)
    freedom = len(expected)
    assert len(expected) >= 3
    # Wilson and Hilferty: the cube root of chi-squared is nearly normal; 4 standard deviations.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


def test_a_completion_ends_at_any_stop_token_at_a_stop_string_or_at_the_limit() -> None:
    agent = load("llama-plus")
    prompts = [agent.reader.prompt_ids(problem) for problem in ArithmeticTask().heldout("test", 6)]
    cut = agent.source.engine.sample(prompts, SamplingParams(1, 5, temperature=1.0), seed=0)
    assert {(c.finish_reason, c.ended, len(c.token_ids)) for (c,) in cut} == {("length", False, 5)}
    stopped = agent.source.engine.sample(prompts, SamplingParams(1, 40, temperature=0.0, stop=(";",)), seed=0)
    for (completion,) in stopped:
        assert (completion.finish_reason, completion.ended) == ("stop", False)
        assert agent.reader.tokenizer.decode(completion.token_ids).count(";") == 1
    agent.source.engine.stop_ids.append(agent.reader.tokenizer.convert_tokens_to_ids("="))
    for (completion,) in agent.source.engine.sample(prompts, SamplingParams(1, 40, temperature=0.0), seed=0):
        assert completion.ended
        assert agent.reader.tokenizer.decode(completion.token_ids[-1:]) == "="
