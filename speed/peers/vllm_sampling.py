"""How fast vLLM's CPU build samples.

    make .venv-vllm/.installed
    python speed/prompts.py words 40 words.json
    .venv-vllm/bin/python speed/peers/vllm_sampling.py MODEL_DIR --prompts-file words.json --prompts 4 --tokens 48

The last line of the output is a JSON object with the tokens/s of every repeat. Every completion has exactly `--tokens`
tokens and comes with the log-probability of each sampled token, as training needs it. The engine runs inside this
process. A repeat takes the next prompts of the file and a seed of its own; prompts seen before are found in the prefix
cache, where it is on.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from process import add_process_options, cpu_seconds, peak_rss_gib, read_prompts, render, restart_with_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from prompts import prompts_of_cycle


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--prompts-file", type=Path, required=True, help="JSON list of strings or of token ids")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats")
    parser.add_argument("--warmup", type=int, default=1, help="repeats before those, not reported")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--eager", action="store_true", help="no torch.compile: starts sooner")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--no-amx", action="store_true", help="for virtual machines that report AMX but cannot run it")
    parser.add_argument("--seed", type=int, default=0)
    add_process_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    extra = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that its memory and CPU time are the engine's
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    iomp = Path(sys.prefix) / "lib" / "libiomp5.so"  # comes with vLLM, whose manual asks for it to be preloaded
    if iomp.is_file():
        extra["LD_PRELOAD"] = str(iomp)
    if options.no_amx:
        extra["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    restart_with_environment(options.malloc, options.threads, **extra)

    start = time.perf_counter()
    import torch

    if options.no_amx:
        torch.cpu._is_amx_tile_supported = lambda: False
    import vllm

    prompts = read_prompts(options.prompts_file)
    rollouts = options.prompts * options.generations
    engine = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        seed=options.seed,
        max_num_seqs=rollouts,
        enforce_eager=options.eager,
        enable_prefix_caching=not options.no_prefix_caching,
        generation_config="vllm",  # nothing of the model's own sampling defaults
        disable_log_stats=True,
    )
    tokenizer = engine.get_tokenizer()
    startup = time.perf_counter() - start

    repeats, lengths = [], []
    for repeat in range(options.warmup + options.repeats):
        ids = [render(tokenizer, prompt) for prompt in prompts_of_cycle(prompts, repeat, options.prompts)]
        sampling = vllm.SamplingParams(
            n=options.generations,
            temperature=1.0,
            max_tokens=options.tokens,
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        torch.manual_seed(options.seed + repeat)
        begin, others = time.perf_counter(), cpu_seconds()[1]
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
        seconds, others = time.perf_counter() - begin, cpu_seconds()[1] - others
        completions = [completion for output in outputs for completion in output.outputs]
        assert len(completions) == rollouts
        assert all(len(completion.token_ids) == options.tokens for completion in completions)
        assert all(len(completion.logprobs) == options.tokens for completion in completions)
        assert len({tuple(completion.token_ids) for completion in completions}) > rollouts // 2, "copies"
        if repeat >= options.warmup:
            repeats.append(
                {"seconds": round(seconds, 4), "tokens_per_second": round(rollouts * options.tokens / seconds, 1)}
            )
            repeats[-1]["others_cpu"] = round(others, 2)
            lengths += map(len, ids)

    result = {
        "peer": "vllm",
        "version": vllm.__version__,
        "repeats": repeats,
        "median": {name: round(statistics.median(repeat[name] for repeat in repeats), 4) for name in repeats[0]},
        "warmup_repeats": options.warmup,
        "startup_seconds": round(startup, 1),
        "peak_rss_gib": peak_rss_gib(),
        "tokens_sampled": rollouts * options.tokens,
        "prompt_tokens": round(statistics.mean(lengths), 1),
        "settings": {
            "model": Path(options.model).name,
            "prompts": options.prompts,
            "generations": options.generations,
            "tokens": options.tokens,
            "dtype": options.dtype,
            "compiled": not options.eager,
            "prefix_caching": not options.no_prefix_caching,
            "kv_cache_gib": options.kv_cache_gib,
            "amx": not options.no_amx,
            "libiomp": iomp.is_file(),
            "malloc": options.malloc,
            "threads": options.threads,
            "seed": options.seed,
            "torch": torch.__version__,
        },
    }
    sys.stderr.flush()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
