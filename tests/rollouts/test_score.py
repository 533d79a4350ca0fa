"""What an agent says of others' rollouts: against transformers, and against text decoded from the start every time."""

from typing import Any

import numpy as np
import pytest
import torch
from test_prompt_border import PROMPT, SENTENCE_PIECE, sentence_piece
from test_retokenize import TEXTS, byte_level_tokenizer, rollout, zoo_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import FAST
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.agents.processes import ShardedAgent
from hacrl.algorithms import OPD, Reading, log_gap
from hacrl.algorithms.opd import common_spans
from hacrl.config import AgentConfig
from hacrl.rollouts.retokenize import Retokenizer, decode
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask

PROBLEMS = ArithmeticTask().heldout("test", 3)


def agent_config(model: str, **settings: Any) -> AgentConfig:
    options = {"num_generations": 4, "max_completion_length": 40, "log_kl": False, "fast": FAST, **settings}
    return AgentConfig(id=model, model=f"zoo:{model}", **options)


def make_agent(model: str, index: int, **settings: Any) -> Agent:
    return Agent(agent_config(model, **settings), index, OPD(), seed=0)


def plain_logps(model: str, prompt: str, text: str, ended: bool, temperature: float) -> tuple[list[int], list[float]]:
    """Tokens of a text behind a prompt and their log-probabilities, by transformers alone, one sequence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(ZOO / model)
    lm = AutoModelForCausalLM.from_pretrained(ZOO / model, dtype=torch.float32).eval()
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] * ended
    with torch.no_grad():
        logits = lm(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1]
    return ids, (logits / temperature).log_softmax(-1)[range(len(ids)), ids].tolist()


@pytest.mark.parametrize(("source", "reader"), [("llama-plus", "llama-minus"), ("qwen3-bpe", "neox-pair")])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_scores_are_those_of_transformers(source: str, reader: str, micro_batch_size: int | None) -> None:
    rollouts = make_agent(source, 0).sample(PROBLEMS, 1, 0)
    agent = make_agent(reader, 1, temperature=1.3, micro_batch_size=micro_batch_size)
    readings = agent.score(rollouts)
    same = rollouts[0].vocabulary == agent.reader.retokenizer.vocabulary
    assert same == (source == "llama-plus")
    seen = 0
    for one, reading in zip(rollouts, readings, strict=True):
        if reading is None:
            assert one.special_inside
            continue
        seen += 1
        assert isinstance(one.prompt, str)
        ids, logps = plain_logps(reader, one.prompt, one.lead + one.text, one.ended, 1.3)
        assert reading.logps == pytest.approx(logps, abs=2e-5)
        if same:
            assert reading.ends is None
        else:
            tokenizer = agent.reader.tokenizer
            content = ids[: len(ids) - one.ended]
            ends = [len(decode(tokenizer, content[: t + 1])) for t in range(len(content))]
            assert reading.ends == ends + [len(one.text) + 1] * one.ended
    assert seen > 8


def test_its_own_are_what_it_recorded_and_cost_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_agent("neox-pair", 0)
    rollouts = agent.sample(PROBLEMS, 1, 0)
    monkeypatch.delattr(agent.learner.policy, "scorer")
    for one, reading in zip(rollouts, agent.score(rollouts), strict=True):
        assert reading is not None
        assert reading.logps == one.logps
        assert reading.ends is not None
        assert (len(reading.ends), reading.ends[-1]) == (one.num_tokens, len(one.lead + one.text) + one.ended)
    assert agent.score([]) == []


def test_between_vocabularies_the_whole_text_is_compared() -> None:
    """A text's differences add up to the difference of what both models say of it, but for what is left out."""
    pairs, chars = make_agent("neox-pair", 0), make_agent("llama-plus", 1)
    rollouts = chars.sample(PROBLEMS, 1, 0)
    compared = 0
    for own, other in zip(chars.score(rollouts), pairs.score(rollouts), strict=True):
        if own is None or other is None or own.ends is None or other.ends is None:
            continue
        spans = list(common_spans(own.ends, other.ends))
        assert sum(mine.stop - mine.start for mine, _ in spans) == len(own.logps)
        assert sum(theirs.stop - theirs.start for _, theirs in spans) == len(other.logps)
        gap = log_gap(own, other)
        if all(value == value for value in gap):
            assert sum(gap) == pytest.approx(sum(other.logps) - sum(own.logps))
            compared += 1
    assert compared > 2


