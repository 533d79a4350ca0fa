"""All keys of all configs with defaults and descriptions, and the page of the docs that lists them."""

import dataclasses
import inspect
import json
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hacrl.algorithms import ALGORITHMS, Algorithm, CapabilityOptions, Imitation, RobustHACPO
from hacrl.algorithms.algorithm import CapabilityAware
from hacrl.config.agent import AgentConfig, ModelSettings, Settings
from hacrl.config.run import RunConfig
from hacrl.config.schema import attribute_docs
from hacrl.config.sources import SourceConfig
from hacrl.config.strict import Strict, parts
from hacrl.config.study import StudyConfig
from hacrl.config.task import CurriculumConfig, PartConfig, ProblemsConfig, RewardConfig, TaskConfig
from hacrl.config.warmup import DataConfig, WarmupAgentConfig, WarmupConfig, WarmupSettings

LISTS = {"agents", "sources", "mixture", "reward", "data", "curriculum"}
"""Keys whose sections have a table of their own."""
GROUPS = {
    "Prompts": ("max_prompt_length", "system_prompt", "prompt_suffix", "chat_template_kwargs"),
    "Sampling": (
        *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "stop"),
        *("sampling_batch_size", "engine", "vllm"),
    ),
    "Learning": (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2"),
        *("adam_epsilon", "max_grad_norm", "num_iterations", "mask_truncated_completions", "log_kl"),
        *("max_logprob_gap", "recompute_logprobs", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    ),
    "Memory, precision, devices": (
        *("device", "dtype", "lora", "optimizer", "optimizer_offload", "offload_idle", "gradient_dtype"),
        *("micro_batch_size", "gradient_checkpointing", "fsdp", "fast", "trust_remote_code"),
    ),
    "Resources with `execution: ray`": ("resources",),
}
"""The settings of agents, by what they are about."""


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Table:
    """Keys that belong together. `title` is a heading; `words` explain it; `heads` is the first column's name."""

    title: str
    keys: list[Key]
    words: str = ""
    heads: str = "option"


def tables() -> list[Table]:
    """All tables of the page, in its order."""
    return [*of_runs(), *of_sources(), *of_algorithms(), *of_tasks(), *of_warmups(), *of_studies()]


def markdown() -> str:
    """The tables as Markdown."""
    lines = []
    for table in tables():
        lines += [table.title, "", *([table.words, ""] if table.words else [])]
        if table.keys:
            lines += [f"| {table.heads} | default | what it does |", "|---|---|---|"]
            lines += [f"| `{key.name}` | `{key.default}` | {key.text} |" for key in table.keys]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def of_runs() -> Iterator[Table]:
    yield Table("## Settings of the run", list(keys(RunConfig, without=Settings.model_fields)))
    words = "Every agent has an `id` and a `model`. All other settings below may be set for the run or for one agent."
    yield Table("## Settings of agents", list(keys(AgentConfig, "agents.", Settings.model_fields)), words)
    found = {key.name: key for key in keys(Settings)}
    for group, names in GROUPS.items():
        yield Table(f"**{group}**", [key for name, key in found.items() if name.split(".")[0] in names])


def of_sources() -> Iterator[Table]:
    words = (
        "The section `sources` lists those that only give rollouts. Each has an `id`, and an `endpoint` or `rollouts`. "
        "Examples: [sources.md](sources.md)."
    )
    yield Table("## Sources", list(keys(SourceConfig, "sources.")), words)


