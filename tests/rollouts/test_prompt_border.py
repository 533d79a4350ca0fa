"""Where a foreign completion meets the learner's prompt: spaces that tokenizers add, and blocks that prompts open."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_retokenize import byte_level_tokenizer, rollout
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from conftest import FAST
from hacrl.agents.agent import Agent
from hacrl.algorithms import HACPO
from hacrl.config import AgentConfig, RunConfig
from hacrl.rollouts.retokenize import Dropped, Retokenizer, decode
from hacrl.run import train
from hacrl.tasks.problem import Problem
from hacrl.training.run_dir import RunDir
from tiny_models import tiny

CORPUS = ["12 + 7 = 19 and 19 + 3 = 22", "the answer is 19", "user: what is it? assistant: 19"]
SENTENCE_PIECE = ["llama-2", "always", "first"]
PROMPT = "user: what is 12 + 7? assistant:"


def sentence_piece(kind: str, size: int = 100) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before the first word: Llama 2's normalizer, or Metaspace with this scheme."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    replaced: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama-2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *replaced, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme=kind), *replaced])
    words = [word for text in CORPUS for word in text.split()]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)])
    spelled = json.loads(
        tokenizer.to_str()
    )  # byte tokens belong to the vocabulary, as in a model file of SentencePiece
    for token in spelled["added_tokens"]:
        spelled["model"]["vocab"].setdefault(token["content"], token["id"])
    spelled["added_tokens"] = [token for token in spelled["added_tokens"] if token["special"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spelled)), eos_token="</s>", pad_token="<unk>"
    )


def behind(tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int]) -> str:
    """What these tokens read behind a whole prompt."""
    whole, before = decode(tokenizer, [*prompt, *ids]), decode(tokenizer, prompt)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
@pytest.mark.parametrize("text", ["19", " 19", "the answer is 19", "\n19", "= 22", "naïve 🙂"])
def test_a_text_reads_the_same_behind_the_learners_prompt(kind: str, text: str) -> None:
    tokenizer = sentence_piece(kind)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    alone = tokenizer.encode("19", add_special_tokens=False)
    assert (decode(tokenizer, alone), behind(tokenizer, prompt, alone)) == ("19", " 19")
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 100)
    ids = retokenizer(rollout(text), retokenizer.end_of(prompt))
    assert ids[-1] == tokenizer.eos_token_id
    assert behind(tokenizer, prompt, ids[:-1]) == text


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_a_prompt_that_ends_with_special_tokens_has_an_end_all_the_same(kind: str) -> None:
    tokenizer = sentence_piece(kind)
    prompt = [*tokenizer.encode(PROMPT, add_special_tokens=False), *[tokenizer.eos_token_id] * 20]
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 100)
    ids = retokenizer(rollout("19", ended=False), retokenizer.end_of(prompt))
    assert behind(tokenizer, prompt, ids) == "19"


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_what_grows_together_with_the_prompt_is_dropped(kind: str) -> None:
    """Behind a 1 the 9 would become a part of the token 19: there are no tokens of its own for it."""
    tokenizer = sentence_piece(kind)
    assert tokenizer.tokenize("= 19")[-1] == "▁19"
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 100)
    end = retokenizer.end_of(tokenizer.encode("12 + 7 = 1", add_special_tokens=False))
    with pytest.raises(Dropped, match="not_reversible"):
        retokenizer(rollout("9"), end)


def test_a_byte_level_learner_has_the_same_tokens_behind_any_prompt() -> None:
    tokenizer = byte_level_tokenizer()
    retokenizer = Retokenizer(tokenizer, tokenizer.eos_token_id, 100)
    for text in ("19", " 19", "\n19", "naïve 🙂"):
        end = retokenizer.end_of(tokenizer.encode(PROMPT))
        assert retokenizer.encode(text, end) == retokenizer.encode(text)
        assert retokenizer.lead(retokenizer.encode(text), end) == ""


# --- agents with such tokenizers ---------------------------------------------------------------------


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> str:
    """A tiny Llama with random weights and this tokenizer."""
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    tiny("llama", seed=seed, eos_token_id=tokenizer.eos_token_id, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_agent(model: str, max_completion_length: int) -> Agent:
    sizes = {"num_generations": 64, "max_completion_length": max_completion_length, "max_prompt_length": 100}
    return Agent(AgentConfig(id="a", model=model, log_kl=False, fast=FAST, **sizes), 0, HACPO(), seed=0)


def test_a_learner_reads_what_the_source_wrote_behind_its_prompt(tmp_path: Path) -> None:
    """Both put a space before words, and their vocabularies differ: a space that the source sampled is kept."""
    problem = Problem("p", PROMPT, "19")
    tokenizers = [sentence_piece("llama-2"), sentence_piece("always", size=45)]
    source = make_agent(save_model(tmp_path / "source", tokenizers[0]), 3)
    learner = make_agent(save_model(tmp_path / "learner", tokenizers[1]), 30)
    rollouts = source.sample([problem], step=1, sampling_round=0)
    written, read = source.reader.render(problem.prompt), learner.reader.render(problem.prompt)
    assert source.reader.retokenizer.vocabulary != learner.reader.retokenizer.vocabulary
    end, kept = learner.reader.retokenizer.end_of(read), 0
    for foreign in rollouts:
        content = foreign.token_ids[:-1] if foreign.ended else foreign.token_ids
        text = behind(tokenizers[0], written, content)
        assert text == foreign.lead + foreign.text
        try:
            ids = learner.reader.retokenizer(foreign, end)
        except Dropped:
            continue
        assert behind(tokenizers[1], read, ids[:-1] if foreign.ended else ids) == text
        kept += bool(foreign.lead)
    assert {foreign.lead for foreign in rollouts} == {"", " "}
    assert kept


# --- blocks that prompts open ------------------------------------------------------------------------

TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
QWEN3 = (  # the model opens a block itself; without thinking, the prompt has an empty one
    TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENS = (  # as QWEN3, but with thinking the prompt opens the block
    TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (  # the distilled models of DeepSeek-R1
    "{% for message in messages %}<|User|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


def chat_model(folder: Path, template: str, block: str = "text") -> str:
    """`block`: whether <think> is spelled as text, or is a token, special or not."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    if block != "text":
        tokenizer.add_tokens([AddedToken("<think>", special=block == "special", normalized=False)])
    return save_model(folder, tokenizer)


