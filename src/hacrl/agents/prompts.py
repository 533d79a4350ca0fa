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
    prompt = with_suffix(prompt, config)
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


def with_suffix(prompt: Prompt, config: AgentConfig) -> Prompt:
    """The prompt with the agent's `prompt_suffix` behind what the user says last."""
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


def has_unknown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether a prompt has characters that the tokenizer cannot spell."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return unknown is not None and unknown not in others and unknown in ids  # GPT-2's is its end of text
