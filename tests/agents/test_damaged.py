"""Model folders that are damaged or do not fit together: a sentence that names agent and folder, before training."""

import json
import pickle
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import FAST, MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO, load_model
from hacrl.algorithms import GSPO
from hacrl.config import AgentConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.errors import TrainingDiverged, UserError
from hacrl.evaluation.answers import Answerer
from hacrl.evaluation.heldout import evaluate_target
from hacrl.rollouts import prompts
from hacrl.rollouts.prompts import Beginning, encode
from hacrl.run import train
from hacrl.tasks.problem import Problem
from hacrl.training.plan import plan
from hacrl.warmup.stage import warm_up
from tiny_models import tiny

Damage = Callable[[Path], Any]
"""What is done to a model's folder."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZOO / "llama-plus", tmp_path / "model"))


def make_agent(folder: Path, **settings: Any) -> Agent:
    return Agent(AgentConfig(id="ann", model=str(folder), log_kl=False, fast=FAST, **settings), 0, GSPO(), seed=0)


def write(name: str, text: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def edit(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        state = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def add(name: str, tensor: Tensor) -> Damage:
    return weights(lambda state: state.update({name: tensor}))


def number(value: float) -> Damage:
    return weights(lambda state: state["model.layers.1.mlp.up_proj.weight"].view(-1)[7:8].fill_(value))


def index(text: str) -> Damage:
    return lambda folder: (remove("model.safetensors")(folder), write("model.safetensors.index.json", text)(folder))


def template(text: str) -> Damage:
    return write("chat_template.jinja", text)


def given_in_the_config(chat_template: Any) -> Damage:
    change = edit("tokenizer_config.json", chat_template=chat_template)
    return lambda folder: (remove("chat_template.jinja")(folder), change(folder))


CONFIGS: dict[str, Damage] = {
    "a list": write("config.json", "[]"),
    "empty": write("config.json", "{}"),
    "cut": cut("config.json"),
    "of an unknown type": edit("config.json", model_type="nonsense"),
    "of two types": edit("config.json", model_type=["llama"]),
    "of an encoder": edit("config.json", model_type="t5"),
    "layers in words": edit("config.json", num_hidden_layers="two"),
    "layers without end": edit("config.json", num_hidden_layers=10**9),
    "no layers": edit("config.json", num_hidden_layers=0),
    "fewer layers than none": edit("config.json", num_hidden_layers=-1),
    "positions that do not turn": edit("config.json", rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
    "no heads": edit("config.json", num_attention_heads=0),
    "a negative size": edit("config.json", hidden_size=-4),
    "an unknown activation": edit("config.json", hidden_act="nonsense"),
}
MISFITS: dict[str, tuple[Damage, str]] = {
    "fewer layers": (edit("config.json", num_hidden_layers=1), r"18 weights .* the first is model\.layers\.1\.input_"),
    "more layers": (edit("config.json", num_hidden_layers=5), r"lack 18 weights, the first is model\.layers\.3\."),
    "one layer more": (
        add("model.layers.3.input_layernorm.weight", torch.zeros(96)),
        r"1 weights .* the first is model\.layers\.3\.input_layernorm\.weight",
    ),
    "another shape": (
        edit("config.json", vocab_size=7),
        r"embed_tokens\.weight has the shape \(19, 96\), .* \(7, 96\)",
    ),
    "a huge width": (edit("config.json", hidden_size=10**12), r"config\.json: it describes 3,482,000,000,000,000 para"),
    "a huge vocabulary": (edit("config.json", vocab_size=10**9), r"config\.json: it describes 96,\d\d\d,.* bytes"),
    "NaN": (number(torch.nan), r"the weight model\.layers\.1\.mlp\.up_proj\.weight has numbers that are not finite"),
    "infinity": (number(-torch.inf), r"the weight model\.layers\.1\.mlp\.up_proj\.weight has numbers that are not fin"),
    "overflow": (weights(lambda state: state["model.norm.weight"].fill_(1e38)), "but its logits are not"),
    "NaN in config.json": (edit("config.json", rms_norm_eps=float("nan")), "but its logits are not"),
    "no weights": (remove("model.safetensors"), "no file named model.safetensors"),
    "weights cut": (cut("model.safetensors"), r"model\.safetensors: SafetensorError"),
    "weights that are none": (write("model.safetensors", b"garbage"), r"model\.safetensors: SafetensorError"),
    "a header that lies": (write("model.safetensors", b"\xff" * 7 + b"\x00{}"), r"model\.safetensors: SafetensorError"),
    "a file of the index": (index('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'), r"b\.safetensors"),
    "an empty index": (index("{}"), "weight_map"),
    "a cut index": (index('{"meta'), "Unterminated string"),
}
TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "an empty tokenizer": (write("tokenizer.json", "{}"), "tokenizer: "),
    "a list for a tokenizer": (write("tokenizer.json", "[]"), "tokenizer: "),
    "a cut tokenizer": (cut("tokenizer.json"), "tokenizer: "),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer: "),
    "a list for its config": (write("tokenizer_config.json", "[]"), "tokenizer: "),
    "a number for a token": (edit("tokenizer_config.json", eos_token=5), "tokenizer: .*eos_token"),
    "broken generation config": (write("generation_config.json", "garbage"), r"generation_config\.json: "),
    "a list for generation config": (write("generation_config.json", "[]"), r"generation_config\.json: "),
    "an end beyond the vocabulary": (
        edit("generation_config.json", eos_token_id=[2, 19]),
        "token 19, .* tokens 0 to 18",
    ),
    "a negative end": (edit("generation_config.json", eos_token_id=-1), "end-of-turn token -1"),
    "an end in words": (edit("generation_config.json", eos_token_id="stop"), "end-of-turn token 'stop'"),
    "an end that is none": (edit("generation_config.json", eos_token_id={"a": 2}), "end-of-turn token {'a': 2}"),
    "adapters of a list": (write("adapter_config.json", "[]"), r"adapter_config\.json: "),
    "adapters of nothing": (write("adapter_config.json", "{}"), r"adapter_config\.json: .*base_model_name_or_path"),
    "adapters of a number": (write("adapter_config.json", '{"base_model_name_or_path": 5}'), r"adapter_config\.json: "),
    "adapters cut": (write("adapter_config.json", '{"base'), r"adapter_config\.json: "),
}
TEMPLATES: dict[str, tuple[Damage, str]] = {
    "a syntax error": (template("{% for x in %}"), "refuses a prompt: Expected an expression"),
    "a long range": (template("{% for i in range(10**9) %}x{% endfor %}"), r"OverflowError: .*\(100000\)\.$"),
    "recursion": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "RecursionError"),
    "a refusal": (template("{{ raise_exception('Never.') }}"), r"refuses a prompt: Never\.$"),
    "an unknown name": (template("{{ nothing.at.all }}"), "'nothing' is undefined"),
    "nothing": (template("{{ nothing }}"), "turn a prompt into zero tokens"),
    "a wrong type": (template("{{ 1 + 'a' }}"), "TypeError"),
    "bytes": (write("chat_template.jinja", b"\xff\xfe\x00"), "tokenizer: "),
    "a number for a template": (given_in_the_config(5), "refuses a prompt"),
    "a list for a template": (given_in_the_config([1]), "tokenizer: "),
    "100 GB": (template("{% set x = 10**11 %}{{ 'x' * x }}"), "for a short prompt it needs more than 1 GiB of memory"),
    "10 MB": (template("{% set x = 10**7 %}{{ 'x' * x }}"), "for a short prompt it makes 10,000,000 characters"),
}
ALL = {**{name: (damage, r"config\.json: ") for name, damage in CONFIGS.items()}, **MISFITS, **TOKENIZERS, **TEMPLATES}


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_folder_is_told_with_agent_and_folder_before_training(
    name: str, folder: Path, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    damage, message = ALL[name]
    damage(folder)
    config = make_config(agents=[{"id": "ann", "model": str(folder)}], algorithm={"name": "gspo"}, max_steps=1)
    with pytest.raises(UserError, match=message) as caught:
        train(config, console=Console(file=StringIO()))
    told = str(caught.value)
    assert told.startswith("agents.ann")
    assert str(folder) in told
    assert told.endswith(".")
    assert len(told) < 800
    assert "LOAD REPORT" not in caplog.text
    assert not Path(config.output_dir).exists()


def test_code_of_a_model_folder_does_not_run(folder: Path, make_config: MakeConfig) -> None:
    """Neither a Python file that config.json names, nor a pickle of weights."""
    ran = folder / "ran"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (ran,)

    edit("config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})(folder)
    write("own.py", f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")(folder)
    config = make_config(agents=[{"id": "ann", "model": str(folder)}], algorithm={"name": "gspo"}, max_steps=1)
    with pytest.raises(UserError, match=r"code of its own, which was not run. .* trust_remote_code: true"):
        train(config)
    shutil.copy(ZOO / "llama-plus" / "config.json", folder)
    remove("model.safetensors")(folder)
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"model.embed_tokens.weight": Malicious()}, file)
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        train(config)
    assert not ran.exists()


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("text", [ENDLESS, "{% generation %}{{ 10 ** (10 ** 10) }}{% endgeneration %}"])
def test_a_template_that_does_not_end_is_told(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even inside one multiplication, which no signal interrupts."""
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 1.0)
    template(text)(folder)
    with pytest.raises(
        UserError, match=r"agents\.ann\.model: .* for a short prompt it takes longer than 1 s\. Correct"
    ):
        make_agent(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dry_run_tells_of_a_damaged_config(name: str, folder: Path, make_config: MakeConfig) -> None:
    CONFIGS[name](folder)
    with pytest.raises(UserError, match=rf"agents\.ann\.model: {folder} could not be loaded: config\.json: "):
        plan(make_config(agents=[{"id": "ann", "model": str(folder)}], algorithm={"name": "gspo"}))


@pytest.mark.parametrize("name", ["fewer layers", "NaN", "an empty tokenizer", "a long range", "adapters cut"])
def test_evaluation_tells_it_too(name: str, folder: Path) -> None:
    damage, message = ALL[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        list(evaluate_target(str(folder), "demo", step=None, num_problems=2, output=None))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["an empty tokenizer", "a list for a tokenizer", "a number for a token"])
def test_new_weights_with_a_damaged_tokenizer_are_told(name: str, folder: Path, tmp_path: Path) -> None:
    TOKENIZERS[name][0](folder)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "completion": "#3"}\n')
    agent = {"id": "ann", "init": "random", "tokenizer": str(folder), "config": {"model_type": "llama"}}
    settings = {"agents": [agent], "data": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "warmup")}
    with pytest.raises(UserError, match=r"agents\.ann: a model with new weights cannot be made: "):
        warm_up(WarmupConfig.from_dict(settings), console=Console(file=StringIO()))


