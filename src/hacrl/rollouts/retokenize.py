"""Turns another agent's completion into this agent's tokens, or says why that is not possible."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.rollouts.rollout import Rollout

TAIL = 16
"""How many tokens of a prompt's end are read: enough to decode a completion after them, and to spell <think>."""
OPENING = re.compile(r"<(?:think|thinking|reasoning)>(?=\s*\Z)")


def readable_ids(tokenizer: Tokenizer, stop_ids: list[int]) -> set[int]:
    """The ids of tokens that decoding keeps as text."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(tokenizer.get_vocab().values()) - special - set(tokenizer.all_special_ids) - set(stop_ids)


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash that is equal for two tokenizers whose ids mean the same tokens."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted(set(tokenizer.get_vocab().values()) - readable_ids(tokenizer, []))
    return hashlib.sha256(json.dumps([tokens, special]).encode()).hexdigest()


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@dataclass(frozen=True)
class PromptEnd:
    """The end of a prompt. Some tokens decode differently after it than alone: "▁19" is " 19" and not "19"."""

    token_ids: tuple[int, ...] = ()
    """The last tokens of the prompt, without special tokens."""
    text: str = ""
    opened: str = ""
    """The block that the prompt opens for the completion, for example <think>."""


NO_PROMPT = PromptEnd()


class Dropped(Exception):
    """Raised when a learner cannot use a rollout. The message is the reason, which metrics count."""


class Retokenizer:
    """Reads other agents' rollouts in the tokens of one learner."""

    def __init__(self, tokenizer: Tokenizer, end_of_turn: int, max_length: int) -> None:
        self.tokenizer, self.end_of_turn, self.max_length = tokenizer, end_of_turn, max_length
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        self._readable = readable_ids(tokenizer, [])
        # The same tokens occur again and again, and a call of `decode` costs more than its work.
        self._text = lru_cache(2**16)(lambda token_ids: decode(tokenizer, list(token_ids)))

    def end_of(self, prompt_ids: Sequence[int]) -> PromptEnd:
        """Return the end of a prompt in the tokens of this agent."""
        token_ids = [token for token in prompt_ids if token in self._readable][-TAIL:]
        last: str = self.tokenizer.decode(list(prompt_ids[-TAIL:]), clean_up_tokenization_spaces=False)
        found = OPENING.search(last)
        return PromptEnd(tuple(token_ids), decode(self.tokenizer, token_ids), found[0] if found else "")

    def lead(self, token_ids: list[int], end: PromptEnd) -> str:
        """White space at the start of a completion that decoding leaves out unless the prompt stands before it."""
        first = token_ids[:TAIL]
        alone, whole = decode(self.tokenizer, first), decode(self.tokenizer, [*end.token_ids, *first])
        behind = whole.removeprefix(end.text)
        return behind.removesuffix(alone) if behind.endswith(alone) else ""

    def __call__(self, rollout: Rollout, end: PromptEnd = NO_PROMPT) -> list[int]:
        """Return the rollout in this learner's tokens, end of turn included; `end` is the end of its own prompt."""
        if rollout.opened != end.opened:
            raise Dropped("unopened_block")
        if rollout.special_inside:
            raise Dropped("special_tokens")
        if rollout.vocabulary == self.vocabulary:
            content = rollout.token_ids[:-1] if rollout.ended else rollout.token_ids
        else:
            content = self.encode(rollout.lead + rollout.text, end)
        ids = [*content, self.end_of_turn] if rollout.ended else list(content)
        if len(ids) > self.max_length:
            raise Dropped("too_long")
        return ids

    def text_ends(self, token_ids: Sequence[int], rollout: Rollout, end: PromptEnd) -> list[int]:
        """Where each of these tokens ends in the rollout's text, counted in characters from the prompt's end.

        A token that ends inside a character, or has no text, gets the end of the next token that completes a character.
        An end of turn counts as one more character.
        """
        text = rollout.lead + rollout.text
        ends: list[int] = []
        at, before, waiting = 0, end.token_ids, tuple[int, ...]()
        for token in token_ids[: len(token_ids) - rollout.ended]:
            waiting = (*waiting, token)
            known, both = self._text(before), self._text((*before, *waiting))
            new = both.removeprefix(known) if both.startswith(known) else ""
            if new and text.startswith(new, at):
                at += len(new)
                ends += [at] * len(waiting)
                before, waiting = waiting, ()
        ends += [len(text)] * len(waiting)
        return [*ends, len(text) + 1] if rollout.ended else ends

    def encode(self, text: str, end: PromptEnd = NO_PROMPT) -> list[int]:
        """Return tokens that decode to this text after a prompt; raise `Dropped` if there are none."""
        if not text:
            raise Dropped("empty")
        if "\ufffd" in text:
            raise Dropped("broken_text")  # the source was cut off inside a character
        tokens = partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
        ids: list[int] = tokens(text)
        if not self._reads(ids, text, end):  # a tokenizer may put a space before the first word
            before, whole = tokens(end.text), tokens(end.text + text)
            ids = whole[len(before) :]
            if whole[: len(before)] != before or not self._reads(ids, text, end):
                raise Dropped("not_reversible")
        return ids

    def _reads(self, ids: list[int], text: str, end: PromptEnd) -> bool:
        """Whether these tokens have no special ones among them, and decode to this text after the prompt."""
        spelled = [*end.token_ids, *ids]
        return self._readable.issuperset(ids) and decode(self.tokenizer, spelled) == end.text + text
