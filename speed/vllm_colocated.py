"""Two agents with vLLM beside them in one process: what sleeping gives back, and whether vLLM follows its learner.

    PYTHONPATH=src python speed/vllm_colocated.py                          # on a GPU: Qwen3-0.6B's shape, bfloat16
    PYTHONPATH=src python speed/vllm_colocated.py --shape tiny --tokens 32 # on a CPU, whose vLLM does not sleep

Runs of a few steps of GSPO, first of all weights, then of LoRA adapters, each in a process of its own. Weights are
random, and a share of all tokens ends a turn, so that lengths are geometric. Shown are the free memory of the GPU
around each call of vLLM (GiB), the gap of log-probabilities between vLLM and the learner, and the seconds of each step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would compile kernels

import torch
from shapes import SHAPES, make_model

from hacrl.config import RunConfig
from hacrl.rollouts.vllm import VLLM
from hacrl.run import train

AGENTS = ("first", "second")
REWARD = """
def every_second(completions, **columns):
    return [float(position % 2) for position in range(len(completions))]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a completion, at most")
    parser.add_argument(
        "--mean", type=float, default=400.0, help="tokens of a completion on average, if none is cut off"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.3, help="gpu_memory_utilization of each vLLM")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 16], help="ranks of adapters; 0: all weights")
    options = parser.parse_args()
    if len(options.lora) > 1:
        for rank in options.lora:
            code = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--lora", str(rank)], check=False
            ).returncode
            if code:
                sys.exit(code)
        return
    with tempfile.TemporaryDirectory() as name:
        run(options, options.lora[0], Path(name))


def run(options: argparse.Namespace, rank: int, folder: Path) -> None:
    free: list[tuple[str, float]] = []
    watch(free)
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(
        f"\n{options.shape}, {f'LoRA of rank {rank}' if rank else 'all weights'}, vLLM {version()}, {device}",
        flush=True,
    )
    make_model(folder / "model", SHAPES[options.shape], options.mean, "cuda" if on_gpu else "cpu")
    rows = [json.dumps({"prompt": f"w{n} w{7 * n}", "answer": "-"}) + "\n" for n in range(1, 101)]
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    vllm = {"gpu_memory_utilization": options.share} if on_gpu else {}
    settings: dict[str, Any] = {
        "algorithm": {"name": "gspo"},
        "agents": [{"id": agent, "model": str(folder / "model")} for agent in AGENTS],
        "task": {"train": str(folder / "train.jsonl"), "reward": f"{folder / 'reward.py'}:every_second"},
        "engine": "vllm",
        "vllm": {**vllm, "enforce_eager": options.eager or not on_gpu},
        "dtype": "bfloat16" if on_gpu else "float32",
        "prompts_per_step": options.prompts,
        "num_generations": options.generations,
        "rollouts_per_update": options.prompts * options.generations // 2,
        "max_prompt_length": 16,
        "max_completion_length": options.tokens,
        "learning_rate": 1e-5,
        "log_kl": False,
        "max_steps": options.steps,
        "eval_every": 0,
        "save_every": 0,
        "save_final": False,
        "output_dir": str(folder / "run"),
    }
    result = train(RunConfig.from_dict({**settings, **({"lora": {"r": rank}} if rank else {})}))
    for what, gib in free:
        print(f"  {what:>30} {gib:8.2f} GiB free")
    for line in map(json.loads, (result.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()[1:]):
        for agent in AGENTS:
            show = {name: line[f"{agent}/{key}"] for name, key in SHOWN.items()}
            print(
                f"  step {line['step']}, {agent}: " + ", ".join(f"{name} {value:.3g}" for name, value in show.items())
            )


SHOWN = {
    "sampling": "time/sample",
    "learning": "time/learn",
    "tokens/s": "time/tokens_per_second",
    "gap": "logprob_gap",
    "largest gap": "logprob_gap_max",
    "mean ratio": "sampling/importance_sampling_ratio/mean",
    "masked": "sampling/importance_sampling_ratio/clipped",
}


def version() -> str:
    import vllm

    return str(vllm.__version__)


def watch(free: list[tuple[str, float]]) -> None:
    """Note the GPU's free memory before and after vLLM wakes and sleeps."""

    def watched(method: Callable[[VLLM], Any], before: str, after: str) -> Callable[[VLLM], Any]:
        def call(self: VLLM) -> Any:
            note(free, before)
            answer = method(self)
            note(free, after)
            return answer

        return call

    VLLM.wake = watched(VLLM.wake, "asleep", "awake, before sampling")  # type: ignore[method-assign]
    VLLM.sleep = watched(VLLM.sleep, "awake, after sampling", "asleep again")  # type: ignore[method-assign]


def note(free: list[tuple[str, float]], what: str) -> None:
    if torch.cuda.is_available():
        free.append((what, torch.cuda.mem_get_info()[0] / 2**30))


if __name__ == "__main__":
    main()
