"""Decoders of many architectures, tiny and with random weights; and long-winded versions of what they compute."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 97
PAD, EOS = 0, 2

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 12},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "gemma": {},
    # Window, soft caps of scores and of logits; half of the layers see everything.
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 4},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 6},
    "olmo2": {},
    "phi3": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gpt2": {},
    # The fourth layer has no position embedding.
    "smollm3": {"num_hidden_layers": 4},
}

LEAN = {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3", "granite"}
"""Those with leaner versions of some layers. The others keep theirs: nothing fits, or what fits is not the same."""


def tiny(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of this architecture; the same for the same seed."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    options = {**sizes, **ARCHITECTURES.get(kind, {}), **changes}
    config = AutoConfig.for_model(kind, **{name: value for name, value in options.items() if value is not None})
    torch.manual_seed(seed)
    # The default attention of transformers leaves soft caps of scores out.
    attention = "eager" if kind == "gemma2" else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from zeros and ones, and confident enough to have opinions
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def limit_memory(model: nn.Module, rows: int) -> None:
    """Make passes of more rows than that run out of memory."""

    def refuse(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(named["input_ids"]) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    body: Any = model.base_model
    body.register_forward_pre_hook(refuse, with_kwargs=True)


def compute_in_full(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds to float32 in norms and in some attention, in a float64 model too: not here."""
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__.endswith("RMSNorm"):
            monkeypatch.setattr(kind, "forward", _gemma_norm if kind.__name__.startswith("Gemma") else _rms_norm)
        if kind.__name__ == "CohereLayerNorm":
            monkeypatch.setattr(kind, "forward", _layer_norm)


def _normed(module: Any, x: Tensor) -> Tensor:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * _normed(module, x)


def _gemma_norm(module: Any, x: Tensor) -> Tensor:
    return (1 + module.weight) * _normed(module, x)


def _layer_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * _normed(module, x - x.mean(-1, keepdim=True))


def logprobs_one_by_one(model: Any, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """Log-probabilities (T, V) at each token of one completion: one sequence, no padding, no cache."""
    logits_SV = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return (logits_SV[len(prompt) - 1 : -1].double() / temperature).log_softmax(1)


def gradients(model: nn.Module) -> list[Tensor]:
    """And forget them."""
    taken = []
    for parameter in model.parameters():
        taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        parameter.grad = None
    return taken


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference between two sets of tensors, relative to the largest number in the second."""
    largest = max(float(tensor.abs().max()) for tensor in right)
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True)) / largest


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte: characters take up to four."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
