"""What is driven and what is not; and that a model is left as it was found."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hacrl.decoder import Backbone, CannotDrive
from hacrl.decoder.attention import NAME
from hacrl.decoder.scoring import Scorer
from tiny_models import ARCHITECTURES, VOCABULARY, logprobs_one_by_one, tiny

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89]])


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """What a driver might leave behind: the attention chosen, and anything put in place of a module's code."""
    patched = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    return model.config._attn_implementation, patched


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# --- models that are not driven ------------------------------------------------------------------------


def mamba() -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)).eval()


def bloom() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_head": 2, "n_layer": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **sizes)).eval()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny("stablelm"), "StableLmForCausalLM: .* does not hand its arguments on"),
        (mamba, "MambaForCausalLM: "),
        (bloom, "BloomForCausalLM: "),
        (lambda: tiny("gpt_oss", num_local_experts=4), "GptOssForCausalLM: .* come out differently"),
        (lambda: tiny("phimoe", sliding_window=50, num_local_experts=4), "PhimoeForCausalLM: .* sliding window"),
    ],
    ids=["stablelm", "mamba", "bloom", "gpt_oss", "phimoe"],
)
def test_a_model_that_does_not_fit_is_refused_and_left_alone(make: Any, reason: str) -> None:
    """No attention function, no attention, positions inside it, more in its softmax, a window only in the mask."""
    model = make()
    before, expected = state_of(model), logits(model)
    with pytest.raises(CannotDrive, match=reason):
        Backbone(model)
    assert state_of(model) == before
    assert torch.equal(logits(model), expected)


# --- models that are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_outside_a_model_is_its_own(kind: str) -> None:
    """To the bit: not even joined weights change what it computes."""
    model = tiny(kind)
    before, expected = state_of(model), logits(model)
    backbone = Backbone(model)
    assert state_of(model) == before
    assert torch.equal(logits(model), expected)
    with backbone.driven():
        assert model.config._attn_implementation == NAME
        with backbone.driven():  # inside, once more is nothing more
            pass
        assert model.config._attn_implementation == NAME
        Scorer(backbone)([[1, 2, 3]], [[4, 5]], 1.0)
    assert state_of(model) == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_exception_inside_leaves_it_so_too(checkpointing: bool) -> None:
    model = tiny("llama")
    backbone = Backbone(model)
    backbone.checkpointing = checkpointing
    before, expected = state_of(model), logits(model)
    with pytest.raises(IndexError), backbone.driven():
        Scorer(backbone)([[1, 2, VOCABULARY]], [[4, 5]], 1.0)
    assert state_of(model) == before
    assert torch.equal(logits(model), expected)


def test_code_that_others_put_into_a_module_is_put_back() -> None:
    model = tiny("llama")
    backbone = Backbone(model)
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    changed = logits(model)
    with backbone.driven():
        Scorer(backbone)([[1, 2, 3]], [[4, 5]], 1.0)
    assert torch.equal(logits(model), changed)


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_a_model_is_driven_until_the_last_of_several_threads_leaves(first_leaves_first: bool) -> None:
    model = tiny("llama")
    backbone = Backbone(model)
    before, expected = state_of(model), score(backbone)
    leave = [threading.Event(), threading.Event()]
    inside = [threading.Event(), threading.Event()]

    def drive(n: int) -> None:
        with backbone.driven():
            inside[n].set()
            leave[n].wait(60)

    threads = [threading.Thread(target=drive, args=(n,)) for n in range(2)]
    for thread, entered in zip(threads, inside, strict=True):
        thread.start()
        assert entered.wait(60)
    order = [0, 1] if first_leaves_first else [1, 0]
    for n in order:
        assert state_of(model) != before
        assert torch.equal(score(backbone), expected)
        leave[n].set()
        threads[n].join(60)
    assert state_of(model) == before


def test_driven_without_a_plan_is_an_error_not_a_guess() -> None:
    backbone = Backbone(tiny("gpt2"))
    with backbone.driven(), pytest.raises(RuntimeError, match="does not hand its arguments on"):
        backbone.model(IDS)


# --- joined weights ------------------------------------------------------------------------------------


def assert_joined(backbone: Backbone) -> None:
    assert backbone.lean is not None
    assert len(backbone.lean.joined) == 4  # q, k, v and gate, up in two layers
    for joined in backbone.lean.joined:
        assert joined.intact
        assert torch.equal(joined.weight, torch.cat([layer.weight for layer in joined.layers]))
        assert (joined.bias is None) == (joined.layers[0].bias is None)
        if joined.bias is not None:
            assert torch.equal(joined.bias, torch.cat([layer.bias for layer in joined.layers]))


def score(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad(), backbone.driven():
        return Scorer(backbone)([[1, 2, 3]], [[4, 5, 6]], 1.0).logp_NT[0].double()


def expected_score(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return logprobs_one_by_one(model, [1, 2, 3], [4, 5, 6], 1.0)[torch.arange(3), torch.tensor([4, 5, 6])]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # without and with biases
def test_updates_of_the_parameters_are_updates_of_the_joined_matrix(kind: str) -> None:
    model = tiny(kind)
    backbone = Backbone(model)
    assert_joined(backbone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = score(backbone)
    for _ in range(3):
        with backbone.driven():
            Scorer(backbone)([[1, 2, 3]], [[4, 5, 6]], 1.0).logp_NT.sum().backward()
        optimizer.step()
        assert_joined(backbone)
    assert (score(backbone) - before).abs().max() > 0.01
    assert torch.allclose(score(backbone), expected_score(model), atol=1e-5)
    assert backbone.moved == 0


def test_loaded_weights_reach_the_joined_matrix() -> None:
    backbone, other = Backbone(tiny("qwen2")), tiny("qwen2", seed=1)
    backbone.model.load_state_dict(other.state_dict())
    assert_joined(backbone)
    assert torch.allclose(score(backbone), expected_score(other), atol=1e-5)
    assert backbone.moved == 0


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64])
def test_weights_that_moved_are_joined_again(to: torch.dtype) -> None:
    backbone = Backbone(tiny("qwen2"))
    backbone.model.to(to)
    assert backbone.lean is not None
    assert not any(joined.intact for joined in backbone.lean.joined)
    tolerance = 0.1 if to == torch.bfloat16 else 1e-6
    assert torch.allclose(score(backbone), expected_score(backbone.model), atol=tolerance)
    assert_joined(backbone)
    assert {joined.weight.dtype for joined in backbone.lean.joined} == {to}
    assert backbone.moved == 1
    score(backbone)
    assert backbone.moved == 1


def test_joined_weights_are_saved_as_those_of_the_layers(tmp_path: Path) -> None:
    model = tiny("qwen2")
    plain = tiny("qwen2")
    Backbone(model)
    model.save_pretrained(tmp_path / "joined")
    plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / name / "model.safetensors") for name in ("joined", "plain")]
    assert files[0].stat().st_size == files[1].stat().st_size
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "joined")
    assert again.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert torch.equal(logits(again), logits(plain))
