"""Answers as text, and what the math verifier makes of spellings that math-verify alone does not read."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.tasks.boxed import boxes, last_box, same_text, stated, tidy, tidy_boxes
from hacrl.tasks.verify import Pool, Verifier


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{3} or \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\fbox{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{}", ""),
        (r"} \boxed{4}", "4"),
        ("no box", None),
        (r"\boxed 4", None),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@given(st.text(alphabet="\\{}boxed $4", max_size=40))
def test_boxes_of_any_text_are_balanced(text: str) -> None:
    for start, end in boxes(text):
        inside = text[start:end].replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert inside.count("{") == inside.count("}")
        assert text[end] == "}"


def test_many_boxes_take_linear_time() -> None:
    """Quadratic time would be hours."""
    for text in ("\\boxed{" * 200_000, "\\boxed{" * 100_000 + "}" * 100_000, "{" * 400_000, "$" * 400_000):
        last_box(text)
    tidy_boxes("\\boxed{4}" * 50_000)


@pytest.mark.parametrize(
    ("answer", "tidied"),
    [
        ("4.", "4"),
        ("0.5", "0.5"),
        ("0.333...", "0.333..."),
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("1E-3", r"1 \times 10^{-3}"),
        ("2e", "2e"),
        ("2e^3", "2e^3"),
        ("-1./3", "-1/3"),
        (r"29,\!322,\!216", "29322216"),
        ("1{,}000", "1000"),
        ("1,000", "1,000"),
        (r"3\,4567", r"3\,4567"),
        (r"\$5", r"\$5"),
        ("np.arcsin(1)", r"\arcsin(1)"),
        (r"\sin^2 t", r"\sin^2(t)"),
        (r"\sin xy", r"\sin xy"),
        ("E_{1}", r"\varepsilon_{1}"),
        (r"m_{\max }", "m_{max}"),
        ("a + b", "a+b"),
    ],
)
def test_tidy(answer: str, tidied: str) -> None:
    assert tidy(answer) == tidied
    assert tidy(tidied) == tidied


def test_same_text() -> None:
    assert same_text(r"\left( 3, \dfrac{1}{2} \right).", r"(3,\frac{1}{2})")
    assert not same_text("1", "2")
    for spelling in (r"29\,322", r"29,\!322", "29 322", r"29 \; 322", "29{,}322"):
        assert same_text(spelling, "29322")
    assert same_text("1 000 000", "1000000")
    assert same_text(r"5 \, 3", "5 3")
    for one, other in (("21/2", "2 1/2"), ("5 3", "53"), (r"3 \, 4", "34"), ("1 2 3", "123"), ("3 4567", "34567")):
        assert not same_text(one, other)
    assert not same_text("", " ")


# --- in the verifier -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier([("math", 1.0)], timeout=10.0, workers=1) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("4.5e33", r"$\boxed{4.5 \times 10^{33}}$", 1.0),
        ("4.5e33", r"$\boxed{4.5 \times 10^{32}}$", 0.0),
        (r"4.5 \times 10^{33}", "It is $4.5e33$.", 1.0),
        ("-1./3", r"\boxed{-\frac13}", 1.0),
        ("np.arcsin(10/13)", r"\boxed{\arcsin(10/13)}", 1.0),
        (r"\dfrac{1}{29,\!322,\!216}", r"\boxed{1/29322216}", 1.0),
        (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\boxed{\frac{E_1+2E_2}{3}}", 1.0),
        (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\boxed{\frac{2}{3}}", 0.0),
        ("a + b + c", r"\boxed{c + b + a}", 1.0),
        (r"\sin^2 t", r"\boxed{1 - \cos^2 t}", 1.0),
        (r"30^\circ", r"\boxed{30^\circ.}", 1.0),
        (r"m_{\max }=n^{2}-n-1", r"\boxed{n^2-n-1}", 1.0),
        # GSM8K's own solutions: what stands behind #### counts, not a number near the word answer.
        ("33", "We express the answer as a percentage: 32 / 96 = 33.3 %\n#### 33", 1.0),
        ("32", "We express the answer as a percentage: 32 / 96 = 33.3 %\n#### 33", 0.0),
        ("18", "She has $2 * 9 = $18.\n#### $18", 1.0),
        ("18", r"\boxed{18} and #### 5", 1.0),
        ("2 1/2", r"\boxed{21/2}", 0.0),
        ("53", r"\boxed{5 3}", 0.0),
        ("29322", r"\boxed{29 322}", 1.0),
        # Bare LaTeX, alone and in a sentence.
        ("1/2", r"The answer is \frac{1}{2}.", 1.0),
        ("1/2", r"The answer is **\frac{1}{2}**.", 1.0),
        ("1/2", r"Therefore, x = \frac{1}{2}", 1.0),
        ("1/2", r"xy = \frac{1}{2}", 1.0),
        ("12", r"So he has 12\% left.", 1.0),
        ("12", r"The answer is 12 \text{ cm}.", 1.0),
        ("12", r"The answer is 12 \text{ square units}.", 1.0),
        ("20", r"So, 5 \times 4 = 20 apples.", 1.0),
        ("27", r"Since 5 \times 4 = 20, he has 20 + 7 = 27 apples.", 1.0),
        ("18", r"Janet makes 9 * 2 = \$18 every day at the farmer's market.", 1.0),
        ("18", r"She makes \$18 a day.", 1.0),
        ("3", r"The answer is 3\sqrt{13}.", 0.0),
        (r"3\sqrt{13}", r"The answer is 3\sqrt{13}, about 10.8.", 1.0),
        (r"2\sqrt{3}xy", r"2xy\sqrt{3}", 1.0),
        (r"\sin(x)+\frac{1}{2}", r"sin(x) + \frac{1}{2}", 1.0),
        (r"3\sqrt{13}", "The final answer is 5.\n3\\sqrt{13}", 1.0),
        ("5", "That is all\\ , and it is 5.", 1.0),
        # Two boxes are no choice, nor is a second answer behind the first.
        ("4", r"\boxed{3} or \boxed{4}", 0.0),
        ("4", r"\boxed{4} or \boxed{3}", 0.0),
        ("4", "3 or 4\n#### 3, 4", 0.0),
        ("3", r"x = \frac{1}{2} or x = 3", 0.0),
        (r"\frac{1}{2}", r"x = 3 or x = \frac{1}{2}", 0.0),
        ("3", r"The answer is \frac{1}{2} or 3.", 0.0),
        (r"\{\frac{1}{2},3\}", r"x = \frac{1}{2} or x = 3", 1.0),
        (r"\{\frac{1}{2},3\}", r"x = \frac{1}{2} and x = 3", 1.0),
        ("3.14159", r"\boxed{3.141\,59}", 1.0),
        ("0.53", r"\boxed{0.5 3}", 0.0),
        # Unreadable references: right if spelled alike, else no verdict.
        ("t(0,4]", r"\boxed{t (0, 4]}", 1.0),
        ("t(0,4]", r"\boxed{(0, 4]}", None),
        ("", r"\boxed{}", None),
    ],
)
def test_spellings(verifier: Verifier, answer: str, completion: str, reward: float | None) -> None:
    (verdict,) = verifier.score(["?"], [completion], {"answer": [answer]})
    assert verdict.reward == reward


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool("same_answer", 3.0, 1)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("completion", "others", "place"),
    [
        (r"\boxed{0.5}", [r"\boxed{3}", r"so $\boxed{\frac12}$"], 1),
        (r"\boxed{0.5}", [r"\boxed{3}"], -1),
        (r"\boxed{0.5}", [], -1),
        ("The answer is 72.", ["#### 72"], 0),
        (r"\boxed{t(0,4]}", [r"\boxed{t (0, 4]}"], 0),
        ("no idea", [r"\boxed{3}"], None),
        ("", [], None),
        (r"\boxed{}", [], None),
    ],
)
def test_equal_answers(pool: Pool, completion: str, others: list[str], place: int | None) -> None:
    assert pool.call({"completions": [completion], "others": [others]}).values == [place]


def test_equal_answers_of_hostile_texts(pool: Pool) -> None:
    assert pool.call({"completions": ["9**9**9**9"], "others": [[r"\boxed{3}"]]}).outcome == "timeout"
    for text in ("\\boxed{" * 100_000, "\x00\ud800", "$" * 1001, r"\boxed{" + "(" * 3000 + "}"):
        assert pool.call({"completions": [text], "others": [[r"\boxed{3}"]]}).outcome in (
            "returned",
            "raised",
            "timeout",
        )
    assert pool.call({"completions": ["3"], "others": [[r"\boxed{3}"]]}).values == [0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", None),
        (r"half of it, \boxed{1", None),
        ("is\n#### 41\n", " 41"),
        ("#### 41\nor not", None),
        (r"#### 3, rather \boxed{4}", "4"),
        ("about 41", None),
    ],
)
def test_the_answer_that_a_completion_states(completion: str, answer: str | None) -> None:
    assert stated(completion) == answer
