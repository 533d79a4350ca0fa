"""Tasks: where prompts come from, and how answers are verified."""

from collections.abc import Sequence
from contextlib import ExitStack

from hacrl.config.given import GIVEN
from hacrl.config.task import PartConfig, ProblemsConfig, TaskConfig
from hacrl.errors import UserError
from hacrl.signs import doing
from hacrl.tasks.arithmetic import ArithmeticTask, arithmetic_reward, worked_answer
from hacrl.tasks.dataset import Epochs, load_problems, overlap
from hacrl.tasks.gym import GymTask
from hacrl.tasks.problem import Problem
from hacrl.tasks.task import Curriculum, Mixture, Task
from hacrl.tasks.verify import GYM, Reward, SoftOverlong, Verifier

__all__ = ["Task", "build_task", "refuse_gone"]

GymScorers = dict[tuple[float, int, float | None], Verifier]
"""Verifiers by their limits. Generators of a mixture with equal limits share one, because processes are costly."""
LOOKED_AT = 32
"""Number of problems of each stage of a gym task whose length is checked before the first step."""


@doing("reading the problems")
def build_task(config: TaskConfig, seed: int) -> tuple[Task, list[str]]:
    """Build the task of a config; returns the task and remarks for the user."""
    refuse_gone(config, "Put it into a file, and name that in a YAML file.")
    scorers: GymScorers = {}
    if not config.mixture:
        return _build_source(config, seed, config.eval_size, scorers)
    total = sum(part.weight for part in config.mixture)
    parts: dict[str, Task] = {}
    remarks: list[str] = []
    with ExitStack() as verifiers:  # ends their processes if a part cannot be built
        for part in config.mixture:
            eval_size = max(1, round(config.eval_size * part.weight / total))
            parts[part.label], own = _build_source(part, seed, eval_size, scorers)
            verifiers.enter_context(parts[part.label].verifier)
            remarks += [f"{part.label}: {remark}" for remark in own]
        return Mixture(parts, [part.weight for part in config.mixture], verifiers.pop_all()), remarks


def refuse_gone(config: TaskConfig, advice: str) -> None:
    """Raise UserError if settings were objects of the Python program that started the run, which no file holds."""
    if gone := config.given(gone=True):
        names = ", ".join(f"task.{setting}" for setting in gone)
        raise UserError(f"The run's folder does not hold what was {GIVEN.rstrip(': ')} ({names}). {advice}")


def _build_source(config: ProblemsConfig, seed: int, eval_size: int, scorers: GymScorers) -> tuple[Task, list[str]]:
    if config.generator is not None:
        return _build_gym(config, config.generator, seed, eval_size, scorers), []
    if config.name == "arithmetic":
        options = {"min_operators", "max_operators", "max_operand", "minus_share"}
        arithmetic = ArithmeticTask(seed, **config.model_dump(include=options))
        heldout = arithmetic.heldout("validation" if config.eval_split == "validation" else "test", eval_size)
        return Task(arithmetic.train, heldout, Verifier([(arithmetic_reward, 1.0)]), write_solution=worked_answer), []
    assert config.train is not None
    place = f"task.mixture.{config.label}" if isinstance(config, PartConfig) else "task"
    split, subset = config.train_split, config.subset
    problems = load_problems(config.train, split=split, subset=subset, name="train", key=f"{place}.train")
    heldout, remarks = [], []
    if config.eval is not None:
        split, subset = config.eval_split, config.eval_subset
        heldout = load_problems(config.eval, split=split, subset=subset, name="eval", key=f"{place}.eval")
        if shared := overlap(problems, heldout):
            remarks.append(f"{shared} of {len(heldout)} eval prompts also occur in the training data.")
    rewards: list[tuple[Reward, float]] = []
    for each in config.reward:
        longest, cache = each.max_completion_length, each.soft_punish_cache
        penalty = None if longest is None or cache is None else SoftOverlong(longest, cache)
        rewards.append((penalty or each.name, each.weight))
    return Task(Epochs(problems, seed).take, heldout[:eval_size], _verifier(config, rewards), problems), remarks


def _build_gym(config: ProblemsConfig, generator: str, seed: int, eval_size: int, scorers: GymScorers) -> Task:
    """Build a task from reasoning-gym. With a curriculum, the held-out problems are from the last stage."""
    curriculum = Curriculum(config.curriculum) if config.curriculum else None
    stages = [
        GymTask(generator, {**config.options, **stage}, seed, form=config.answer, instruction=config.instruction)
        for stage in (config.curriculum.stages if config.curriculum else [{}])
    ]

    def train(position: int, count: int) -> list[Problem]:
        return stages[curriculum.stage if curriculum else 0].train(position, count)

    heldout = stages[-1].heldout("validation" if config.eval_split == "validation" else "test", eval_size)
    listed = [problem for stage in stages for problem in stage.train(0, LOOKED_AT)] if curriculum else []
    limits = (config.reward_timeout, config.reward_workers, config.reward_memory_gib)
    if limits not in scorers:
        scorers[limits] = _verifier(config, [(GYM, 1.0)])
    return Task(train, heldout, scorers[limits], listed, curriculum, stages[0].solution)


def _verifier(config: ProblemsConfig, rewards: Sequence[tuple[Reward, float]]) -> Verifier:
    seconds = {"timeout": config.reward_timeout, "call_timeout": config.reward_call_timeout}
    return Verifier(rewards, **seconds, workers=config.reward_workers, memory_gib=config.reward_memory_gib)
