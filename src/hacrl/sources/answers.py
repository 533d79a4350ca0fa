"""Reads what a server with OpenAI's interface answers. The server may be broken or hostile: nothing is believed."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from hacrl.files import mismatch
from hacrl.rollouts.rollout import FinishReason

Api = Literal["chat", "completions"]
Entry = tuple[bytes, float]
"""A token as text, and its log-probability."""

MOST_BYTES_PER_TOKEN = 64
"""An answer with more bytes for each token that it may have is not used: no tokenizer would fit them in."""
BYTES_PER_TOKEN = 4
"""Text without a number of tokens counts as one token for so many bytes."""
MOST_TOKENS = 2**24
"""A server that reports more tokens than this of one request is not believed."""
LEAST_LOGP = -9999.0
"""Servers report this number in place of minus infinity; it and all below are no log-probabilities."""
LARGEST_LOGP = 1e-3
"""Rounding may lift a log-probability above 0; more than this is no log-probability."""

CHOICE = {"finish_reason": (str, NoneType)}
SHAPES = {
    "chat": {"choices": [{**CHOICE, "message": {"content?": (str, NoneType)}}]},
    "completions": {"choices": [{**CHOICE, "text": str}]},
}
REFUSALS = ("content_filter", "tool_calls", "function_call")
"""Reasons, besides stop and length, for which OpenAI's interface ends an answer. None leaves a whole text."""


@dataclass
class Outcome:
    """What became of a request: an answer, or why there is none."""

    failed: str = ""
    """Why there is no answer; empty if there is one."""
    text: str = ""
    logps: list[float] | None = None
    """Log-probability of each token of the text, and of the end of turn if the source ended it; None: not known."""
    num_tokens: int = 0
    finish_reason: FinishReason = "stop"
    ended: bool = False
    """Whether the source ended its turn. A stop string may have ended the text instead."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    """Tokens that the request has used, as the server counts them."""
    unknown_tokens: int = 0
    """The most that a request can have used that did not end in time."""
    retries: int = 0
    seconds: float = 0.0
    """How long the answer took, without the attempts before it."""

    @property
    def is_answered(self) -> bool:
        """Whether the server has answered, even if the answer cannot be used."""
        return self.answer_tokens > 0


@dataclass(frozen=True)
class Expected:
    """What an answer may look like."""

    api: Api
    max_tokens: int
    prompt_bytes: int
    stops: bool
    """Whether the request names stop strings."""
    reasoning: bool
    """Whether thinking becomes part of the text."""
    secret: str
    """A text that is never kept, such as the key; empty: there is none."""


class NotAnAnswer(ValueError):
    """The body of a response is not what OpenAI's interface describes. The message is its short name."""


def parsed(body: bytes, api: Api) -> dict[str, Any]:
    """The response as an object with at least one choice."""
    try:
        response = json.loads(body)
    except (ValueError, RecursionError):
        raise NotAnAnswer("not_json") from None
    if mismatch(response, SHAPES[api]) or not response["choices"]:
        raise NotAnAnswer("wrong_fields")
    found: dict[str, Any] = response
    return found


def read_answer(body: bytes, expected: Expected) -> Outcome:
    """The answer in a response; NotAnAnswer if the response has none."""
    response = parsed(body, expected.api)
    choice = response["choices"][0]
    told = choice if expected.api == "completions" else choice["message"]
    text = told["text" if expected.api == "completions" else "content"] if told else ""
    thought = next((told[name] for name in ("reasoning_content", "reasoning") if told.get(name)), None)
    text, entries = text or "", reported_entries(choice, expected.api)
    used = Outcome(
        prompt_tokens=_count(response, "prompt_tokens") or max(expected.prompt_bytes // BYTES_PER_TOKEN, 1),
        answer_tokens=_count(response, "completion_tokens") or tokens_in(text),
    )
    reason = choice["finish_reason"]
    if isinstance(thought, str) and expected.reasoning:
        text, entries = f"<think>\n{thought.strip()}\n</think>\n\n{text}", None
    used.failed = _fault(text, told, reason, expected)
    if used.failed:
        return used
    stop_reason = choice.get("stop_reason", "" if expected.stops else None)  # "": a server that does not tell
    used.text, used.finish_reason = text, "length" if reason == "length" else "stop"
    used.ended = reason == "stop" and not isinstance(stop_reason, str)
    used.logps = logps_of(entries, text, used.finish_reason, used.ended) if entries else None
    left_out = thought is not None and not expected.reasoning
    known = 0 if left_out else _count(response, "completion_tokens") or len(entries or ())
    used.num_tokens = len(used.logps or ()) or known or tokens_in(text)
    return used


def _fault(text: str, told: dict[str, Any], reason: str | None, expected: Expected) -> str:
    """Why an answer cannot be used; empty if it can."""
    if reason not in ("stop", "length"):
        return reason if reason in REFUSALS else "finish_reason"
    if not (told.get("content") or told.get("text") or "").strip():
        return "empty"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "not_unicode"
    if size > MOST_BYTES_PER_TOKEN * expected.max_tokens:
        return "too_large"
    return "repeats_key" if expected.secret and expected.secret in text else ""


def tokens_in(text: str) -> int:
    """About how many tokens a text has."""
    return max(len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN, 1)


def _count(response: dict[str, Any], name: str) -> int:
    """A number of tokens that the server reports; 0 if it does not, or if it is impossible."""
    usage = response.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 < count <= MOST_TOKENS else 0


def reported_entries(choice: dict[str, Any], api: Api) -> list[Entry] | None:
    """The tokens and log-probabilities of a choice; None if it has none, or if one of them is none."""
    reported = choice.get("logprobs")
    if not isinstance(reported, dict):
        return None
    try:
        if api == "completions":
            pairs = zip(reported["tokens"], reported["token_logprobs"], strict=True)
            return [(token.encode(), _logp(logp)) for token, logp in pairs]
        return [(_bytes(entry), _logp(entry["logprob"])) for entry in reported["content"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _bytes(entry: dict[str, Any]) -> bytes:
    token: str = entry["token"]
    return token.encode() if entry.get("bytes") is None else bytes(list(entry["bytes"]))


def _logp(value: Any) -> float:
    if type(value) not in (int, float) or not LEAST_LOGP < value <= LARGEST_LOGP:
        raise ValueError("not a log-probability")
    return min(float(value), 0.0)


def logps_of(entries: Sequence[Entry], text: str, finish_reason: FinishReason, ended: bool) -> list[float] | None:
    """Log-probabilities of the tokens that make up the text, and of the end of turn; None if they do not fit together.

    A source that ended its turn may report that token or not. If it does not, the end of turn counts as certain. A text
    that a stop string ended has the tokens before that string.
    """
    wanted, size, count = text.encode(), 0, 0
    while count < len(entries) and size < len(wanted):
        size += len(entries[count][0])
        count += 1
    logps, rest = [logp for _, logp in entries[:count]], [logp for _, logp in entries[count:]]
    if b"".join(token for token, _ in entries[:count]) != wanted:
        return None
    if ended:
        return [*logps, *(rest or [0.0])] if len(rest) <= 1 else None
    return None if finish_reason == "length" and rest else logps


def disagreement(first: Sequence[Entry], second: Sequence[Entry]) -> float | None:
    """How much the log-probabilities of two answers differ in the tokens that both begin with, a token on average.

    None if already the first tokens differ.
    """
    differences = []
    for (token, logp), (other, other_logp) in zip(first, second, strict=False):
        if token != other:
            break
        differences.append(abs(logp - other_logp))
    return math.fsum(differences) / len(differences) if differences else None
