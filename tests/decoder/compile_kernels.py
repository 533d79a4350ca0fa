"""Compiles the Triton kernels for a GPU of compute capability 9.0, as their callers do, and prints what came out.

No GPU is needed: the compiler and the assembler come with Triton. Run by `test_compiled_kernels.py` in a process of its
own, because the tests run kernels in Triton's interpreter.
"""

import json
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hacrl.decoder import kernels, paged_kernels


class NoGPU:
    """Stands in for the driver of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


COMPILED: dict[str, list[dict[str, Any]]] = {}
run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    found = {"shared": kernel.metadata.shared, "bytes": len(kernel.asm["cubin"])}
    found |= {"wide": ptx.count("ld.global.v4") + ptx.count("cp.async"), "products": ptx.count("mma.sync")}
    COMPILED.setdefault(self.__name__, []).append(found)


def numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def compile_attention(B: int, H: int, K: int, D: int) -> None:
    """As in a token step: queries, keys and values are slices of one product."""
    query, key, value = numbers(B, 1, (H + 2 * K) * D).split([H * D, K * D, K * D], dim=2)
    heads = (x.unflatten(2, (-1, D)).transpose(1, 2)[:, :, 0] for x in (query, key, value))
    places = (2 * K * 32 * D, 3 * K * 32 * D)
    paged_kernels.attention(*heads, numbers(16), whole(B, 200), places, whole(B), whole(B), D**-0.5, None, None)


def compile_all() -> None:
    compile_attention(256, 16, 8, 128)  # Qwen3-1.7B's heads, a row in one part
    compile_attention(8, 9, 3, 64)  # SmolLM2's, a row in several parts
    key = numbers(4, 64, 8, 128).transpose(1, 2)
    paged_kernels.store_prompts(key, key, numbers(16), whole(4, 2), (0, 8 * 32 * 128), whole(4))
    logits, tokens = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in ((256, 151_936), (257, 4096)))
    rows = (whole(256) for _ in range(4))
    paged_kernels.sample_tokens(
        logits, logits, *rows, whole(257).int(), whole(1), whole(1), tokens.int(), tokens, whole(257).int(), whole(211),
        1.0,
    )  # fmt: skip
    both, angles = numbers(256, 32, 128)[:, :24], numbers(256, 128)  # of Qwen3
    kernels.turn(both, angles, angles, 16, (numbers(128), numbers(128), 1e-6))
    kernels.turn_back(numbers(256, 24, 128), both, angles, angles, 16, (numbers(128), numbers(128), 1e-6))
    prompt, own = (numbers(32, 8, 128, 128),) * 2, (numbers(257, 8, 512, 128),) * 2
    heads = (numbers(256, heads, 128) for heads in (16, 8, 8))
    kernels.decode_attention(*heads, prompt, own, whole(256), whole(256), whole(32), whole(1), 0.1, None, None)


if __name__ == "__main__":
    driver.set_active(NoGPU())
    JITFunction.run = compile_only
    compile_all()
    print(json.dumps(COMPILED))
