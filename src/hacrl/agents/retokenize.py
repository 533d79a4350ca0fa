"""Another agent's completion as this agent's tokens, or the reason why that is not possible."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from hacrl.agents.loading import readable_ids
from hacrl.rollouts.rollout import Rollout


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for two tokenizers whose ids mean the same tokens."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted(set(tokenizer.get_vocab().values()) - readable_ids(tokenizer, []))
    return hashlib.sha256(json.dumps([tokens, special]).encode()).hexdigest()


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class Dropped(Exception):
    """This learner cannot use the rollout; the message is the reason that is counted."""


class Retokenizer:
    """Reads other agents' rollouts in the tokens of one learner."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn
        self.max_length = max_length
        self.vocabulary = vocabulary_fingerprint(tokenizer)
        self._readable = readable_ids(tokenizer, [])

    def __call__(self, rollout: Rollout) -> list[int]:
        """The rollout's tokens for this learner, closed by its end-of-turn token if the source ended."""
        if rollout.special_inside:
            raise Dropped("special_tokens")
        if rollout.vocabulary == self.vocabulary:
            content = rollout.token_ids[:-1] if rollout.ended else rollout.token_ids
        else:
            content = self.encode(rollout.text)
        ids = [*content, self.end_of_turn] if rollout.ended else list(content)
        if len(ids) > self.max_length:
            raise Dropped("too_long")
        return ids

    def encode(self, text: str) -> list[int]:
        """A text as tokens that decode to it."""
        if not text:
            raise Dropped("empty")
        if "\ufffd" in text:
            raise Dropped("broken_text")  # the source was cut off inside a character
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not self._readable.issuperset(ids) or decode(self.tokenizer, ids) != text:
            raise Dropped("not_reversible")
        return ids
