"""What the comparisons of this folder share: agents with forced lengths, subprocesses for the peers, one table."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prompts import KINDS, alternating_rewards, prompts_of_cycle
from rich.console import Console
from rich.table import Table

from hacrl.agents.agent import Agent
from hacrl.config import RunConfig
from hacrl.execution.memory import keep_freed_memory
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import permutation
from hacrl.tasks.problem import Problem

ROOT = Path(__file__).parent.parent
ZOO = ROOT / "src" / "hacrl" / "agents" / "zoo" / "models"


def forced_agent(
    model: str, *, prompts: int, generations: int, tokens: int, updates: int = 1, forced: bool = True, **changes: Any
) -> Agent:
    """An agent whose completions all have exactly `tokens` tokens, if `forced`: it knows no end-of-turn token."""
    settings = {
        "algorithm": {"name": "gspo"},
        "agents": [{"id": "agent", "model": model}],
        "task": {"name": "arithmetic"},
        "prompts_per_step": prompts,
        "num_generations": generations,
        "rollouts_per_update": prompts * generations // updates,
        "max_prompt_length": 512,
        "max_completion_length": tokens,
        "learning_rate": 1e-6,
        "log_kl": False,
        "sampling_batch_size": 4096,
    }
    config = RunConfig.from_dict({**settings, **changes})
    keep_freed_memory()
    agent = Agent(config.agents[0], 0, config.algorithm, seed=0)
    if forced:
        agent.source.engine.stop_ids = [-1]  # type: ignore[attr-defined]
    return agent


def prompt_kind(model: str) -> str:
    """The zoo knows arithmetic and nothing else."""
    return "arithmetic" if model.startswith("zoo:") else "words"


def problems_for(agent: Agent, count: int, prompts: Sequence[str] | None = None, cycle: int = 0) -> list[Problem]:
    """Problems of one cycle: those of the list, or the first of the kind that the model knows."""
    own = KINDS[prompt_kind(agent.config.model)](count) if prompts is None else prompts_of_cycle(prompts, cycle, count)
    return [Problem(id=str(i), prompt=prompt, answer="") for i, prompt in enumerate(own)]


def gspo_cycle(agent: Agent, problems: list[Problem], cycle: int, updates: int) -> dict[str, float]:
    """Sample, reward every second completion, and learn, as the trainer does; the seconds of each part."""
    start = time.perf_counter()
    rollouts = agent.sample(problems, cycle, 0)
    sampled = time.perf_counter()
    for rollout, reward in zip(rollouts, alternating_rewards([r.prompt_id for r in rollouts], set()), strict=True):
        rollout.reward = reward
    agent.learn(lesson_of(agent, problems, rollouts, cycle, updates))
    end = time.perf_counter()
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return {"total": end - start, "sampling": sampled - start, "training": end - sampled, "tokens": tokens}


def lesson_of(agent: Agent, problems: list[Problem], rollouts: list[Rollout], step: int, updates: int) -> Lesson:
    algorithm = agent.algorithm
    source_N = torch.zeros(len(rollouts), dtype=torch.long)
    prompt_N = torch.tensor([rollout.prompt_index for rollout in rollouts])
    rewards_N = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    omega_KK = torch.ones(1, 1, dtype=torch.float64)
    order = permutation(len(problems), 0, 0, step, 0)
    return Lesson(
        step=step,
        prompts=[problem.prompt for problem in problems],
        rollouts=rollouts,
        advantage_N=algorithm.advantages(rewards_N, prompt_N, source_N, 0, omega_KK).advantage_N,
        omega_N=algorithm.coefficients(source_N, 0, omega_KK),
        minibatches=[part.tolist() for part in np.array_split(order, updates)],
        learning_rate=agent.config.learning_rate,
    )


def median_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def timed(work: Callable[[], Any], repeats: int, warmup: int = 1) -> list[float]:
    """Seconds of each repeat, the device's work included."""
    seconds = []
    for repeat in range(warmup + repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if repeat >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_side(command: Sequence[Any], answers: bool = True) -> dict[str, Any]:
    """Run one side of a comparison in a process of its own; its last line is a JSON object if it `answers`."""
    print("$", " ".join(str(part) for part in command), flush=True)
    result = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}\nThe command above failed.")
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1]) if answers else {}
    return answer


def prompts_file(kind: str, count: int) -> str:
    path = Path(tempfile.mkdtemp()) / f"{kind}.json"
    path.write_text(json.dumps(KINDS[kind](count)), encoding="utf-8")
    return str(path)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
