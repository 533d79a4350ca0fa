"""How long TRL takes for a cycle: sample completions, score them, make the optimizer updates. TRL is set to GSPO.

On a GPU it computes in bfloat16 on float32 weights, as ours does; `--colocate 0.3` samples with vLLM beside it.

    make .venv-trl/.installed
    python speed/prompts.py arithmetic 256 arithmetic.json
    .venv-trl/bin/python speed/peers/trl_cycle.py src/hacrl/agents/zoo/models/llama-plus \\
        --prompts-file arithmetic.json --prompts 32 --generations 8 --tokens 64 --updates 2

The last line of the output is a JSON object with the seconds of every measured cycle. A cycle lasts from the start of
one generation to the start of the next. `sampling` is TRL's `_generate` (tokenize, generate, decode), `old_logps` the
forward pass over the finished completions, `training` everything from the scored batch to the end of the last update;
what is left of `total` is rewards, advantages and the fetching of batches. `others_cpu` is the CPU time that other
processes took meanwhile: a cycle with much of it says nothing. Every completion has exactly `--tokens` tokens, or with
`--mean` ends with an end-of-turn token, and each update takes an equal share of the completions, once. Not faster on a
CPU: smaller micro-batches, a static cache, transformers' continuous batching, and torch.compile, which compiles again
whenever the longest prompt changes.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from process import add_process_options, cpu_seconds, peak_rss_gib, read_prompts, render, restart_with_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from prompts import alternating_rewards, prompts_of_cycle, solved_prompts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--prompts-file", type=Path, required=True, help="JSON list of strings or of token ids")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mean", type=float, help="lengths are not forced; the model was made for this mean")
    parser.add_argument("--colocate", type=float, metavar="SHARE", help="sample with vLLM, in this share of the GPU")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates for each generated batch")
    parser.add_argument("--cycles", type=int, default=5, help="measured cycles")
    parser.add_argument("--warmup", type=int, default=1, help="cycles before those, not reported")
    parser.add_argument("--micro-batch", type=int, help="completions for one forward pass; default: a whole update")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="generate's key-value cache")
    parser.add_argument("--solved-share", type=float, default=0.0, help="prompts whose group has equal rewards")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    add_process_options(parser)
    return parser.parse_args()


class EnoughError(Exception):
    """Raised where the cycle after the last measured one would start to generate."""


def main() -> None:
    options = parse()
    restart_with_environment(options.malloc, options.threads, VLLM_USE_FLASHINFER_SAMPLER="0")
    begun = time.perf_counter()

    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(options.threads)
    rollouts, cycles = options.prompts * options.generations, options.warmup + options.cycles
    per_update, left_over = divmod(rollouts, options.updates)
    micro_batch = options.micro_batch or per_update
    if left_over or per_update % micro_batch:
        raise SystemExit(f"{rollouts} completions do not split into {options.updates} updates of {micro_batch}s")
    accumulation = per_update // micro_batch

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.padding_side = "left"
    prompts = read_prompts(options.prompts_file)
    solved = solved_prompts(prompts, options.solved_share)
    # A data set smaller than a step would train zero steps and say nothing: one cycle more than is run.
    rows = [prompt for cycle in range(cycles + 1) for prompt in prompts_of_cycle(prompts, cycle, options.prompts)]

    def as_trl(prompt: Any) -> Any:
        chat = isinstance(prompt, str) and tokenizer.chat_template
        return [{"role": "user", "content": prompt}] if chat else str(prompt)

    def reward(prompts: list[Any], key: list[int], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths = {len(ids) for ids in completion_ids}
        assert options.mean or lengths == {options.tokens}, f"completions have {lengths} tokens, not {options.tokens}"
        assert len(prompts) == rollouts, f"{len(prompts)} completions in a batch, not {rollouts}"
        clock.tokens.append(sum(map(len, completion_ids)))
        return alternating_rewards([rows[i] for i in key], solved)

    class Clock(TrainerCallback):
        """What happened when, a list entry for each cycle."""

        def __init__(self) -> None:
            self.start, self.sampled, self.scored, self.trained, self.updates = [], [], [], [], []
            self.old_logps, self.tokens, self.prompt_tokens, self.others = [], [], [], []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trained[-1] = time.perf_counter()
            self.updates[-1] += 1

    class TimedTrainer(trl.GRPOTrainer):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            if not isinstance(rows[0], str):  # token ids: TRL's data sets hold text only
                return [json.loads(f"[{prompt.strip('()').rstrip(',')}]") for prompt in prompts], None, {}
            return super()._tokenize_prompts(prompts)

        def _generate(self, prompts: list[Any]) -> Any:
            start = time.perf_counter()
            output = super()._generate(prompts)
            clock.sampled.append(time.perf_counter() - start)
            clock.prompt_tokens = [len(ids) for ids in output[0]]
            return output

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if not torch.is_grad_enabled():
                clock.old_logps[-1] += time.perf_counter() - start
            return output

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            clock.start.append(time.perf_counter())
            clock.others.append(cpu_seconds()[1])
            if len(clock.start) > cycles:
                raise EnoughError
            for series in (clock.old_logps, clock.trained, clock.updates):
                series.append(0)
            output = super()._generate_and_score_completions(inputs)
            clock.scored.append(time.perf_counter())
            return output

    clock, on_gpu = Clock(), torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    longest = max(len(render(tokenizer, prompt)) for prompt in prompts) + options.tokens
    generation = {"min_tokens" if options.colocate else "min_new_tokens": options.tokens}
    if options.mean:  # vLLM reads the end-of-turn tokens from the model's folder
        generation = {} if options.colocate else {"eos_token_id": model.generation_config.eos_token_id}
    vllm: dict[str, Any] = {}
    if options.colocate:
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.colocate}
        vllm |= {"vllm_max_model_length": longest}
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            # GSPO: one ratio for each sequence, the mean over sequences, no reference model.
            importance_sampling_level="sequence",
            loss_type="grpo",
            epsilon=3e-4,
            epsilon_high=4e-4,
            beta=0.0,
            # What is sampled, and how it is cut into updates.
            num_generations=options.generations,
            max_completion_length=options.tokens,
            temperature=1.0,
            generation_kwargs=generation,
            cache_implementation=None if options.colocate else options.cache,
            **vllm,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=options.updates * accumulation,
            num_iterations=1,
            max_steps=options.updates * (cycles + 1),
            shuffle_dataset=False,
            seed=options.seed,
            # The optimizer.
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            # float32 on a CPU, with nothing that costs time: checkpointing is on by default.
            bf16=on_gpu,
            gradient_checkpointing=False,
            use_cpu=not on_gpu,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        columns = {"prompt": [as_trl(prompt) for prompt in rows], "key": list(range(len(rows)))}
        trainer = TimedTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        with contextlib.suppress(EnoughError):
            trainer.train()

    assert clock.updates == [options.updates] * cycles, f"updates in each cycle: {clock.updates}"
    assert trainer.state.global_step == options.updates * cycles
    assert options.mean or clock.tokens == [rollouts * options.tokens] * cycles, f"tokens in each cycle: {clock.tokens}"
    assert next(model.parameters()).dtype == torch.float32
    last = prompts_of_cycle(prompts, cycles - 1, options.prompts)
    expected = [len(render(tokenizer, prompt)) for prompt in last for _ in range(options.generations)]
    assert clock.prompt_tokens == expected, "the prompts were tokenized in another way than on the other side"

    measured = [
        {
            "total": clock.start[i + 1] - clock.start[i],
            "sampling": clock.sampled[i],
            "old_logps": clock.old_logps[i],
            "training": clock.trained[i] - clock.scored[i],
            "others_cpu": clock.others[i + 1] - clock.others[i],
            "tokens": clock.tokens[i],
        }
        for i in range(options.warmup, cycles)
    ]
    result = {
        "peer": "trl",
        "version": trl.__version__,
        "cycles": [{name: round(seconds, 4) for name, seconds in cycle.items()} for cycle in measured],
        "median": {name: round(statistics.median(cycle[name] for cycle in measured), 4) for name in measured[0]},
        "warmup_cycles": options.warmup,
        "startup_seconds": clock.start[0] - begun,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else peak_rss_gib(),
        "prompt_tokens": round(statistics.mean(expected), 1),
        "settings": {
            "model": Path(options.model).name,
            "prompts": options.prompts,
            "generations": options.generations,
            "tokens": options.tokens,
            "updates": options.updates,
            "micro_batch": micro_batch,
            "cache": options.cache,
            "malloc": options.malloc,
            "threads": torch.get_num_threads(),
            "solved_share": options.solved_share,
            "seed": options.seed,
            "dtype": "bfloat16 on float32 weights" if on_gpu else "float32",
            "vllm": vllm,
            "mean": options.mean,
            "attention": model.config._attn_implementation,
            "optimizer": str(arguments.optim),
            "torch": torch.__version__,
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
