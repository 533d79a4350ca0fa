"""Products by oneDNN are those of torch itself, with gradients, and never of weights that have changed since."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from hacrl.decoder import Backbone, products
from hacrl.decoder.scoring import Scorer
from tiny_models import tiny


@pytest.fixture(autouse=True)
def _all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.HAS_ONEDNN  # as in every build of torch for a CPU
    monkeypatch.setattr(products, "WORTH_IT", 1)
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_gradients_are_torchs(rows: int, bias: bool) -> None:
    """Also of a weight in two parts, whose gradients are separate."""
    given = [torch.randn(2, rows, 12), torch.randn(20, 12), *([torch.randn(20)] if bias else [])]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in given] for _ in range(2))
    parts = [theirs[1][:8].detach().requires_grad_(), theirs[1][8:].detach().requires_grad_()]
    x = given[0].clone().requires_grad_()
    grad = torch.randn(2, rows, 20)
    outputs = [
        products.linear(*ours, *([] if bias else [None])),
        torch.nn.functional.linear(*theirs),
        products.linear_in_parts(x, given[1], given[2] if bias else None, parts, []),
    ]
    for output in outputs:
        assert torch.allclose(output, outputs[1], atol=1e-5)
        output.backward(grad)
    for own, right in zip(ours, theirs, strict=True):
        assert torch.allclose(own.grad, right.grad, atol=1e-4)
    assert torch.allclose(torch.cat([part.grad for part in parts]), theirs[1].grad, atol=1e-4)
    assert torch.allclose(x.grad, theirs[0].grad, atol=1e-4)
    packed = products.pack(given[1])
    assert packed is not None
    plain = products.product(given[0], given[1], given[2] if bias else None, packed)
    assert torch.allclose(plain, outputs[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_packed_weights_are_forgotten_before_they_change(kind: str) -> None:
    model = tiny(kind)
    backbone = Backbone(model)

    def logps(pack: bool) -> Tensor:
        with torch.no_grad(), backbone.driven(), backbone.packed() if pack else nullcontext():
            return Scorer(backbone)([[5, 6, 7]], [[8, 9, 10, 11]], 1.0).logp_NT

    before = logps(pack=True)
    assert torch.allclose(before, logps(pack=False), atol=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    after = logps(pack=False)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(logps(pack=True), after, atol=1e-5)
