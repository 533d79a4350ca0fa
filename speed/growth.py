"""How the time of a step grows with completions, with their length, and with the number of agents.

    python speed/growth.py [--device cuda]

Each is varied alone, all completions have the same length, and an exponent is fitted: 1 is proportional. Of n agents
that share, each learns from the rollouts of all: their number, and the least possible work, grows with n^2.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment

AGENTS = ("llama-plus", "llama-minus", "llama-small", "llama-weak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table

    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    table = []
    for what, values in (("completions", (4, 8, 16, 32)), ("length", (16, 32, 64, 128)), ("agents", (1, 2, 4))):
        seconds = [step(options, **{what: value}) for value in values]
        results[what] = {"values": values, "seconds": seconds}
        rows = {what: values}
        if what == "agents":
            rows["rollouts used by all agents"] = tuple(n * n for n in values)
        for name, xs in rows.items():
            slope = exponent(xs, seconds)
            results[what][f"exponent in {name}"] = slope
            times = ", ".join(f"{x}: {s:.3f}" for x, s in zip(xs, seconds, strict=True))
            table.append([name, times, f"{slope:.2f}"])
    print_table(f"Seconds of a step (medians); {machine()}", ["", "value: seconds", "exponent"], table)
    if options.json:
        options.json.write_text(json.dumps(results) + "\n", encoding="utf-8")


def exponent(xs: tuple[int, ...], ys: list[float]) -> float:
    """Slope of a straight line through the logarithms, by least squares."""
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    slope = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return slope / sum((a - mean_u) ** 2 for a in u)


def step(options: argparse.Namespace, completions: int = 8, length: int = 32, agents: int = 1) -> float:
    """Median seconds of sampling and learning, alternating rewards, agents as the local executor runs them."""
    import statistics

    import torch
    from harness import problems_for, synchronize
    from prompts import alternating_rewards

    from hacrl.config import RunConfig
    from hacrl.execution.local import LocalExecutor
    from hacrl.learners.lesson import Lesson

    names = AGENTS[:agents]
    config = RunConfig.from_dict(
        {
            "algorithm": {"name": "hacpo"},
            "agents": [{"id": name, "model": f"zoo:{name}"} for name in names],
            "task": {"name": "arithmetic"},
            "prompts_per_step": options.prompts,
            "num_generations": completions,
            "rollouts_per_update": 10**9,
            "max_completion_length": length,
            "learning_rate": 0.0,
            "log_kl": False,
            "sampling_batch_size": 4096,
            "device": options.device,
        }
    )
    executor = LocalExecutor(config)
    for agent in executor.agents:
        agent.source.engine.stop_ids = [-1]  # type: ignore[attr-defined]
    problems = problems_for(executor.agents[0], options.prompts)
    omega_KK = torch.ones(agents, agents, dtype=torch.float64)
    times = []
    for number in range(options.repeats + 2):
        synchronize()
        start = time.perf_counter()
        rollouts = [rollout for own in executor.sample(problems, number, 0) for rollout in own.value]
        rewards = alternating_rewards([(r.source, r.prompt_id) for r in rollouts], set())
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward
        source_N = torch.tensor([rollout.source for rollout in rollouts])
        prompt_N = torch.tensor([rollout.prompt_index for rollout in rollouts])
        rewards_N = torch.tensor(rewards, dtype=torch.float64)
        lessons = [
            Lesson(
                step=number,
                prompts=[problem.prompt for problem in problems],
                rollouts=rollouts,
                advantage_N=config.algorithm.advantages(rewards_N, prompt_N, source_N, k, omega_KK).advantage_N,
                omega_N=config.algorithm.coefficients(source_N, k, omega_KK),
                minibatches=[list(range(options.prompts))],
                learning_rate=0.0,
            )
            for k in range(agents)
        ]
        executor.learn(lessons)
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
