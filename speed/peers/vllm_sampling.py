"""How fast vLLM samples, on a CPU or a GPU.

    make .venv-vllm/.installed
    python speed/prompts.py words 40 words.json
    .venv-vllm/bin/python speed/peers/vllm_sampling.py MODEL_DIR --prompts-file words.json --prompts 4 --tokens 48

The last line of the output is a JSON object with the tokens/s of every repeat. Every completion has exactly `--tokens`
tokens, or with `--mean` ends with one of the model's end-of-turn tokens, and comes with the log-probability of each
sampled token, as training needs it. The engine runs inside this process. A repeat takes the next prompts of the file
and a seed of its own; prompts seen before are found in the prefix cache, where it is on.
"""

import argparse
import json
import math
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
    parser.add_argument("--mean", type=float, help="lengths are not forced; the model was made for this mean")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--eager", action="store_true", help="no torch.compile: starts sooner")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--cache-gib", type=float, help="memory of the cache; default: 2 on a CPU, vLLM's on a GPU")
    parser.add_argument("--option", nargs="*", default=[], metavar="KEY=JSON", help="passed to vllm.LLM")
    parser.add_argument("--no-amx", action="store_true", help="for virtual machines that report AMX but cannot run it")
    parser.add_argument("--seed", type=int, default=0)
    add_process_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    extra = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that its memory and CPU time are the engine's
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(options.cache_gib or 2)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile kernels
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
    from transformers import GenerationConfig

    import vllm

    prompts = read_prompts(options.prompts_file)
    rollouts = options.prompts * options.generations
    on_gpu = torch.cuda.is_available()
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    cache = {"kv_cache_memory_bytes": int(options.cache_gib * 2**30)} if on_gpu and options.cache_gib else {}
    given = {name: json.loads(value) for name, _, value in (option.partition("=") for option in options.option)}
    settings = {
        "dtype": dtype,
        "seed": options.seed,
        "max_num_seqs": rollouts,
        "enforce_eager": options.eager,
        "enable_prefix_caching": not options.no_prefix_caching,
        "generation_config": "vllm",  # nothing of the model's own sampling defaults
        "disable_log_stats": True,
    }
    engine = vllm.LLM(model=options.model, **settings, **cache, **given)
    tokenizer = engine.get_tokenizer()
    ends = GenerationConfig.from_pretrained(options.model).eos_token_id if options.mean else []

    repeats, lengths = [], []
    for repeat in range(options.warmup + options.repeats):
        ids = [render(tokenizer, prompt) for prompt in prompts_of_cycle(prompts, repeat, options.prompts)]
        sampling = vllm.SamplingParams(
            n=options.generations,
            temperature=1.0,
            max_tokens=options.tokens,
            ignore_eos=True,  # the stop tokens include it
            stop_token_ids=ends,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        torch.manual_seed(options.seed + repeat)
        begin, before = time.perf_counter(), cpu_seconds()
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        own, others = (now - was for now, was in zip(cpu_seconds(), before, strict=True))
        completions = [completion for output in outputs for completion in output.outputs]
        assert len(completions) == rollouts
        sampled = [len(completion.token_ids) for completion in completions]
        assert sampled == [len(completion.logprobs) for completion in completions]
        assert options.mean or set(sampled) == {options.tokens}
        assert len({tuple(completion.token_ids) for completion in completions}) > rollouts // 2, "copies"
        if repeat == 0:
            first = time.perf_counter() - start
        if repeat >= options.warmup:
            rate = round(sum(sampled) / seconds, 1)
            repeats.append({"seconds": round(seconds, 4), "tokens": sum(sampled), "tokens_per_second": rate})
            repeats[-1] |= {"longest": max(sampled), "cpu": round(own, 2), "others_cpu": round(others, 2)}
            lengths += map(len, ids)
    startup = first - statistics.median(repeat["seconds"] for repeat in repeats)

    result = {
        "peer": "vllm",
        "version": vllm.__version__,
        "repeats": repeats,
        "median": {name: round(statistics.median(repeat[name] for repeat in repeats), 4) for name in repeats[0]},
        "warmup_repeats": options.warmup,
        "startup_seconds": round(startup, 1),
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else peak_rss_gib(),
        "prompt_tokens": round(statistics.mean(lengths), 1),
        "settings": {
            "model": Path(options.model).name,
            "prompts": options.prompts,
            "generations": options.generations,
            "tokens": options.tokens,
            "mean": options.mean,
            "options": given,
            "dtype": dtype,
            "compiled": not options.eager,
            "prefix_caching": not options.no_prefix_caching,
            "cache_gib": options.cache_gib,
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