# --- what is no damage ---------------------------------------------------------------------------------

OLD = {
    "gpt2": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "lm_head.weight"],
    "gpt_neox": ["gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"],
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "gemma": ["lm_head.weight"],
    "ernie4_5_moe": ["model.mtp_linear_proj.0.weight"],
}


@pytest.mark.parametrize("kind", OLD)
def test_weights_that_published_models_have_beside_their_own_are_left_out(kind: str, tmp_path: Path) -> None:
    """Tables that earlier versions saved, an output layer tied to the embeddings, layers that guess ahead."""
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    for name in OLD[kind]:
        add(name, model.get_input_embeddings().weight.detach().clone() if "lm_head" in name else torch.ones(4))(
            tmp_path
        )
    loaded = load_model(AgentConfig(id="ann", model=str(tmp_path)))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


# --- vocabularies --------------------------------------------------------------------------------------


def with_token(folder: Path, special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|image|>", special=special)])
    tokenizer.save_pretrained(folder)


def test_a_head_that_judges_is_left_out_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add("score.weight", torch.zeros(1, 96))(folder)
    make_agent(folder)
    assert "do not belong to a language model are left out: 1, the first is score.weight." in caplog.text


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"early_stopping": True}, {"pad_token_id": -1}], ids=str)
def test_a_generation_config_that_cannot_be_saved_keeps_its_tokens(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    edit("generation_config.json", **settings)(folder)
    agent = make_agent(folder)
    agent.save(tmp_path / "saved", tmp_path / "state.pt")
    assert make_agent(tmp_path / "saved").reader.stop_ids == agent.reader.stop_ids


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder: Path, make_config: MakeConfig) -> None:
    with_token(folder, special=False)
    config = make_config(agents=[{"id": "ann", "model": str(folder)}], algorithm={"name": "gspo"})
    with pytest.raises(UserError, match=rf"agents\.ann\.model: .* {folder} has the token 19, .* the tokens 0 to 18"):
        train(config, console=Console(file=StringIO()))
    with pytest.raises(UserError, match="has the token 19"):
        list(evaluate_target(str(folder), "demo", step=None, num_problems=2, output=None))


