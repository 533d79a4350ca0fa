"""The Triton kernels, in Triton's interpreter, against plain torch and an independent random generator."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gumbel import gumbel_choice, philox
from hacrl.decoder import kernels

# NumPy multiplies what the kernels mask.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("H", "K", "D", "window", "softcap"),
    [
        (6, 2, 24, None, None),
        (4, 4, 16, None, None),
        (5, 1, 10, None, None),
        (6, 2, 24, 6, None),
        (4, 2, 8, 1, None),
        (6, 3, 20, None, 3.0),
        (4, 2, 16, 9, 2.0),
    ],
)
@pytest.mark.parametrize("t", [0, 5])
def test_decode_attention_is_softmax_attention(
    H: int, K: int, D: int, window: int | None, softcap: float | None, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several prompts in any order; memory behind a prompt's end and after step t holds anything."""
    monkeypatch.setattr(kernels, "DECODE_BLOCK", 16)  # the longest prompt takes two blocks
    B, P, L, T, slots, scale = 4, 3, 21, 8, 7, 0.3
    query, key, value = torch.randn(B, H, D), torch.randn(B, K, D), torch.randn(B, K, D)
    prompt = (torch.randn(P, K, L, D), torch.randn(P, K, L, D))
    own = (torch.randn(slots, K, T, D), torch.randn(slots, K, T, D))
    before = [x.clone() for x in own]
    slot_B, prompt_B = torch.tensor([3, 1, 6, 0]), torch.tensor([0, 2, 0, 1])
    length_P = torch.tensor([21, 1, 9])
    output_BHD = kernels.decode_attention(
        query, key, value, prompt, own, slot_B, prompt_B, length_P, torch.tensor([t]), scale, softcap, window
    )
    for b in range(B):
        s, p = int(slot_B[b]), int(prompt_B[b])
        keys, values = (
            torch.cat([old[p, :, : length_P[p]], mine[s, :, :t], new[b][:, None]], dim=1)[:, -(window or 0) :]
            for old, mine, new in zip(prompt, before, (key, value), strict=True)
        )
        scores = torch.einsum("krd,ksd->krs", query[b].view(K, H // K, D), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("krs,ksd->krd", scores.softmax(-1), values).reshape(H, D)
        assert torch.allclose(output_BHD[b], expected, atol=1e-5)
    for kept, was, new in zip(own, before, (key, value), strict=True):
        was[slot_B, :, t] = new
        assert torch.equal(kept, was)


# --- sampling ------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The tensors `sample_tokens` reads and writes, for N slots."""

    N: int
    T: int = 4
    stop_ids: tuple[int, ...] = (7,)
    seed: int = 123
    step: int = 0
    stream_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.stream_N = torch.arange(self.N)
        self.tokens_NT = torch.full((self.N, self.T), -1, dtype=torch.int32)
        self.logps_NT = torch.full((self.N, self.T), 9.0)
        self.length_N = torch.zeros(self.N, dtype=torch.int32)
        self.finished_N = torch.zeros(self.N, dtype=torch.int32)

    def sample(
        self,
        logits_RV: Tensor,
        row_B: Tensor,
        slot_B: Tensor,
        temperature: float = 1.0,
        source_RV: Tensor | None = None,
        position_B: Tensor | None = None,
    ) -> Tensor:
        token_B = torch.zeros(len(row_B), dtype=torch.long)
        position_B = torch.zeros_like(token_B) if position_B is None else position_B
        kernels.sample_tokens(
            logits_RV, logits_RV if source_RV is None else source_RV, row_B, slot_B, token_B, position_B,
            self.finished_N, self.stream_N, torch.tensor([self.step]), torch.tensor([self.seed]),
            self.tokens_NT, self.logps_NT, self.length_N, torch.tensor(self.stop_ids), temperature,
        )  # fmt: skip
        return token_B


def chi_squared_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """Wilson and Hilferty: the cube root of chi-squared is nearly normal; standard deviations from its mean."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def test_philox_is_the_published_one() -> None:
    """The known answer of the generator's authors for a counter and a key of zeros."""
    assert [hex(int(x[0])) for x in philox(0, np.zeros(1))] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_tokens_have_the_models_frequencies() -> None:
    """In the kernel for some rows; and for many by the generator above, which chooses the same tokens."""
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    logits_RV = torch.tensor(np.log(probs), dtype=torch.float32)[None] * 0.5
    N = 100
    table = Table(N, stop_ids=(99,))
    token_B = table.sample(logits_RV, torch.zeros(N, dtype=torch.long), torch.arange(N), temperature=0.5)
    assert abs(chi_squared_z(np.bincount(token_B, minlength=4), N * probs)) < 4
    rule = [gumbel_choice(np.log(probs), 123 + (n << 20)) for n in range(4000)]
    assert rule[:N] == token_B.tolist()
    assert abs(chi_squared_z(np.bincount(rule, minlength=4), 4000 * probs)) < 4
    assert table.logps_NT[:, 0].tolist() == pytest.approx(np.log(probs)[token_B].tolist(), abs=1e-5)


@pytest.mark.parametrize("V", [5, 16, 100, 4500])
def test_choices_are_the_gumbel_rule_for_any_vocabulary(V: int) -> None:
    """One lane's worth, several, and more than one block."""
    logits_RV = torch.randn(3, V) * 2
    table = Table(8, step=2, seed=2**61 + 5)
    row_B, slot_B = torch.tensor([0, 2, 1, 1]), torch.tensor([5, 0, 7, 2])
    token_B = table.sample(logits_RV, row_B, slot_B, temperature=0.8)
    logits = logits_RV.double().numpy() / 0.8
    for row, slot, token in zip(row_B.tolist(), slot_B.tolist(), token_B.tolist(), strict=True):
        assert token == gumbel_choice(logits[row], 2**61 + 5 + (slot << 20) + 2)
        logp = (logits_RV[row].double() / 0.8).log_softmax(0)[token]
        assert table.logps_NT[slot, 2].item() == pytest.approx(logp.item(), abs=1e-5)


def test_the_random_numbers_belong_to_the_completion_not_to_its_row() -> None:
    logits_RV = torch.randn(1, 50)
    row_B = torch.zeros(6, dtype=torch.long)
    first = Table(6)
    tokens = first.sample(logits_RV, row_B, torch.arange(6))
    moved = Table(9)
    moved.stream_N = torch.tensor([8, 3, 0, 5, 1, 8, 2, 4, 8])
    slots = torch.tensor([2, 4, 6, 1, 7, 3])  # of the streams 0 to 5
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    again = moved.sample(logits_RV, row_B, slots[order])
    assert again.tolist() == tokens[order].tolist()
    for other in (Table(6, seed=124), Table(6, step=1)):
        assert other.sample(logits_RV, row_B, torch.arange(6)).tolist() != tokens.tolist()


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits_RV = torch.randn(3, 300)
    logits_RV[1, [250, 17, 40]] = 9.0
    table = Table(3)
    token_B = table.sample(logits_RV, torch.arange(3), torch.arange(3), temperature=0.0)
    assert token_B.tolist() == [int(logits_RV[0].argmax()), 17, int(logits_RV[2].argmax())]
    expected = logits_RV.log_softmax(1)[torch.arange(3), token_B]
    assert torch.allclose(table.logps_NT[:, 0], expected, atol=1e-5)


def test_a_restricted_source_is_drawn_from_and_not_recorded() -> None:
    logits_RV = torch.randn(1, 20)
    allowed = [3, 8, 19]
    source_RV = torch.full_like(logits_RV, -torch.inf)
    source_RV[0, allowed] = logits_RV[0, allowed]
    table = Table(12)
    token_B = table.sample(logits_RV, torch.zeros(12, dtype=torch.long), torch.arange(12), 2.0, source_RV)
    assert set(token_B.tolist()) <= set(allowed)
    assert len(set(token_B.tolist())) > 1
    assert torch.allclose(table.logps_NT[:, 0], (logits_RV[0] / 2).log_softmax(0)[token_B], atol=1e-5)


@pytest.mark.parametrize("stop_ids", [(7,), (99, 7, 11)])
def test_bookkeeping(stop_ids: tuple[int, ...]) -> None:
    """Rows 0 to 3 choose 5, 7, 7 and 11; the second is finished already; slots 2 and 5 are nobody's."""
    logits_RV = torch.full((3, 20), -5.0)
    for row, token in enumerate((5, 7, 11)):
        logits_RV[row, token] = 5.0
    table = Table(6, stop_ids=stop_ids, step=2)
    table.length_N[:] = torch.tensor([2, 1, 0, 2, 2, 0])
    table.finished_N[1] = 1
    position_B = torch.tensor([10, 20, 30, 40])
    token_B = table.sample(
        logits_RV, torch.tensor([0, 1, 1, 2]), torch.tensor([3, 1, 0, 4]), 0.0, position_B=position_B
    )
    assert token_B.tolist() == [5, 7, 7, 11]
    assert position_B.tolist() == [11, 21, 31, 41]
    assert table.tokens_NT[:, 2].tolist() == [7, -1, -1, 5, 11, -1]
    assert table.length_N.tolist() == [3, 1, 0, 3, 3, 0]
    assert table.finished_N.tolist() == [1, 1, 0, 0, int(11 in stop_ids), 0]
    written = torch.zeros(6, 4, dtype=torch.bool)
    written[[0, 3, 4], 2] = True
    assert torch.equal(table.tokens_NT != -1, written)
    assert torch.equal(table.logps_NT != 9.0, written)


# --- layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("S", "H", "D"), [(3, 2, 8), (2, 5, 12), (4, 1, 2)])
def test_rotation_turns_each_pair_by_its_angle_and_back(S: int, H: int, D: int) -> None:
    wide = torch.randn(S, H, 2 * D)
    x_SHD = wide[..., :D]  # not contiguous, as a slice of queries, keys and values is not
    angle = torch.randn(S, D // 2)
    cos, sin = (torch.cat([part, part], dim=1) for part in (angle.cos(), angle.sin()))
    turned = kernels.turn(x_SHD, cos, sin, H, None)
    number = torch.complex(x_SHD[..., : D // 2], x_SHD[..., D // 2 :]) * torch.exp(1j * angle)[:, None]
    assert torch.allclose(turned, torch.cat([number.real, number.imag], dim=2), atol=1e-6)
    # The rotation back is the gradient: <rotate(x), y> = <x, rotate_back(y)>.
    y_SHD = torch.randn(S, H, D)
    back_SHD, *nothing = kernels.turn_back(y_SHD, y_SHD, cos, sin, H, None)
    assert nothing == [None, None]
    assert (turned * y_SHD).sum().item() == pytest.approx((x_SHD * back_SHD).sum().item(), abs=1e-4)


@pytest.mark.parametrize(("S", "H", "K", "D"), [(3, 2, 1, 8), (2, 9, 3, 12), (5, 1, 1, 2)])
def test_norms_and_rotation_are_the_plain_ones_and_so_are_their_gradients(
    S: int, H: int, K: int, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of more than one program, and tokens that programs share."""
    monkeypatch.setattr(kernels, "SUMS", 2)
    x_SHD = torch.randn(S, (H + 2 * K), D, dtype=torch.float64).requires_grad_()
    weights = [(1 + torch.randn(D, dtype=torch.float64) / 4).requires_grad_() for _ in range(2)]
    angle, grad_SHD = torch.randn(S, D // 2), torch.randn(S, H + K, D)
    cos, sin = (torch.cat([part, part], dim=1) for part in (angle.cos(), angle.sin()))
    parts = zip(x_SHD[:, : H + K].split([H, K], dim=1), weights, strict=True)
    normed = torch.cat([F.rms_norm(part, (D,), weight, 1e-3) for part, weight in parts], dim=1)
    first, second = normed.chunk(2, dim=2)
    expected = normed * cos[:, None] + torch.cat([-second, first], dim=2) * sin[:, None]
    expected.backward(grad_SHD.double())
    given = x_SHD.detach().float()[:, : H + K]
    norms = (*(weight.detach().float() for weight in weights), 1e-3)
    assert torch.allclose(kernels.turn(given, cos, sin, H, norms).double(), expected, atol=1e-5)
    grads = kernels.turn_back(grad_SHD, given, cos, sin, H, norms)
    for grad, right in zip(grads, (x_SHD.grad[:, : H + K], *(weight.grad for weight in weights)), strict=True):
        assert torch.allclose(grad.double(), right, atol=2e-5)


@pytest.mark.parametrize(("S", "size"), [(3, 37), (2, 1100), (1, 1)])
def test_swiglu_and_its_gradient(S: int, size: int) -> None:
    both = torch.randn(S, 2 * size, requires_grad=True)
    gate, up = both.chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert torch.allclose(kernels.swiglu(gate.detach(), up.detach()), expected, atol=1e-6)
    grad = torch.randn(S, size)
    expected.backward(grad)
    assert torch.allclose(kernels.swiglu_backward(gate.detach(), up.detach(), grad), both.grad, atol=1e-5)


# --- log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [2, 300, 5000])
def test_logprobs_norms_and_entropies(V: int) -> None:
    logits_MV = torch.randn(4, V + 3)[:, :V] * 3 + torch.tensor([[0.0], [50.0], [-50.0], [0.0]])
    logits_MV[3] = -torch.inf
    logits_MV[3, V - 1] = 4.0  # one token has all the probability
    target_M = torch.tensor([0, V - 1, V // 2, V - 1])
    logp_M, norm_M, entropy_M = kernels.logprobs(logits_MV, target_M, 0.7)
    logits = logits_MV.double() / 0.7
    logp_MV = logits.log_softmax(1)
    assert torch.allclose(logp_M.double(), logp_MV[torch.arange(4), target_M], atol=2e-5)
    assert torch.allclose(norm_M.double(), logits.logsumexp(1), rtol=1e-6)
    expected_M = -torch.special.xlogy(logp_MV.exp(), logp_MV.exp()).sum(1)
    assert torch.allclose(entropy_M.double(), expected_M, atol=5e-5)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("V", [2, 300, 2500])
def test_the_gradient_of_logprobs(V: int, softcap: float | None) -> None:
    raw_MV = torch.randn(3, V, dtype=torch.float64, requires_grad=True)
    scale, temperature = 2.0, 0.7
    logits_MV = raw_MV * scale if softcap is None else softcap * torch.tanh(raw_MV * scale / softcap)
    target_M, grad_M = torch.tensor([0, V - 1, V // 2]), torch.randn(3)
    norm_M = (logits_MV / temperature).logsumexp(1)
    (logits_MV[torch.arange(3), target_M] / temperature - norm_M).backward(grad_M.double())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        delta_MV = kernels.logit_gradient(
            logits_MV.detach().float(), target_M, norm_M.detach().float(), grad_M, temperature, scale, softcap, dtype
        )
        assert delta_MV.dtype == dtype
        assert torch.allclose(delta_MV.double(), raw_MV.grad, atol=tolerance)
