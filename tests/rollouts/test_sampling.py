"""From logits to tokens, and from tokens to where a stop string ends them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hacrl.agents.loading import resolve_model
from hacrl.rollouts.engine import SamplingParams, choose_tokens, length_at_stop, restrict, uniform_numbers
from tiny_models import byte_tokenizer

LARGEST = 1 - 2.0**-53
"""The largest number that `torch.rand` gives in float64."""


# --- tokens --------------------------------------------------------------------------------------------


def test_restrict_keeps_the_nucleus_and_the_top_k() -> None:
    logp = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert restrict(logp, top_p=1.0, top_k=2).exp()[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert (restrict(logp, top_p=0.8, top_k=0)[0] > -torch.inf).tolist() == [True, True, False, False]
    assert (restrict(logp, top_p=0.81, top_k=0)[0] > -torch.inf).tolist() == [True, True, True, False]
    # The nucleus is that of what top-k leaves: 0.625 of it is the first token.
    assert (restrict(logp, top_p=0.6, top_k=2)[0] > -torch.inf).tolist() == [True, False, False, False]


def test_the_log_probability_recorded_is_before_top_k() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token, logp = choose_tokens(logits, SamplingParams(1, 1, 1.0, top_k=1), torch.tensor([0.5]))
    assert token.tolist() == [0]
    assert logp.tolist() == pytest.approx([logits.log_softmax(1)[0, 0].item()])


def test_a_token_is_where_the_cumulative_distribution_passes_the_number() -> None:
    uniform_B = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, LARGEST], dtype=torch.float64)
    logits_BV = torch.tensor([0.5, 0.3, 0.2]).log().mul(2.0).expand(6, 3)
    token_B, logp_B = choose_tokens(logits_BV, SamplingParams(1, 1, temperature=2.0), uniform_B)
    assert token_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert logp_B.exp().tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.2, 0.2])


def test_temperature_0_is_the_largest_with_its_log_probability_at_1() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token, logp = choose_tokens(logits, SamplingParams(1, 1, temperature=0.0), torch.tensor([0.9]))
    assert token.tolist() == [1]
    assert logp.tolist() == pytest.approx([logits.log_softmax(1)[0, 1].item()])


@given(
    st.lists(st.floats(-50, 20, width=32), min_size=1, max_size=30),
    st.one_of(st.sampled_from([0.0, LARGEST]), st.floats(0, LARGEST)),
    st.floats(0.1, 3.0),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1.0, 0.7, 0.05]),
)
def test_nothing_outside_the_restriction_is_ever_chosen(
    logits: list[float], uniform: float, temperature: float, top_k: int, top_p: float
) -> None:
    """Not for the smallest nor for the largest number either."""
    logits_BV = torch.tensor([logits])
    params = SamplingParams(1, 1, temperature, top_p, top_k)
    token_B, _ = choose_tokens(logits_BV, params, torch.tensor([uniform], dtype=torch.float64))
    allowed_BV = restrict((logits_BV / temperature).log_softmax(1), top_p, top_k)
    assert allowed_BV[0, token_B[0]].double().exp() > 0


def test_the_random_numbers_of_a_completion_are_its_own() -> None:
    everybodys = uniform_numbers(range(40), 7, seed=3)
    for rows in ([0], [39], [5, 4, 31]):
        assert torch.equal(uniform_numbers(rows, 7, seed=3), everybodys[rows])
    assert not torch.equal(uniform_numbers(range(40), 7, seed=4), everybodys)
    assert len(set(everybodys.flatten().tolist())) == 280


# --- stop strings --------------------------------------------------------------------------------------


BYTES = byte_tokenizer()
ZOO = {name: AutoTokenizer.from_pretrained(resolve_model(f"zoo:{name}")) for name in ("llama-plus", "qwen3-bpe")}


def first_length(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """The definition: the shortest beginning whose text holds a stop string."""
    for length in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:length])
        if any(stop in text for stop in stops):
            return length
    return None


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [
        ("1+2=3;#3", [";"], 6),
        ("1+2=3;#3", ["=3;"], 6),
        ("1+2=3;#3", ["#3", "2="], 4),
        ("1+2=3;#3", ["=4"], None),
        ("a🙂b", ["🙂"], 5),
        ("a🙂b", ["🙂b"], 6),
        ("a🙃b", ["🙂"], None),
        ("xyxyxz", ["xyxz"], 6),
        ("..." * 20 + "END", ["END"], 63),
    ],
)
def test_length_at_stop(text: str, stops: list[str], length: int | None) -> None:
    token_ids = BYTES.encode(text)
    assert BYTES.decode(token_ids) == text
    for checked in range(length or len(token_ids)):
        assert length_at_stop(BYTES, token_ids, checked, stops) == length


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_length_at_stop_is_the_shortest_beginning_with_a_stop_string(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([*ZOO.values()]))
    token_ids = data.draw(st.lists(st.integers(3, len(tokenizer) - 1), min_size=1, max_size=40))
    text = tokenizer.decode(token_ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    inside = text[start : start + data.draw(st.integers(1, 5))]
    stops = [stop for stop in (inside, data.draw(st.sampled_from(["==", "12", ";#"]))) if stop]
    expected = first_length(tokenizer, token_ids, stops)
    checked = data.draw(st.integers(0, (expected or len(token_ids)) - 1))
    assert length_at_stop(tokenizer, token_ids, checked, stops) == expected
