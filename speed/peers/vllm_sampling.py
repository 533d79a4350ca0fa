"""How fast vLLM samples, on a CPU or a GPU.

    make .venv-vllm/.installed
    .venv-vllm/bin/python speed/peers/vllm_sampling.py MODEL_DIR --prompts-file prompts.json --work 4x8x48

The last line of the output is a JSON object with the seconds and tokens of every repeat. speed/sampling.py explains
`--work`, and writes the file: prompts by work. Every completion comes with the log-probability of each sampled token,
as training needs it. The engine runs inside this process. A repeat takes the next prompts of the file and a seed of its
own; prompts seen before are found in the prefix cache, where it is on.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

from process import add_process_options, cpu_seconds, peak_rss_gib, restart_with_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from prompts import Work, prompts_of_cycle


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--prompts-file", type=Path, required=True, help="JSON: lists of token ids by work")
    parser.add_argument("--work", nargs="+", type=Work.parse, required=True)
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats")
    parser.add_argument("--warmup", type=int, default=1, help="repeats before those, not reported")
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

    import vllm

    prompts = json.loads(options.prompts_file.read_text("utf-8"))
    on_gpu = torch.cuda.is_available()
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    cache = {"kv_cache_memory_bytes": int(options.cache_gib * 2**30)} if on_gpu and options.cache_gib else {}
    given = {name: json.loads(value) for name, _, value in (option.partition("=") for option in options.option)}
    settings = {
        "dtype": dtype,
        "seed": options.seed,
        "max_num_seqs": max(work.rows for work in options.work),
        "enforce_eager": options.eager,
        "enable_prefix_caching": not options.no_prefix_caching,
        "generation_config": "vllm",  # nothing of the model's own sampling defaults
        "disable_log_stats": True,
    }
    engine = vllm.LLM(model=options.model, **settings, **cache, **given)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    works, repeats = {}, list[dict[str, float]]()
    for work in options.work:
        works[str(work)] = repeats = []
        for repeat in range(options.warmup + options.repeats):
            ids = prompts_of_cycle(prompts[str(work)], repeat, work.prompts)
            sampling = vllm.SamplingParams(
                n=work.answers,
                temperature=1.0,
                max_tokens=work.tokens,
                ignore_eos=True,  # the stop tokens include it
                stop_token_ids=work.stop_ids(vocabulary),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            torch.manual_seed(options.seed + repeat)
            begin, before = time.perf_counter(), cpu_seconds()
            outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            own, others = (now - was for now, was in zip(cpu_seconds(), before, strict=True))
            completions = [completion for output in outputs for completion in output.outputs]
            sampled = [len(completion.token_ids) for completion in completions]
            assert len(completions) == work.rows
            assert sampled == [len(completion.logprobs) for completion in completions]
            assert work.mean or set(sampled) == {work.tokens}
            assert len({tuple(completion.token_ids) for completion in completions}) > work.rows // 2, "copies"
            repeats.append({"seconds": seconds, "tokens": sum(sampled), "longest": max(sampled)})
            repeats[-1] |= {"cpu": round(own, 2), "others_cpu": round(others, 2)}
            repeats[-1]["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else peak_rss_gib()
            if len(works) == len(repeats) == 1:
                first = time.perf_counter() - start
        del repeats[: options.warmup]
    startup = first - statistics.median(repeat["seconds"] for repeat in works[str(options.work[0])])

    result = {
        "peer": "vllm",
        "version": vllm.__version__,
        "works": works,
        "startup_seconds": round(startup, 1),
        "settings": {
            "model": Path(options.model).name,
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