def of_algorithms() -> Iterator[Table]:
    words = (
        "`algorithm.name` chooses one; the options below stand beside it. Formulas and reasons are in "
        "[algorithm.md](algorithm.md); [your own algorithm](architecture.md#an-algorithm-of-your-own) may have others."
    )
    shared = [*options(Algorithm, "algorithm."), *options(Imitation, "algorithm.imitation.")]
    yield Table("## Algorithms", shared, words, "option of all")
    by_capability = [*options(CapabilityAware, "algorithm.", {key.name for key in shared})]
    by_capability += options(CapabilityOptions, "algorithm.capability.")
    with_capability = [name for name, kind in ALGORITHMS.items() if issubclass(kind, CapabilityAware)]
    yield Table(f"**Capability** ({listed(with_capability)})", by_capability, heads="option of capability")
    known = {key.name for key in (*shared, *by_capability)}
    for name, kind in ALGORITHMS.items():
        about = str(inspect.getdoc(inspect.getmodule(kind))).split("\n\n")[0]
        own = [*options(kind, "algorithm.", known)]
        yield Table(f"**`{name}`**", own, " ".join(about.split()), f"option of {name}")


def of_tasks() -> Iterator[Table]:
    words = "The section `task`. What the tasks are, and examples: [tasks.md](tasks.md)."
    found = [
        *keys(TaskConfig, "task."),
        *keys(RewardConfig, "task.reward."),
        *keys(CurriculumConfig, "task.curriculum."),
        *keys(PartConfig, "task.mixture.", ProblemsConfig.model_fields),
    ]
    yield Table("## Task", found, words, "option of task")


def of_warmups() -> Iterator[Table]:
    words = (
        "The file of [`hacrl warmup`](tasks.md#warm-up). `data`, `batch_size`, `max_steps`, `target_accuracy` and the "
        "settings of a model above (prompts, learning, memory) may be set for the warm-up or for one agent."
    )
    found = [
        *keys(WarmupConfig, without=[*(ModelSettings.model_fields.keys() - {"learning_rate"}), "agents"]),
        *keys(DataConfig, "data."),
        *keys(WarmupAgentConfig, "agents.", [*WarmupSettings.model_fields, "id"]),
    ]
    yield Table("## Warm-up", found, words, "option of warm-up")


def of_studies() -> Iterator[Table]:
    words = "The file of `hacrl study`; [studies.md](studies.md#the-yaml) has an example."
    yield Table("## Study", list(keys(StudyConfig)), words, "option of study")


def keys(section: type[BaseModel], prefix: str = "", without: Container[str] = ()) -> Iterator[Key]:
    """The keys of a section, and of the sections in it that are no lists."""
    for name, field in section.model_fields.items():
        if name in without:
            continue
        inner = None if name in LISTS or name == "task" else section_in(field)
        if inner is None or field.default is None:
            yield Key(prefix + name, default_of(field), described(str(field.description), field.annotation))
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key stands for, if it is not an ordinary value."""
    kinds = (kind for kind in parts(field.annotation) if isinstance(kind, type) and issubclass(kind, Strict))
    return next(kinds, None)


def options(kind: type[Any], prefix: str, without: Container[str] = ()) -> Iterator[Key]:
    """The options of an algorithm or of a section of it; the name is left out."""
    docs, types = attribute_docs(kind), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        if name in without or field.name == "name":
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:  # a section, shown where it has other defaults than usual
            section = field.default_factory()
            usual = vars(type(section)())
            default = {key: value for key, value in vars(section).items() if value != usual[key]}
        if default != {}:
            yield Key(name, shown(default), described(docs[field.name], types[field.name]))


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return f"{{name: {default.name}}}" if isinstance(default, RobustHACPO) else shown(default)


def shown(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, float):
        return re.sub(r"^(\d+)e(-?)0?", r"\1.0e\2", repr(value))
    return value if isinstance(value, str) and value else json.dumps(value)


def described(text: str, annotation: Any) -> str:
    """A description in one line, with the possible values if it does not name them."""
    text = " ".join(text.split())
    literals = (part for part in parts(annotation) if get_origin(part) is Literal)
    choices = [choice for literal in literals for choice in get_args(literal)]
    missing = [choice for choice in choices if not re.search(rf"\b{choice}\b", text)]
    return f"{text} One of {listed(choices)}." if missing else text


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