def test_the_mean_difference_is_minus_the_kl_of_the_two_models() -> None:
    """The KL of the whole next-token distributions at the places that the learner came to, by transformers alone."""
    learner, teacher = make_agent("llama-plus", 0, num_generations=64), make_agent("llama-minus", 1)
    plain = [AutoModelForCausalLM.from_pretrained(ZOO / agent.config.id).eval() for agent in (learner, teacher)]
    rollouts = [one for one in learner.sample(PROBLEMS, 1, 0) if not one.special_inside]
    gaps: list[float] = []
    kls: list[float] = []
    for one, reading in zip(rollouts, teacher.score(rollouts), strict=True):
        assert reading is not None
        gaps += log_gap(Reading(one.logps), reading)
        prompt = learner.reader.render(one.prompt)
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.no_grad():
            own, other = (model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for model in plain)
        kls += (own.exp() * (own - other)).sum(-1).tolist()
    mean, error = float(np.mean(gaps)), float(np.std(gaps)) / len(gaps) ** 0.5
    assert len(gaps) > 3000
    assert mean < -10 * error
    assert mean == pytest.approx(-np.mean(kls), abs=3 * error)


def test_two_processes_say_what_one_does() -> None:
    rollouts = make_agent("qwen3-bpe", 1).sample(PROBLEMS, 1, 0)
    one = make_agent("llama-plus", 0, micro_batch_size=3)
    two = ShardedAgent(agent_config("llama-plus", micro_batch_size=3, fsdp=2), 0, OPD(), seed=0)
    expected, got = one.score(rollouts), two.score(rollouts)
    two.end()
    for reading, other in zip(expected, got, strict=True):
        assert (reading is None) == (other is None)
        if reading is not None and other is not None:
            assert other.logps == pytest.approx(reading.logps, abs=1e-5)
            assert other.ends == reading.ends


# --- where tokens end ----------------------------------------------------------------------------------


def ends_by_definition(tokenizer: Any, prompt: list[int], ids: list[int], text: str) -> list[int]:
    """Every prefix decoded behind the prompt: a border is where it is a prefix of the text."""
    before = len(decode(tokenizer, prompt))
    ends: list[int | None] = []
    for t in range(len(ids)):
        read = decode(tokenizer, [*prompt, *ids[: t + 1]])[before:]
        is_border = text.startswith(read) and (t == 0 or len(read) > max([e or 0 for e in ends]))
        ends.append(len(read) if is_border and read else None)
    ends[-1] = len(text)
    for t in reversed(range(len(ids))):
        if ends[t] is None:
            ends[t] = ends[t + 1]
    return [end for end in ends if end is not None]


@pytest.mark.parametrize("kind", ["byte-level", "pairs", *SENTENCE_PIECE])
@pytest.mark.parametrize("text", [*TEXTS, "12+34=46;46-5=41;#41", " 19 is the answer", "🙂🙂🙂", "中文中文 and 19"])
def test_ends_are_those_of_prefixes_decoded_from_the_start(kind: str, text: str) -> None:
    tokenizer: Any = byte_level_tokenizer() if kind == "byte-level" else None
    if kind == "pairs":
        tokenizer, text = zoo_tokenizer("neox-pair"), "12+34=46;46-5=41;#41"
    tokenizer = tokenizer or sentence_piece(kind)
    prompt = tokenizer.encode("12+34+5=" if kind == "pairs" else PROMPT, add_special_tokens=False)
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 200)
    end = retokenizer.end_of(prompt)
    foreign: Rollout = rollout(text)
    ids = retokenizer(foreign, end)
    ends = retokenizer.text_ends(ids, foreign, end)
    assert ends == [*ends_by_definition(tokenizer, prompt, ids[:-1], text), len(text) + 1]
    assert len(ends) == len(ids)


def test_tokens_inside_a_character_end_where_it_ends() -> None:
    tokenizer = byte_level_tokenizer()
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 200)
    byte = [tokenizer.encode(char, add_special_tokens=False) for char in ("a", "€", "b")]
    assert [len(ids) for ids in byte] == [1, 3, 1]
    foreign = rollout("a€b", ended=False)
    ids = [token for ids in byte for token in ids]
    assert retokenizer.text_ends(ids, foreign, retokenizer.end_of([])) == [1, 2, 2, 2, 3]
    own = Reading([-1.0, -0.5, -0.25, -0.25, -2.0], [1, 2, 2, 2, 3])
    assert log_gap(own, Reading([-1.0, -2.0, -1.0], [1, 2, 3])) == [0.0, -0.5, -0.25, -0.25, 1.0]
