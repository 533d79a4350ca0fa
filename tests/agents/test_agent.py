"""What an agent reads out of a model's folder: end of turn, special tokens, chat template, schedule."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import FAST, MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO, end_of_turn_ids
from hacrl.algorithms import GSPO
from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.rollouts.retokenize import readable_ids
from hacrl.run import train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.problem import Problem
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.run_dir import RunDir, read_jsonl
from hacrl.training.schedule import learning_rate
from tiny_models import tiny

PAD, BOS, EOS = 0, 1, 2


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A zoo model that a test may change."""
    return Path(shutil.copytree(ZOO / "llama-plus", tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_agent(model_dir: Path, **settings: Any) -> Agent:
    options = {"log_kl": False, "fast": FAST, **settings}
    return Agent(AgentConfig(id="a", model=str(model_dir), **options), 0, GSPO(), seed=0)


# --- end of turn ---------------------------------------------------------------------------------------

CLOSED_BY_PAD = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<pad></s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("listed", [[EOS, PAD], [PAD, EOS]])
def test_the_end_of_turn_is_what_the_chat_template_closes_a_turn_with(model_dir: Path, listed: list[int]) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=listed)
    (model_dir / "chat_template.jinja").write_text(CLOSED_BY_PAD)
    agent = make_agent(model_dir)
    assert agent.reader.stop_ids == [PAD, EOS]
    assert agent.reader.retokenizer.end_of_turn == PAD


@pytest.mark.parametrize("listed", [[EOS, PAD], [PAD, EOS]])
def test_without_a_chat_template_the_end_of_turn_is_the_tokenizers_eos(model_dir: Path, listed: list[int]) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=listed)
    (model_dir / "chat_template.jinja").unlink()
    assert make_agent(model_dir).reader.stop_ids == [EOS, PAD]


def test_a_chat_template_that_closes_with_no_end_token_changes_nothing(model_dir: Path) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=[PAD, EOS])
    assert make_agent(model_dir).reader.stop_ids == [EOS, PAD]


def test_a_model_without_any_end_of_turn_is_refused(model_dir: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"agents\.b: the model has no end-of-turn token"):
        end_of_turn_ids(model, tokenizer, "b")


# --- positions -----------------------------------------------------------------------------------------


TOO_LONG = r"max_prompt_length \(32\) and max_completion_length \(33\) allow 65 tokens, but .* has 64 positions"


def with_64_positions(kind: str, folder: Path) -> Path:
    own = {"opt": {"word_embed_proj_dim": 32, "ffn_dim": 48}, "gptj": {"rotary_dim": 8}}
    tiny(kind, max_position_embeddings=64, **own.get(kind, {})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ZOO / "llama-plus").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj"])
def test_a_table_of_positions_must_have_one_for_every_token(kind: str, make_config: MakeConfig, tmp_path: Path) -> None:
    agent = {"id": "a", "model": str(with_64_positions(kind, tmp_path / "model"))}
    config = make_config(agents=[agent], algorithm={"name": "gspo"}, max_completion_length=33)
    with pytest.raises(UserError, match=rf"agents\.a: {TOO_LONG}\. Lower one of them"):
        train(config)
    assert not Path(config.output_dir).exists()
    config = make_config(agents=[agent], algorithm={"name": "gspo"}, max_completion_length=32, max_steps=1)
    assert train(config).summary["steps"] == 1


def test_more_positions_than_a_model_was_made_for_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_64_positions("llama", tmp_path / "model")
    make_agent(folder, max_prompt_length=32, max_completion_length=32).check_prompts([])
    assert not caplog.records
    make_agent(folder, max_prompt_length=32, max_completion_length=33).check_prompts([])
    (record,) = caplog.records
    assert re.search(f"Agent a: {TOO_LONG}. It was not made for longer texts", record.getMessage())


# --- prompts -------------------------------------------------------------------------------------------


def test_prompts_that_are_too_long_are_refused_with_the_length_of_the_longest(model_dir: Path) -> None:
    problems = [Problem(f"p{n}", "1" * n, "1") for n in (3, 8, 20, 9)]
    agent = make_agent(model_dir, max_prompt_length=7)
    told = (
        r"The prompt of p20 has (\d+) tokens for agent a, more than max_prompt_length \(7\)\. .* set it to \1 or more"
    )
    with pytest.raises(UserError, match=told):
        agent.check_prompts(problems)


