"""Other agents' text as a learner's tokens: exact, or dropped and counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import FAST
from hacrl.agents.agent import Agent
from hacrl.agents.loading import resolve_model
from hacrl.algorithms import HACPO
from hacrl.config import AgentConfig
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.retokenize import Dropped, Retokenizer, decode, vocabulary_fingerprint
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask, worked_answer

TEXTS = [
    "plain text, 12+7=19",
    "naïve café, Ελληνικά, 中文, עברית",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and combining e\u0301",
    "look-alikes </s><s><pad> <|im_end|> <|endoftext|>",
    "  leading and trailing spaces  ",
    "tabs\tand\nnew\r\nlines\u2028and\u200bzero width",
    "mathematics: ∑ᵢ xᵢ² ≤ √π",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE as language models have: any text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def learner() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


def zoo_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(resolve_model(f"zoo:{name}"))


def rollout(text: str, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "step": 1,
        "prompt_id": "p",
        "prompt": "1+1=",
        "prompt_index": 0,
        "source": 1,
        "index": 0,
        "text": text,
        "token_ids": [0],
        "finish_reason": "stop",
        "ended": True,
        "special_inside": False,
        "vocabulary": "another",
        "policy_version": 0,
    }
    values |= changes
    return Rollout(**{"logps": [0.0] * len(values["token_ids"]), **values})


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_a_byte_level_learner(learner: PreTrainedTokenizerFast, text: str) -> None:
    """Special-token look-alikes are read as text: no id of a special token appears inside."""
    ids = Retokenizer(learner, learner.eos_token_id, 1000)(rollout(text))
    assert ids[-1] == learner.eos_token_id
    assert decode(learner, ids[:-1]) == text
    assert not set(ids[:-1]) & set(learner.all_special_ids)


@pytest.mark.parametrize("name", ["llama-plus", "neox-pair", "qwen3-bpe"])
def test_worked_answers_survive_every_zoo_tokenizer(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 100)
    for problem in ArithmeticTask().heldout("test", 50):
        text = worked_answer(problem)
        assert decode(tokenizer, retokenizer(rollout(text, ended=False, finish_reason="length"))) == text


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.isascii()] + ["letters", "</s>"])
def test_what_a_learner_cannot_write_is_dropped(text: str) -> None:
    tokenizer = zoo_tokenizer("llama-plus")
    with pytest.raises(Dropped, match="not_reversible"):
        Retokenizer(tokenizer, tokenizer.eos_token_id, 1000)(rollout(text))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text": ""}, "empty"),
        ({"text": "cut off inside a character \ufffd"}, "broken_text"),
        ({"text": "12", "special_inside": True}, "special_tokens"),
        ({"text": "x" * 2000}, "too_long"),
    ],
)
def test_reasons_for_dropping(learner: PreTrainedTokenizerFast, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Dropped, match=reason):
        Retokenizer(learner, learner.eos_token_id, 50)(rollout(**changes))


def test_the_end_of_turn_counts_towards_the_limit_and_is_never_cut(learner: PreTrainedTokenizerFast) -> None:
    length = len(learner.encode("12+7=19", add_special_tokens=False))
    unfinished = rollout("12+7=19", ended=False, finish_reason="length")
    assert len(Retokenizer(learner, learner.eos_token_id, length)(unfinished)) == length
    with pytest.raises(Dropped, match="too_long"):
        Retokenizer(learner, learner.eos_token_id, length)(rollout("12+7=19"))


def test_the_same_vocabulary_reuses_ids_and_replaces_the_end_of_turn() -> None:
    tokenizer = zoo_tokenizer("llama-plus")
    retokenizer = Retokenizer(tokenizer, end_of_turn=7, max_length=10)
    # Ids that this tokenizer would never produce from the text: only reuse can return them.
    foreign = rollout("12", token_ids=[9, 9, 2], vocabulary=vocabulary_fingerprint(tokenizer))
    assert retokenizer(foreign) == [9, 9, 7]


def test_fingerprints_tell_vocabularies_apart() -> None:
    names = ["llama-plus", "llama-minus", "olmo2-char", "neox-pair", "qwen3-bpe"]
    prints = [vocabulary_fingerprint(zoo_tokenizer(name)) for name in names]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 3


def test_fingerprint_survives_saving(tmp_path: Path, learner: PreTrainedTokenizerFast) -> None:
    learner.save_pretrained(tmp_path)
    assert vocabulary_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == vocabulary_fingerprint(learner)


def test_what_a_learner_drops_is_counted_by_source_and_reason() -> None:
    """One lesson with an own rollout and foreign ones that a character tokenizer can and cannot write."""
    agent = Agent(AgentConfig(id="a", model="zoo:llama-plus", log_kl=False, fast=FAST), 0, HACPO(), seed=0)
    problem = ArithmeticTask().heldout("test", 1)[0]
    (own, *_) = agent.sample([problem], step=1, sampling_round=0)
    texts = [worked_answer(problem), "🙂", "</s>", "naïve", "1+1=2;#2", ""]
    foreign = [rollout(text, logps=[-0.1] * 9, token_ids=[1] * 9, index=i) for i, text in enumerate(texts)]
    rollouts = [own, *foreign]
    lesson = Lesson(
        step=1,
        prompts=[problem.prompt],
        rollouts=rollouts,
        advantage_N=torch.linspace(-1, 1, len(rollouts), dtype=torch.float64),
        omega_N=torch.ones(len(rollouts), dtype=torch.float64),
        minibatches=[[0]],
        learning_rate=1e-4,
    )
    result = agent.learn(lesson)
    reasons = Counter((rollouts[row].source, reason) for row, reason in result.dropped.items())
    assert reasons == {(1, "not_reversible"): 3, (1, "empty"): 1}
    assert sorted(result.dropped) == [2, 3, 4, 6]
    assert sorted(result.records["row"].tolist()) == [0, 1, 5]
    # A mean over what is left: dropped rollouts do not dilute it.
    assert sorted(result.records["mean_weight"].tolist()) == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(("token_ids", "logps"), [([], []), ([1, 2], [0.0])])
def test_a_rollout_has_a_log_probability_for_each_token(token_ids: list[int], logps: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(token_ids)} tokens and {len(logps)} log-probabilities"):
        rollout("1+2=3", token_ids=token_ids, logps=logps)
