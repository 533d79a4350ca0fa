"""Writes the YAML that a user starts from: settings with a comment on each."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.config.strict_yaml import dump_yaml
from hacrl.errors import UserError, harmless

COMMENTS = {
    "algorithm": "hacpo_robust shares rollouts; gspo and grpo train each agent alone (docs/algorithm.md)",
    "agents": "a hub id, a local folder or zoo:NAME; settings below may also stand in one agent's entry",
    "task": "rows with prompt and answer; reward: exact, math or file.py:function; eval: held-out data, to measure",
    "prompts_per_step": "each agent answers all of them in every step",
    "rollouts_per_update": "a step makes as many updates as its rollouts allow",
    "num_generations": "answers of each agent to each prompt",
    "max_prompt_length": "in tokens; a longer prompt ends the run",
    "max_completion_length": "in tokens",
    "learning_rate": "small models need more, for example 1.0e-4 for the zoo",
    "sampling_batch_size": "rollouts sampled at once, at most; less needs less memory; on a GPU leave it out",
    "max_steps": "an epoch is rows of the data / prompts_per_step",
    "eval_every": "steps; it needs held-out problems",
    "save_every": "steps; 0: at the end only",
    "output_dir": "it must be new or empty",
}
"""The comments on the keys of a starting file."""


def agents_of(models: Sequence[str]) -> list[dict[str, str]]:
    """An entry for each model, with an id made from its name."""
    agents: list[dict[str, str]] = []
    for model in models:
        name = re.sub(r"[^a-z0-9._-]+", "-", Path(model.removeprefix("zoo:")).name.lower()).strip("._-") or "agent"
        taken = sum(re.sub(r"-\d+$", "", agent["id"]) == name or agent["id"] == name for agent in agents)
        agents.append({"id": f"{name}-{taken + 1}" if taken else name, "model": model})
    return agents


def is_procedural(data: str, reward: str | None) -> bool:
    """Whether --data names a task that makes its problems; UserError if --reward comes with it."""
    procedural = data == "arithmetic" or data.startswith("gym:")
    if procedural and reward is not None:
        raise UserError(f"--reward: the task {data} has its own verifier. Leave --reward out.")
    return procedural


def starting_settings(
    models: Sequence[str], data: str, reward: str | None, output_dir: str, rows: int | None = None
) -> dict[str, Any]:
    """Settings to start from, for these models and data. `rows` counts the rows of the data, if known."""
    procedural = is_procedural(data, reward)
    return {
        "algorithm": {"name": "hacpo_robust"},
        "agents": agents_of(models),
        "task": {"name": data} if procedural else {"train": data, "reward": reward or "math"},
        "prompts_per_step": min(32, rows or 32),
        "rollouts_per_update": 128,
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 256,
        "learning_rate": 1.0e-6,
        "sampling_batch_size": 128,
        "max_steps": 60,
        "eval_every": 20,
        "save_every": 20,
        "output_dir": output_dir,
    }


def commented_yaml(
    settings: Mapping[str, Any], comments: Mapping[str, str], head: Iterable[str] = (), tail: Iterable[str] = ()
) -> str:
    """Settings as YAML with a comment above each key, between comments at the head and the tail."""
    lines = [_comment(line) for line in head]
    for key, value in settings.items():
        lines += [_comment(comments[key])] if comments.get(key) else []
        nested = isinstance(value, dict | list) and bool(value)
        lines.append(dump_yaml({key: value}, default_flow_style=None if nested else False, width=1000).rstrip())
    return "\n".join([*lines, *map(_comment, tail)]) + "\n"


def _comment(text: str) -> str:
    """One line of comment, whatever the text."""
    return harmless(" ".join(["#", *text.split()]))


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists, and is not overwritten. Choose another name with --output.") from None
    except FileNotFoundError:
        raise UserError(f"The folder {path.parent} does not exist. Create it, or choose another --output.") from None