@pytest.mark.parametrize("block", ["text", "token", "special"])
@pytest.mark.parametrize(
    ("template", "kwargs", "opened"),
    [
        (QWEN3, {}, ""),
        (QWEN3, {"enable_thinking": False}, ""),
        (OPENS, {}, "<think>"),
        (OPENS, {"enable_thinking": True}, "<think>"),
        (OPENS, {"enable_thinking": False}, ""),
        (R1, {}, "<think>"),
        (R1, {"enable_thinking": False}, "<think>"),  # this template does not know it
        (R1.replace("<think>\n", "<reasoning>"), {}, "<reasoning>"),
        (R1.replace("<think>\n", ""), {}, ""),
    ],
)
def test_an_open_block_is_found_at_the_end_of_a_prompt(
    tmp_path: Path, template: str, kwargs: dict[str, Any], opened: str, block: str
) -> None:
    config = AgentConfig(id="a", model=chat_model(tmp_path, template, block), chat_template_kwargs=kwargs, log_kl=False)
    agent = Agent(config, 0, HACPO(), seed=0)
    assert agent.traits(Problem("p", "Is <think> a tag? 12+7=", "19")).opened_block == opened


def run_pair(folder: Path, *templates: tuple[str, dict[str, Any]], algorithm: str = "hacpo") -> dict[str, Any]:
    """The metrics of one step of agents a, b, ... with one tokenizer, these templates and their options."""
    agents = [
        {"id": name, "model": chat_model(folder / name, template), "chat_template_kwargs": kwargs}
        for name, (template, kwargs) in zip("abc", templates, strict=False)
    ]
    (folder / "data.jsonl").write_text('{"prompt": "12+7=", "answer": "19"}\n', encoding="utf-8")
    (folder / "reward.py").write_text(
        "def half(completions, **columns):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    config = RunConfig.from_dict(
        {
            "algorithm": {"name": algorithm},
            "agents": agents,
            "task": {"train": str(folder / "data.jsonl"), "reward": f"{folder / 'reward.py'}:half"},
            "prompts_per_step": 1,
            "num_generations": 4,
            "max_prompt_length": 100,
            "max_completion_length": 4,
            "max_steps": 1,
            "save_final": False,
            "log_kl": False,
            "fast": FAST,
            "output_dir": str(folder / "run"),
        }
    )
    return RunDir(train(config).run_dir).metrics()[-1]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "open block" in record.getMessage()]


def test_completions_from_inside_a_block_are_dropped_and_the_start_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the vocabulary is the same and ids could be reused. a and c, which open none, use each other's."""
    with caplog.at_level(logging.WARNING, logger="hacrl"):
        metrics = run_pair(tmp_path, (QWEN3, {}), (OPENS, {}), (QWEN3, {"enable_thinking": False}))
    for learner, source in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")):
        assert metrics[f"{learner}/from_{source}/dropped/unopened_block"] == 4
        assert f"{learner}/from_{source}/ratio_mean" not in metrics
    for learner, source in (("a", "c"), ("c", "a")):
        assert "unopened_block" not in " ".join(name for name in metrics if f"{learner}/from_{source}/" in name)
    (said,) = warnings(caplog)
    assert "those of a and c without one, those of b with <think>" in said
    assert "agents.b.chat_template_kwargs={enable_thinking: false}" in said


def test_who_opens_another_block_cannot_score_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hacrl"):
        metrics = run_pair(tmp_path, (QWEN3, {}), (OPENS, {}), (QWEN3, {}), algorithm="opd")
    shares = {pair: metrics[f"{pair[0]}/from_{pair[1]}/scored"] for pair in ("ab", "ba", "bc", "cb", "ac", "ca")}
    assert shares == {"ab": 0, "ba": 0, "bc": 0, "cb": 0, "ac": 1, "ca": 1}
    assert "a/from_b/token_advantage" not in metrics
    assert (metrics["b/tokens_scored"], metrics["a/tokens_scored"] > 0) == (0, True)
    assert len(warnings(caplog)) == 1


def test_prompts_that_end_alike_need_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = {"enable_thinking": False}
    alike = [((R1, {}), (OPENS, {})), ((QWEN3, {}), (OPENS, off)), ((QWEN3, off), (R1.replace("<think>\n", ""), {}))]
    with caplog.at_level(logging.WARNING, logger="hacrl"):
        for number, pair in enumerate(alike):
            (folder := tmp_path / str(number)).mkdir()
            assert not [name for name in run_pair(folder, *pair) if "unopened_block" in name]
        (folder := tmp_path / "alone").mkdir()
        run_pair(folder, (R1, {}), (QWEN3, {}), algorithm="gspo")  # nothing is exchanged
    assert not warnings(caplog)
