"""A prompt as one model's tokens."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.tasks.problem import Prompt


def render(tokenizer: PreTrainedTokenizerBase, config: AgentConfig, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, through the model's own chat template if it has one."""
    system = config.system_prompt
    if not tokenizer.chat_template:
        if not isinstance(prompt, str) or system:
            what = "a system_prompt" if system else "chat messages"
            raise UserError(
                f"agents.{config.id}: {config.model} has no chat template, so it cannot be given "
                f"{what}. Use string prompts without one, or a model with a chat template."
            )
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
        )
    except TemplateError as error:
        raise UserError(
            f"agents.{config.id}: the chat template of {config.model} refuses a prompt: {error}."
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def has_unknown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether a prompt has characters that the tokenizer cannot spell."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return unknown is not None and unknown not in others and unknown in ids  # GPT-2's is its end of text
