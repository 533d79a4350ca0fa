r"""Finds answers in \boxed{...}, and rewrites spellings that math-verify cannot read into ones that it can.

Child processes load this file by its path, so it imports only the standard library.
"""

import re

TOKEN = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\[\s\S]|[{}]")

REPAIRS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\$", ""),
        (r"(?<=\d)(?:,\\!|\{,\}|\\,)(?=\d{3}(?!\d))", ""),  # thousands: 29,\!322 and 29{,}322
        (r"\\!", ""),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^{])", ""),
        (r"(?<=\d)\.(?![\d.])", ""),  # the decimal point of -1./3
        (r"\b(?:np|math)\.(?=[a-z])", ""),
        (r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sin|cos|tan|log|ln|exp)(?=\()", r"\\\1"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?:\^\{?\w\}?)?)\s+([a-zA-Z])(?![a-zA-Z])", r"\1(\2)"),  # not tons
        (r"_\{?\\(max|min|odot|oplus|infty)\b\s*\}?", r"_{\1}"),
        (r"(?<![\\a-zA-Z])E(?=_)", r"\\varepsilon"),  # not 2.718...
        (r"(?<![\\a-zA-Z])e(?=_)", r"\\epsilon"),
        (r"\s*([-+*/=<>])\s*", r"\1"),  # in "a + b + c" math-verify would read c as cups
    )
]
SCIENTIFIC = re.compile(r"(?<![\w\\.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.]*\w)")
END = re.compile(r"(?:\\[,;: ]|(?<!\.)[.,;]|\s)+$")
SPACE = r"(?:\s|\\[,;: ])+"
GAP = re.compile(rf"(\.(?:\d{{3}}{SPACE})+\d{{1,3}}(?!\d))|(?<=\d){SPACE}(?=\d)(?!\d{{3}}(?!\d))")
"""Space between two numbers, as in 2 1/2, not inside one, as in 29 322. The group matches a decimal like .141 59."""
LAYOUT = re.compile(r"\s|\\left(?![a-z])|\\right(?![a-z])|\\[,;: ]")


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Start and end of the contents of each \boxed{...}, sorted by start; unclosed boxes are left out."""
    found: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []
    for token in TOKEN.finditer(text):
        if token[0] == "}":
            start, boxed = opened.pop() if opened else (0, False)
            if boxed:
                found.append((start, token.start()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append((token.end(), token[0] != "{"))
    return sorted(found)


def last_box(text: str) -> str | None:
    """The contents of the last box in the text; None if there is no box."""
    spans = boxes(text)
    return text[slice(*spans[-1])].strip() if spans else None


def stated(completion: str) -> str | None:
    """The answer that a completion marks: the contents of its only box, or the text after #### in the last line. None
    if there are several boxes, because the completion has not chosen one; math-verify judges these."""
    spans = boxes(completion)
    if spans or "\\boxed" in completion:
        return completion[slice(*spans[0])] if len(spans) == 1 else None
    _, marked, answer = completion.rstrip().rpartition("\n")[2].rpartition("####")
    return answer if marked else None


def scientific(text: str) -> str:
    r"""Write 4.5e33 as 4.5 \times 10^{33}."""
    return SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def tidy(answer: str) -> str:
    """Rewrite an answer so that math-verify can read it; its value stays the same."""
    answer = END.sub("", scientific(answer.strip()))
    for pattern, replacement in REPAIRS:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def tidy_boxes(text: str) -> str:
    """Apply `tidy` to the contents of all boxes in a text."""
    parts, position = [], 0
    for start, end in boxes(text):
        if start >= position:
            parts += [text[position:start], tidy(text[start:end])]
            position = end
    return "".join([*parts, text[position:]])


def same_text(one: str, other: str) -> bool:
    """Whether two answers have the same spelling, apart from layout."""
    return _plain(one) == _plain(other) != ""


def _plain(answer: str) -> str:
    spaced = GAP.sub(lambda found: found[1] or "~", tidy(answer))
    return LAYOUT.sub("", spaced).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
