"""Models with random weights in the shapes of published ones: speed and memory do not depend on the weights.

    python speed/shapes.py qwen3-1.7b FOLDER --mean 720

The tokenizer is word-level (w2, w3, ...) with the shape's whole vocabulary. Of random weights all tokens are about
equally likely, so lengths are geometric if one token in `mean` ends an answer.
"""

import argparse
import random
from pathlib import Path
from typing import Any

QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
         "max_position_embeddings": 40_960}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1_000,
             "tie_word_embeddings": True},
    "smollm2": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "qwen3-0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-1.7b": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
"""Shapes as in the published config.json of SmolLM2-135M and of Qwen3."""


def stop_tokens(vocabulary: int, mean: float) -> int:
    """How many tokens, from the second on, end an answer."""
    return max(round(vocabulary / mean), 1)


def random_prompts(shape: dict[str, Any], mean: float, count: int, length: int) -> list[list[int]]:
    """Token ids of prompts, none of which ends an answer."""
    rng = random.Random("prompts")
    first = 1 + stop_tokens(shape["vocab_size"], mean)
    return [[rng.randrange(first, shape["vocab_size"]) for _ in range(length)] for _ in range(count)]


def make_model(folder: Path, shape: dict[str, Any], mean: float, device: str, dtype: str = "bfloat16") -> None:
    """Write a model with random weights and its tokenizer, of whose tokens one in `mean` ends an answer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    ends = stop_tokens(shape["vocab_size"], mean)
    words = ["<unknown>", "<end>", *(f"w{i}" for i in range(2, shape["vocab_size"]))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": words[0], "eos_token": words[1], "pad_token": words[1]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    options = {**shape, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = list(range(1, 1 + ends))
    model.generation_config.pad_token_id = 1
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean", type=float, default=720)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    make_model(options.folder, SHAPES[options.shape], options.mean, device, options.dtype)


if __name__ == "__main__":
    main()