def test_special_tokens_beyond_the_vocabulary_matter_in_prompts_only(folder: Path) -> None:
    with_token(folder, special=True)
    agent = make_agent(folder)
    agent.check_prompts([Problem("plain", "1+2=", "3")])
    with pytest.raises(UserError, match=r"agents\.ann: a prompt has the token '<\|image\|>' \(19\), .* tokens 0 to 18"):
        agent.check_prompts([Problem("image", "<|image|>1+2=", "3")])


# --- logits that are not finite ------------------------------------------------------------------------


def test_whose_logits_are_not_finite_is_told(folder: Path) -> None:
    """Before the first update the model is to blame, later training."""
    agent, problems = make_agent(folder, max_completion_length=4), [Problem("p", "1+2=", "3")]
    with torch.no_grad():
        agent.model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(UserError, match=rf"Agent ann: {folder} gives logits that are not finite, before any update"):
        agent.answer(problems)
    agent.learner.updates = 1
    with pytest.raises(TrainingDiverged, match=r"^Agent ann: its logits are not finite"):
        agent.sample(problems, step=2, sampling_round=0)


# --- long prompts --------------------------------------------------------------------------------------


def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(folder: Path) -> None:
    agent = make_agent(folder, max_prompt_length=7)
    ids = agent.reader.render("1+2=" * 250_000)
    assert isinstance(ids, Beginning)
    assert 7 < len(ids) < 10_000
    told = rf"The prompt of long has more than {len(ids)} tokens for agent ann, more than max_prompt_length \(7\)\. Sh"
    with pytest.raises(UserError, match=told):
        agent.check_prompts([Problem("short", "1+2=" * 50, "3"), Problem("long", "1+2=" * 250_000, "3")])
    with pytest.raises(UserError, match=told):
        agent.reader.prompt_ids(Problem("long", "1+2=" * 250_000, "3"))
    with pytest.raises(UserError, match=r"has 201 tokens for agent ann, .* set it to 201 or more"):
        agent.check_prompts([Problem("short", "1+2=" * 50, "3")])


def test_benchmarks_count_a_prompt_that_is_far_too_long_as_one_that_does_not_fit(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = Answerer(AgentConfig(id="model", model=str(folder)), as_trained=False)
    ids = [sampler.prompt_ids(Problem("p", "1+2=" * count, "3")) for count in (1, 250_000)]
    assert [isinstance(own, Beginning) for own in ids] == [False, True]
    sampler.check("sums", ids)
    assert f"sums: 1 prompts do not fit into {folder} (256 positions): counted as wrong" in caplog.text
    with pytest.raises(UserError, match=f"sums-long: the shortest prompt has at least {len(ids[1])} tokens"):
        sampler.check("sums-long", ids[1:])


@pytest.mark.parametrize("text", ["yes" + " " * 100_000 + "yes", "yes " + "unknown" * 10_000, "yes " * 20])
def test_a_long_text_of_few_tokens_is_read_as_a_whole(text: str) -> None:
    words = Tokenizer(models.WordLevel({"yes": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    ids = encode(tokenizer, text, limit=20, add_special_tokens=False)
    assert not isinstance(ids, Beginning)
    assert ids == tokenizer.encode(text)
    assert isinstance(encode(tokenizer, "yes " * 1000, limit=20, add_special_tokens=False), Beginning)
