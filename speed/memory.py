"""Memory and rate of learning at the models' real shapes: random weights, random rewards, answers of geometric lengths.

    python speed/memory.py qwen3-1.7b qwen3-4b                               # a team on one GPU, bfloat16
    python speed/memory.py qwen3-8b --set lora.r=16 algorithm.name=gspo      # any settings of a run
    python speed/memory.py tiny tiny --prompts 4 --mean 12 --most 32         # on a CPU

For each algorithm it trains a few steps and prints, for each agent, the bytes a parameter of its resident state while
it learns (weights, float32 weights, moments, gradients, starting model) and while others work; what torch had
allocated, at that moment and at most, beside the estimate of `hacrl train --dry-run`; and seconds of a step, with the
estimate for answers of full length in brackets. The rate of learning counts 6 operations a parameter for each token
with a gradient, and 2 for each that is only scored; prompts are not counted.
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment
from shapes import SHAPES, make_model, random_prompts

COLUMNS = ["", "B/param", "idle", "estimate", "error", "beside GiB", "peak GiB", "a pass", "sample", "learn", "Tflop/s"]
AVERAGED = ("tokens_trained", "tokens_forward", "time/learn", "time/sample", "time/tokens_per_second")
"""Metrics of which the mean is taken, over steps after the first that end without imitation."""
MATRIX_RATE = 790e12
"""bfloat16 operations a second of a matrix product, measured on an H200."""
REWARD = """
import random

def reward(prompts, completions, **columns):
    return [float(random.Random(completion).random() < 0.5) for completion in completions]
"""


def tensors_of(agent: Any) -> list[Any]:
    """What the agent keeps from one call to the next: weights, gradients, moments, the starting model."""
    import torch

    weights = [*agent.model.parameters(), *agent.weights.weights]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    states = [value for state in agent.learner.optimizer.state.values() for value in state.values()]
    start = agent.learner.reference
    reference = [] if start is None else [*start.__self__.model.parameters()]
    return [t for t in (*weights, *gradients, *states, *reference) if isinstance(t, torch.Tensor)]


def bytes_of(tensors: Iterable[Any], device_type: str) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type == device_type}
    return sum(storage.nbytes() for storage in storages.values())


def allocated(device_type: str) -> int:
    """Bytes in tensors now: as torch counts them on a GPU; on a CPU, in those that Python knows of."""
    import torch

    if device_type == "cuda":
        return torch.cuda.memory_allocated()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        known += [tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None]
        return bytes_of(known, "cpu")


class Meter:
    """Reads memory right after an agent's updates, and when it is done."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.device = agent, agent.device.type
        self.parameters = sum(parameter.numel() for parameter in agent.model.parameters())
        self.learning = self.idle = self.beside = 0
        inner: Callable[..., bool] = agent.learner.apply

        def apply(*args: Any) -> bool:
            done = inner(*args)
            self.learning = max(self.learning, bytes_of(tensors_of(agent), self.device))
            self.beside = max(self.beside, allocated(self.device))
            return done

        agent.learner.apply = apply

    def rest(self) -> None:
        self.idle = max(self.idle, bytes_of(tensors_of(self.agent), self.device))


