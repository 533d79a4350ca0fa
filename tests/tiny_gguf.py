"""Writes GGUF files of a tiny Llama with random weights and a tokenizer of bytes."""

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT, START, END = 0, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ĠĠ", "12"]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS = 4, 2

F32 = gguf.GGMLQuantizationType.F32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass
class File:
    """What is written into the file; a value of None is left out."""

    tied: bool = True
    architecture: str = "llama"
    chat_template: str | None = CHATML
    pre_tokenizer: str | None = "smollm"
    eos_id: int | None = END_OF_TEXT
    pad_id: int | None = END
    unk_id: int | None = END_OF_TEXT
    add_bos: bool | None = False
    special_type: gguf.TokenType = gguf.TokenType.CONTROL
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    leave_out: str = "nothing"
    scaling: gguf.RopeScalingType | None = None
    more: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> LlamaForCausalLM:
        """Write it; the model it holds."""
        model = tiny_llama(self.tied)
        writer = gguf.GGUFWriter(path, self.architecture)
        config = model.config
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // HEADS)
        writer.add_vocab_size(config.vocab_size)
        self._write_tokenizer(writer)
        if self.scaling is not None:
            writer.add_rope_scaling_type(self.scaling)
        for name, parameter in model.named_parameters():
            values = gguf.quantize(to_gguf(name, parameter), self.quantization if parameter.ndim > 1 else F32)
            if parameter.ndim > 1:
                parameter.data = from_gguf(name, gguf.dequantize(values, self.quantization))
            if self.leave_out not in name:
                writer.add_tensor(gguf_name(name), values, raw_dtype=self.quantization if parameter.ndim > 1 else F32)
        for name, values in self.more.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        types = [self.special_type if token in SPECIAL else gguf.TokenType.NORMAL for token in TOKENS]
        writer.add_token_types(types)
        writer.add_token_merges(["Ġ Ġ", "1 2"])
        writer.add_bos_token_id(START)
        for add, value in (
            (writer.add_chat_template, self.chat_template),
            (writer.add_tokenizer_pre, self.pre_tokenizer),
            (writer.add_eos_token_id, self.eos_id),
            (writer.add_pad_token_id, self.pad_id),
            (writer.add_unk_token_id, self.unk_id),
            (writer.add_add_bos_token, self.add_bos),
        ):
            if value is not None:
                add(value)


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def to_gguf(name: str, parameter: torch.Tensor) -> np.ndarray:
    """GGUF keeps the two halves of a rotated head, which transformers stores one after the other, interleaved."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    weight = parameter.detach()
    if heads:
        weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return weight.contiguous().numpy()


def from_gguf(name: str, values: np.ndarray) -> torch.Tensor:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    weight = torch.from_numpy(values.copy())
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else weight
