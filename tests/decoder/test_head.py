"""Log-probabilities in chunks against autograd through one table of logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacrl.decoder import head as head_module
from hacrl.decoder.head import Head, wide_product
from reference import entropy
from tiny_models import distance, tiny


def plain(head: Head, hidden_MD: Tensor) -> Tensor:
    logits_MV = hidden_MD @ head.weight_VD.t()
    if head.bias_V is not None:
        logits_MV = logits_MV + head.bias_V
    logits_MV = logits_MV * head.scale
    return logits_MV if head.softcap is None else head.softcap * torch.tanh(logits_MV / head.softcap)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(2, 40)),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunks_give_the_values_and_gradients_of_one_table(
    sizes: tuple[int, int, int],
    chunk: int,
    temperature: float,
    scale: float,
    softcap: float | None,
    bias: bool,
    seed: int,
) -> None:
    M, D, V = sizes
    torch.manual_seed(seed)
    hidden_MD, weight_VD, bias_V = (torch.randn(*shape, dtype=torch.float64) for shape in ((M, D), (V, D), (V,)))
    inputs = [x.requires_grad_() for x in ([hidden_MD, weight_VD, bias_V] if bias else [hidden_MD, weight_VD])]
    head = Head(weight_VD, bias_V if bias else None, scale, softcap)
    target_M, grad_M = torch.randint(V, (M,)), torch.randn(M, dtype=torch.float64)

    logp_MV = (plain(head, hidden_MD) / temperature).log_softmax(1)
    expected_M = logp_MV[torch.arange(M), target_M]
    expected_grads = torch.autograd.grad(expected_M, inputs, grad_M, retain_graph=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "CHUNK_ELEMENTS", chunk)
        logp_M, entropy_M = head.logprobs(hidden_MD, target_M, temperature)
        grads = torch.autograd.grad(logp_M, inputs, grad_M)
        both_M = head.logprobs(hidden_MD, target_M, temperature, entropy_gradient=True)
        both_grads = torch.autograd.grad(both_M, inputs, (grad_M, grad_M.flip(0)))
    assert torch.allclose(logp_M, expected_M, rtol=1e-12, atol=1e-12)
    assert torch.allclose(entropy_M, -(logp_MV.exp() * logp_MV).sum(1), rtol=1e-11, atol=1e-11)
    assert not entropy_M.requires_grad
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-11, atol=1e-11)
    assert [x.tolist() for x in both_M] == [logp_M.tolist(), entropy_M.tolist()]
    expected_entropy_M = -(logp_MV.exp() * logp_MV).sum(1)
    expected_grads = torch.autograd.grad((expected_M, expected_entropy_M), inputs, (grad_M, grad_M.flip(0)))
    for grad, expected in zip(both_grads, expected_grads, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_entropy_and_its_gradient_by_hand(temperature: float) -> None:
    """One hidden state of 1 makes the weights the logits; the slopes are derived by hand in the reference."""
    logits = [0.5, -3.0, 2.0, 2.0, -40.0]
    value, slopes = entropy(logits, temperature)
    weight_VD = torch.tensor(logits, dtype=torch.float64)[:, None].requires_grad_()
    one_MD, target_M = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    _, entropy_M = Head(weight_VD, None, 1.0, None).logprobs(one_MD, target_M, temperature, entropy_gradient=True)
    (grad_VD,) = torch.autograd.grad(entropy_M, weight_VD, torch.ones(1, dtype=torch.float64))
    assert entropy_M.tolist() == pytest.approx([value], rel=1e-12)
    assert grad_VD.squeeze(1).tolist() == pytest.approx(slopes, rel=1e-10, abs=1e-13)
    # The reference itself, by finite differences.
    for v, slope in enumerate(slopes):
        up, down = ([*logits[:v], logits[v] + step, *logits[v + 1 :]] for step in (1e-5, -1e-5))
        assert (entropy(up, temperature)[0] - entropy(down, temperature)[0]) / 2e-5 == pytest.approx(slope, abs=1e-8)


def test_no_more_logits_at_a_time_than_a_chunk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    logits = Head.logits

    def watched(self: Head, hidden_MD: Tensor) -> Tensor:
        seen.append((len(hidden_MD), self.weight_VD.shape[0]))
        return logits(self, hidden_MD)

    monkeypatch.setattr(Head, "logits", watched)
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 64)
    hidden_MD = torch.randn(20, 4, requires_grad=True)
    logp_M, _ = Head(torch.randn(15, 4), None, 1.0, None).logprobs(hidden_MD, torch.zeros(20, dtype=torch.long), 1.0)
    logp_M.sum().backward()
    assert seen == 2 * [(4, 15)] * 5


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.5}),
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("phi", {}),  # with a bias
    ],
)
def test_logits_are_the_models(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, torch.float64, **changes)
    head = Head.of(model)
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    with torch.no_grad():
        expected = model(ids).logits[0]
        hidden = model.base_model(ids).last_hidden_state[0]
        assert distance([head.logits(hidden)], [expected]) < 1e-12
    assert (head.scale != 1, head.softcap is not None, head.bias_V is not None) == (
        kind in ("granite", "cohere"),
        kind == "gemma2",
        kind == "phi",
    )


def test_products_of_bfloat16_are_not_rounded_to_it() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(7, 65).bfloat16(), torch.randn(65, 5).bfloat16()
    product = wide_product(a, b.t())
    assert product.dtype == torch.float32
    assert torch.allclose(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert (product - product.bfloat16()).abs().max() > 1e-3


def test_gradients_of_a_bfloat16_head_are_summed_in_float32() -> None:
    """A thousand equal steps of 2^-11 on top of 1: each would vanish in bfloat16, their sum is about a half."""
    M, V = 1000, 4
    hidden_MD = torch.ones(M, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(V, 1, dtype=torch.bfloat16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "CHUNK_ELEMENTS", V)  # a row at a time
        logp_M, _ = Head(weight_VD, None, 1.0, None).logprobs(hidden_MD, torch.zeros(M, dtype=torch.long), 1.0)
        grad_M = torch.full((M,), 2.0**-11)
        grad_M[0] = 1.0
        (grad_VD,) = torch.autograd.grad(logp_M, weight_VD, grad_M)
    assert logp_M.dtype == torch.float32
    total = 1 + (M - 1) * 2.0**-11
    assert grad_VD.squeeze(1).tolist() == pytest.approx([0.75 * total, *[-0.25 * total] * 3], rel=2**-8)