def test_characters_that_the_tokenizer_does_not_know_are_a_warning(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = make_agent(model_dir, max_prompt_length=32, max_completion_length=40)
    agent.check_prompts([Problem("known", "1+2=", "3")])
    assert not caplog.records
    agent.check_prompts([Problem("known", "1+2=", "3"), Problem("unknown", "1 apple", "1")])
    (record,) = caplog.records
    assert re.fullmatch("Agent a: prompts have characters .* does not know. .* of unknown.", record.getMessage())
    agent.reader.tokenizer.unk_token = agent.reader.tokenizer.bos_token  # which begins every prompt
    agent.check_prompts([Problem("known", "1+2=", "3")])
    assert len(caplog.records) == 1


# --- special tokens ------------------------------------------------------------------------------------


def test_special_tokens_and_ids_beyond_the_vocabulary_are_not_readable(model_dir: Path) -> None:
    """Marks such as <|tool|> are special without being one of the tokenizer's named special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<b>", special=False)])
    tool, bold = tokenizer.convert_tokens_to_ids(["<|tool|>", "<b>"])
    assert tool not in tokenizer.all_special_ids
    readable = readable_ids(tokenizer, [EOS])
    digits = tokenizer.encode("0123456789+-=;#", add_special_tokens=False)
    assert readable == {*digits, bold}
    assert not readable & {tool, bold + 1, 9999}
    assert bold not in readable_ids(tokenizer, [bold])


def test_rollouts_with_unreadable_ids_inside_are_marked(model_dir: Path) -> None:
    """A model with more rows than its tokenizer has tokens, so hot that it samples every one of them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True)])
    tokenizer.save_pretrained(model_dir)
    model.resize_token_embeddings(24)
    model.save_pretrained(model_dir)
    agent = make_agent(model_dir, temperature=100.0, num_generations=64, max_completion_length=6)
    rollouts = agent.sample(ArithmeticTask().heldout("test", 4), step=1, sampling_round=0)
    inside = [set(r.token_ids[:-1] if r.ended else r.token_ids) for r in rollouts]
    assert {PAD, BOS, 19, 20, 23} <= set().union(*inside)
    assert [r.special_inside for r in rollouts] == [bool(ids & {PAD, BOS, 3, *range(19, 24)}) for ids in inside]
    assert {r.special_inside for r in rollouts} == {True, False}


# --- models as they are published ----------------------------------------------------------------------


def test_sampling_values_without_do_sample_do_not_prevent_saving(model_dir: Path, make_config: MakeConfig) -> None:
    edit(model_dir / "generation_config.json", temperature=0.6, top_p=0.95)
    config = make_config(agents=[{"id": "a", "model": str(model_dir)}], algorithm={"name": "gspo"}, max_steps=1)
    run_dir = train(config).run_dir
    saved = complete_checkpoints(run_dir)[-1] / "agents" / "a" / "generation_config.json"
    assert json.loads(saved.read_text())["temperature"] == 0.6
    longer = config.model_copy(update={"max_steps": 2})
    assert train(longer, resume=True).summary["steps"] == 2


def test_soft_caps_of_attention_scores_are_not_left_out(tmp_path: Path) -> None:
    """transformers' default attention would."""
    tiny("gemma2").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ZOO / "llama-plus").save_pretrained(tmp_path)
    ids = torch.tensor([[3, 14, 15, 92, 65, 35, 89]])
    with torch.no_grad():
        expected = tiny("gemma2")(ids).logits
        for fast in (True, False):
            agent = make_agent(tmp_path, fast=fast)
            assert torch.allclose(agent.model(ids).logits, expected, atol=1e-5)
            assert (agent.learner.policy.backbone is not None) == fast


# --- prompts -------------------------------------------------------------------------------------------

TELLING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}#{{ message['content'] }};{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if doubled %}+0{% endif %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.mark.parametrize(
    ("settings", "prompt", "text"),
    [
        ({}, "1+2", "<s>1+2="),
        ({"system_prompt": "77"}, "1+2", "<s>#77;1+2="),
        ({"chat_template_kwargs": {"doubled": True}}, "1+2", "<s>1+2+0="),
        ({"system_prompt": "77", "chat_template_kwargs": {"doubled": True}}, "1+2", "<s>#77;1+2+0="),
        # A prompt that brings its own system message keeps it.
        (
            {"system_prompt": "77"},
            [{"role": "system", "content": "88"}, {"role": "user", "content": "1+2"}],
            "<s>#88;1+2=",
        ),
        ({"prompt_suffix": "+3"}, "1+2", "<s>1+2+3="),
        ({"prompt_suffix": "+3", "system_prompt": "77"}, "1+2", "<s>#77;1+2+3="),
        # Of a conversation, the last message of the user gets it.
        (
            {"prompt_suffix": "+3"},
            [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "4"},
                {"role": "assistant", "content": "5"},
            ],
            "<s>124+35=",
        ),
    ],
)
def test_system_prompt_and_template_options_reach_the_chat_template(
    model_dir: Path, settings: dict[str, Any], prompt: Any, text: str
) -> None:
    (model_dir / "chat_template.jinja").write_text(TELLING)
    agent = make_agent(model_dir, **settings)
    assert agent.reader.tokenizer.decode(agent.reader.render(prompt)) == text
    if isinstance(prompt, str):
        assert agent.reader.render([{"role": "user", "content": prompt}]) == agent.reader.render(prompt)


