"""Turns prompts into the tokens of one model."""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.opening import reason
from hacrl.tasks.problem import Prompt
from hacrl.tasks.worker import Worker

TEMPLATE_SECONDS, TEMPLATE_MEMORY_GIB, TEMPLATE_CHARACTERS = 5.0, 1.0, 10**6
"""Limits for rendering a short prompt with a chat template. Usual templates take a millisecond and a few MB."""
CHARACTERS_PER_TOKEN = 16
"""A text with more characters per allowed token is first encoded in part, because the part is mostly too long."""
MARGIN = 128
"""How many tokens the end of a text may take away from its beginning: a long word can become one unknown token."""


class Beginning(list[int]):
    """The tokens of the first part of a text. They are more than allowed, so the rest does not matter."""


def render(tokenizer: Tokenizer, config: AgentConfig, prompt: Prompt, limit: float = math.inf) -> list[int]:
    """Return the token ids of a prompt in the model's chat template, if it has one; see `encode` for the limit."""
    system = config.system_prompt
    prompt = with_suffix(prompt, config)
    if not tokenizer.chat_template:
        if not isinstance(prompt, str) or system:
            what = "a system_prompt" if system else "chat messages"
            raise UserError(
                f"agents.{config.id}: {config.model} has no chat template, so it cannot be given "
                f"{what}. Use string prompts without one, or a model with a chat template."
            )
        text = prompt
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        options = {"add_generation_prompt": True, **config.chat_template_kwargs}
        text = chat_text(tokenizer, messages, f"agents.{config.id}", config.model, **options)
    ids = encode(tokenizer, text, limit, add_special_tokens=not tokenizer.chat_template)
    if not ids:
        raise UserError(
            f"agents.{config.id}: tokenizer and chat template of {config.model} turn a prompt into zero tokens."
        )
    return ids


def chat_text(tokenizer: Tokenizer, messages: Sequence[Any], where: str, model: str, **options: Any) -> str:
    """Render messages with the chat template; UserError if the template fails."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program, and raises whatever it likes
        why = str(error) if isinstance(error, TemplateError) else reason(error)
        raise UserError(f"{where}: the chat template of {model} refuses a prompt: {why.rstrip('.')}.") from error
    return text


def encode(tokenizer: Tokenizer, text: str, limit: float, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text; far more than `limit` only as a `Beginning`, which saves time and memory."""
    size = CHARACTERS_PER_TOKEN * (limit + MARGIN)
    while len(text) > size:
        ids = tokenizer.encode(text[: int(size)], add_special_tokens=add_special_tokens)
        if len(ids) > limit + MARGIN:
            return Beginning(ids)
        size *= 8  # some tokenizers make one token of any amount of white space or unknown characters
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def check_template(tokenizer: Tokenizer, config: AgentConfig, where: str) -> None:
    """Raise UserError if the chat template explodes: if it does not finish a short prompt, or makes far too much text
    of it. The text itself is not checked."""
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if not isinstance(template, str):
        return  # there is no template, or an unusable one, which is reported when a prompt is rendered
    question, answer = {"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    common = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    asked = {"messages": [*system, question], "add_generation_prompt": True, **config.chat_template_kwargs}
    told = {"messages": [question, answer], "add_generation_prompt": False}
    if trouble := _explosion(template, json.dumps([{**common, **asked}, {**common, **told}], default=str)):
        raise UserError(
            f"{where}: the chat template of {tokenizer.name_or_path} cannot be used: for a short prompt {trouble}. "
            "Correct chat_template.jinja there, or chat_template in tokenizer_config.json."
        )


@lru_cache
def _explosion(template: str, variables: str) -> str | None:
    """Say which limit the template exceeds, or None. It runs in a child, as nothing else ends a long multiplication."""
    function = f"{Path(__file__).with_name('template_child.py')}:lengths"
    with closing(Worker(function, sys.path, TEMPLATE_MEMORY_GIB)) as child:
        reply = child.call({"completions": json.loads(variables), "template": template}, TEMPLATE_SECONDS)
    if reply.outcome == "unloadable":  # nothing is known about the template
        return None
    if reply.outcome == "returned":
        longest = max(length or 0 for length in reply.values)
        return f"it makes {longest:,.0f} characters" if longest > TEMPLATE_CHARACTERS else None
    if reply.outcome == "timeout":
        return f"it takes longer than {TEMPLATE_SECONDS:g} s"
    if reply.outcome == "memory" or "MemoryError" in reply.detail:
        return f"it needs more than {TEMPLATE_MEMORY_GIB:g} GiB of memory"
    return f"it {reply.detail}"


def check_ids(ids: Sequence[int], vocabulary: int, tokenizer: Tokenizer, config: AgentConfig) -> None:
    """Raise UserError if a prompt has a token that is not in the model's embedding."""
    if (last := max(ids)) >= vocabulary:
        raise UserError(
            f"agents.{config.id}: a prompt has the token {tokenizer.convert_ids_to_tokens(last)!r} ({last}), but "
            f"{config.model} has the tokens 0 to {vocabulary - 1}. Remove it from the prompts."
        )


def with_suffix(prompt: Prompt, config: AgentConfig) -> Prompt:
    """Return the prompt with the agent's `prompt_suffix` added to the user's last message."""
    suffix = config.prompt_suffix
    if isinstance(prompt, str):
        return prompt + suffix
    if not suffix:
        return prompt
    last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        roles = ", ".join(message["role"] for message in prompt)
        raise UserError(
            f"agents.{config.id}.prompt_suffix: a chat prompt has no message of the user to add it to, only of "
            f"{roles}. Correct the data, or remove prompt_suffix."
        )
    asked = {**prompt[last], "content": prompt[last]["content"] + suffix}
    return [*prompt[:last], asked, *prompt[last + 1 :]]


def has_unknown(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether a prompt has characters that the tokenizer cannot spell."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return unknown is not None and unknown not in others and unknown in ids  # GPT-2's unknown token is its end of text