def measure(config: Any) -> dict[str, Any]:
    """Train the run's steps; returns figures of each agent, and of the run."""
    import torch

    from hacrl.execution.local import LocalExecutor
    from hacrl.seeding import seed_all
    from hacrl.tasks import build_task
    from hacrl.training.fit import Memories
    from hacrl.training.run_dir import RunDir
    from hacrl.training.trainer import Trainer

    class Silent:
        def on_phase(self, phase: str) -> None: ...
        def on_metrics(self, step: int, metrics: dict[str, Any]) -> None: ...

    memories = Memories()
    plans, needs = memories.plan(config)[1], memories.needs(config)
    seed_all(config.seed)
    task, _ = build_task(config.task, config.seed)
    with task.verifier:
        executor = LocalExecutor(config)
        trainer = Trainer(config, task, executor, RunDir.create(config), Silent())
        meters = [Meter(agent) for agent in executor.agents]
        lines = []
        for trainer.step in range(1, config.max_steps + 1):
            lines.append(trainer.train_step())
            for meter in meters:
                meter.rest()
        executor.close()
    agents = []
    for meter, plan, peak in zip(meters, plans, executor.peak_memory, strict=True):
        P, name = meter.parameters, plan.id
        usual = [line for line in lines[1:] if f"{name}/imitation/tokens" not in line] or lines
        own = {key: sum(line[f"{name}/{key}"] for line in usual) / len(usual) for key in AVERAGED}
        scored = own["tokens_forward"] - own["tokens_trained"]
        operations = P * (6 * own["tokens_trained"] + 2 * scored)
        kept = ("weights", "optimizer", "gradients")
        agents.append({
            "id": plan.id, "parameters": P, "learning": meter.learning / P, "idle": meter.idle / P,
            "planned": sum(plan.memory[name] for name in kept) * 2**30 / P, "beside": meter.beside / 2**30,
            "peak": peak, "rate": operations / own["time/learn"], "learn_seconds": own["time/learn"],
            "sample_seconds": own["time/sample"], "tokens_per_second": own["time/tokens_per_second"],
            "planned_seconds": {"sampling": plan.sampling, "learning": plan.learning},
            "pass_tokens": meter.agent.learner.batch_tokens,
            "checkpointing": meter.agent.opened.policy.backbone.checkpointing,
        })  # fmt: skip
    together = needs[-1]
    del executor, trainer, meters
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "agents": agents,
        "estimate": {"planned": together.planned, "there": together.there, "verdict": together.verdict},
        "steps": [{name: line[name] for name in line if "time/" in name} for line in lines],
    }


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for agent in result["agents"]:
        error = agent["learning"] / agent["planned"] - 1
        peak = "" if agent["peak"] is None else f"{agent['peak']:.1f}"
        share = f"{agent['rate'] / 1e12:.3g} ({agent['rate'] / MATRIX_RATE:.0%})"
        seconds = [
            f"{agent[f'{did}_seconds']:.1f} ({agent['planned_seconds'][plan]:.1f})"
            for did, plan in (("sample", "sampling"), ("learn", "learning"))
        ]
        passes = f"{agent['pass_tokens']:,}{' again' if agent['checkpointing'] else ''}"
        rows.append([
            agent["id"], f"{agent['learning']:.2f}", f"{agent['idle']:.2f}", f"{agent['planned']:.2f}", f"{error:+.1%}",
            f"{agent['beside']:.2f}", peak, passes, *seconds, share,
        ])  # fmt: skip
    return rows


def peak_of(result: dict[str, Any]) -> str:
    estimate, peaks = result["estimate"], [agent["peak"] for agent in result["agents"]]
    said = f"estimated peak of the run {estimate['planned']:.2f} GiB of {estimate['there']:.1f}: {estimate['verdict']}"
    return said if None in peaks else f"peak of the run {max(peaks):.1f} GiB; {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--algorithms", nargs="+", default=["hacpo", "hacpo_robust"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--mean", type=float, default=720, help="mean length of answers")
    parser.add_argument("--most", type=int, default=4096, help="largest length of answers")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table

    from hacrl.config import RunConfig
    from hacrl.config.settings import apply_overrides

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    results = {}
    try:
        for name in dict.fromkeys(options.shapes):
            make_model(folder / name, SHAPES[name], options.mean, device)
        smallest = min((SHAPES[name] for name in options.shapes), key=lambda shape: shape["vocab_size"])
        count = options.prompts * options.steps
        ids = random_prompts(smallest, options.mean, count, options.prompt_tokens)
        prompts = [" ".join(f"w{i}" for i in row) for row in ids]
        data = "".join(json.dumps({"prompt": prompt, "answer": "none"}) + "\n" for prompt in prompts)
        (folder / "train.jsonl").write_text(data, encoding="utf-8")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        task = {"train": str(folder / "train.jsonl"), "reward": f"{folder / 'reward.py'}:reward", "eval_size": 1}
        for algorithm in options.algorithms:
            settings = {
                "algorithm": {"name": algorithm},
                "agents": [{"id": f"{name}-{i}", "model": str(folder / name)} for i, name in enumerate(options.shapes)],
                "task": task,
                "output_dir": str(folder / algorithm),
                "prompts_per_step": options.prompts,
                "num_generations": options.generations,
                "max_prompt_length": options.prompt_tokens,
                "max_completion_length": options.most,
                "max_steps": options.steps,
                "dtype": "bfloat16",
                "max_logprob_gap": 1.0,
            }
            config = RunConfig.from_dict(apply_overrides(settings, options.set))
            results[algorithm] = result = measure(config)
            size = f"{options.prompts} x {options.generations} answers, mean {options.mean:g}, at most {options.most}"
            print_table(f"{algorithm}, {size}, {config.agents[0].dtype}; {machine()}", COLUMNS, rows_of(result))
            print(peak_of(result))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