@pytest.mark.parametrize("with_template", [True, False])
def test_bos_appears_once_where_the_tokenizer_adds_it_too(model_dir: Path, with_template: bool) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    processor = tokenizer["post_processor"]
    processor["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    processor["special_tokens"]["<s>"] = {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    if not with_template:
        (model_dir / "chat_template.jinja").unlink()
    agent = make_agent(model_dir)
    assert agent.reader.tokenizer.encode("1") == [BOS, 5]
    assert agent.reader.render("1+2=") == [BOS, 5, 14, 6, 16]


def test_messages_and_system_prompts_need_a_chat_template(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"agents\.a: .* cannot be given chat messages"):
        make_agent(model_dir).reader.render([{"role": "user", "content": "1+2="}])
    with pytest.raises(UserError, match=r"agents\.a: .* cannot be given a system_prompt"):
        make_agent(model_dir, system_prompt="77").reader.render("1+2=")


def test_a_prompt_suffix_needs_no_chat_template_but_a_message_of_the_user(model_dir: Path) -> None:
    agent = make_agent(model_dir, prompt_suffix="+3=")
    with pytest.raises(UserError, match=r"agents\.a\.prompt_suffix: .* no message of the user .* only of system, tool"):
        agent.reader.render([{"role": "system", "content": "1"}, {"role": "tool", "content": "2"}])
    (model_dir / "chat_template.jinja").unlink()
    plain = make_agent(model_dir)
    assert make_agent(model_dir, prompt_suffix="+3=").reader.render("1+2") == plain.reader.render("1+2+3=")


def test_what_is_asked_in_training_ends_with_the_prompt_suffix(make_config: MakeConfig, tmp_path: Path) -> None:
    """The task's prompt stays as it is; its tokens, and so what is sampled, are those of the longer one."""
    rows = [{"prompt": prompt, "answer": "3"} for prompt in ("1+2", "2+1")]
    runs = {}
    for name, suffix in {"short": "", "suffix": "+9=", "written": "+9="}.items():
        written = suffix if name == "written" else ""
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps({**row, "prompt": row["prompt"] + written}) + "\n" for row in rows))
        task = {"train": str(data), "reward": "exact"}
        setting = {"prompt_suffix": suffix} if name == "suffix" else {}
        settings = {"prompts_per_step": 2, "max_steps": 1, "eval_every": 0, "output_dir": str(tmp_path / name)}
        train(make_config("llama-plus", task=task, **settings, **setting))
        runs[name] = read_jsonl(RunDir(tmp_path / name).step_file("rollouts", 1))
    assert {line["prompt"] for line in runs["suffix"]} == {"1+2", "2+1"}
    texts = {name: [(line["text"], line["logp_sum"]) for line in lines] for name, lines in runs.items()}
    assert texts["suffix"] == texts["written"] != texts["short"]


# --- learning rate -------------------------------------------------------------------------------------

COS_45 = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 0, [1, (1 + COS_45) / 2, 1 / 2, (1 - COS_45) / 2]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, (1 + COS_45) / 2, 1 / 2, (1 - COS_45) / 2]),
        # The warm-up is longer than the run.
        ("linear", 3, [1 / 4, 2 / 4]),
        ("cosine", 2, [1 / 3, 2 / 3]),
    ],
)
def test_learning_rate_of_every_step(schedule: Any, warmup_steps: int, rates: list[float]) -> None:
    agent = AgentConfig(
        id="a", model="zoo:llama-plus", learning_rate=2e-4, lr_scheduler_type=schedule, warmup_steps=warmup_steps
    )
    steps = [learning_rate(agent, step, len(rates)) for step in range(1, len(rates) + 1)]
    assert steps == pytest.approx([2e-4 * rate for rate in rates])
