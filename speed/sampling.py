"""Sampling with forced lengths, everything included: ours against `generate`, and against vLLM on a CPU.

    python speed/sampling.py smollm2 --prompts 32                       # on a GPU: random weights, the real shape
    python speed/sampling.py MODEL_DIR --prompts 4 --tokens 48 --vllm   # on a CPU

vLLM needs `make .venv-vllm/.installed`. On a GPU the peer is `generate`, and its compiled static cache on request.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""The shape of SmolLM2-135M: speed does not depend on the weights."""

MEMORY_RATE, MATRIX_RATE = 4.3e12, 790e12
"""Measured on an H200: bytes a second of a copy, bfloat16 operations a second of a matrix product."""


def load(name: str, device: str, dtype: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if name == "smollm2":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2))
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device, dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2 (its shape, random weights) or the folder of a model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="also generate with a static cache and compilation")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's CPU build, in its own environment")
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table, prompts_file, run_side, timed
    from prompts import word_problems
    from transformers import AutoTokenizer

    from hacrl.decoder import Backbone
    from hacrl.execution.memory import keep_freed_memory
    from hacrl.learners.weights import cast_parameters
    from hacrl.rollouts.engine import SamplingParams
    from hacrl.rollouts.native import NativeEngine

    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load(options.model, device, torch.float32)
    if options.model == "smollm2":
        generator = torch.Generator().manual_seed(0)
        shape = (options.prompts, options.prompt_tokens)
        prompts = torch.randint(3, 49000, shape, generator=generator).tolist()
    else:
        from process import render

        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompts = [render(tokenizer, text) for text in word_problems(options.prompts)]
    count = options.prompts * options.generations * options.tokens
    params = SamplingParams(options.generations, options.tokens, temperature=1.0)

    start = time.perf_counter()
    backbone = Backbone(model)
    cast_parameters(model, dtype)
    if device == "cuda":
        from hacrl.rollouts.graphed import GraphedEngine

        engine: NativeEngine = GraphedEngine(backbone, None, [-1], 4096)
    else:
        engine = NativeEngine(backbone, None, [-1], 4096)
    seeds = iter(range(10**6))
    for _ in range(2):
        engine.sample(prompts, params, next(seeds))
    warmup = time.perf_counter() - start
    seconds = {"ours": sorted(timed(lambda: engine.sample(prompts, params, next(seeds)), options.repeats))}
    starts = {"ours": warmup}

    rows = [prompt for prompt in prompts for _ in range(options.generations)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    forced = {"do_sample": True, "top_k": 0, "max_new_tokens": options.tokens, "min_new_tokens": options.tokens}

    def generate(**more: Any) -> None:
        model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **forced, **more)

    with torch.no_grad():
        seconds["generate"] = timed(generate, options.peer_repeats, warmup=0)
        if options.compiled:
            start = time.perf_counter()
            for _ in range(2):
                generate(cache_implementation="static")
            starts["generate, static cache, compiled"] = time.perf_counter() - start
            seconds["generate, static cache, compiled"] = timed(
                lambda: generate(cache_implementation="static"), options.peer_repeats, warmup=0
            )
    rates = {name: count / sorted(values)[len(values) // 2] for name, values in seconds.items()}
    if options.vllm:
        command = [".venv-vllm/bin/python", "speed/peers/vllm_sampling.py", options.model]
        command += ["--prompts-file", prompts_file("words", options.prompts), "--prompts", str(options.prompts)]
        command += ["--generations", str(options.generations), "--tokens", str(options.tokens)]
        answer = run_side([*command, "--threads", str(options.threads), "--malloc", options.malloc])
        rates["vLLM, CPU build, float32"] = answer["median"]["tokens_per_second"]
        starts["vLLM, CPU build, float32"] = answer["startup_seconds"]

    if device == "cuda":
        config = model.config
        weights = sum(parameter.numel() for parameter in model.parameters()) * 2
        entry = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 2
        own = options.prompts * options.generations * options.tokens / 2
        step = weights + entry * (own + sum(map(len, prompts)))
        operations = 2 * (weights / 2) * options.prompts * options.generations
        floor = max(step / MEMORY_RATE, operations / MATRIX_RATE)
        rates["floor: weights and cache once a token"] = options.prompts * options.generations / floor
    size = f"{options.prompts} x {options.generations} x {options.tokens} tokens"
    table = [
        [name, f"{rate:,.0f}", f"{rates['ours'] / rate:.2f}", f"{starts[name]:.1f}" if name in starts else ""]
        for name, rate in rates.items()
    ]
    columns = ["", "tokens/s", "ours is faster by", "start-up (s)"]
    print_table(f"Sampling {options.model}, {size}, {str(dtype)[6:]}; {machine()}", columns, table)
    if options.json:
        options.json.write_text(json.dumps({"size": size, "rates": rates, "seconds": seconds, "starts": starts}) + "\n")


if __name__ == "__main__":
    main()
