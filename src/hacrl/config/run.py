"""A whole run as one typed tree. Every default lives here, in task_config.py or in the algorithm's own file.

`RunConfig.load` reads a preset or a YAML file, applies `key=value` overrides and refuses unknown keys,
wrong types and impossible combinations before anything is loaded.
"""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    Field,
    InstanceOf,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from hacrl.algorithms import ALGORITHMS, Algorithm, CapabilityOptions, Imitation, RobustHACPO
from hacrl.config.settings import apply_overrides, read_source, with_overrides
from hacrl.config.strict import Count, Few, Length, Options, Positive, Seconds, Seed, Size, Strict, is_number
from hacrl.config.strict_yaml import dump_yaml
from hacrl.config.task import CurriculumConfig, PartConfig, RewardConfig, TaskConfig
from hacrl.errors import UserError, nearest

TRACKERS = ("tensorboard", "wandb", "trackio")
MAX_AGENTS = 256
MAX_ROLLOUTS = 10_000_000
"""Rollouts of one step, which are all in memory."""
MAX_MISTAKES = 20
"""Mistakes that an error lists."""
STUDY_KEYS = {"algorithms", "pairs", "seeds", "baseline"}

Checked = TypeVar("Checked", bound=BaseModel)


class LoraConfig(Strict):
    """Adapters beside a model's layers, in place of all its weights."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """What adapters add is multiplied by alpha / r."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the layers that get adapters; default: all linear layers but the output projection."""


class ModelSettings(Strict):
    """How a model is opened, prompted and updated: in a run, and in a warm-up before it."""

    max_prompt_length: Length = 512
    max_completion_length: Length = 256
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, besides the model's end-of-turn tokens."""
    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    """Training steps over which the learning rate rises to its full value."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0, le=1000)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    lora: LoraConfig | None = None
    """Train adapters only. Agents of a process with the same model, dtype and device share its weights."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments of 8 bits, by bitsandbytes, on CUDA."""
    optimizer_offload: bool = False
    """Keep float32 weights, gradients and moments in the computer's memory, and update there."""
    micro_batch_size: Size | None = None
    """Rollouts in one forward and backward pass; default: as many as fit into memory. Changes memory and speed only."""
    gradient_checkpointing: bool | None = None
    """Keep no activations inside layers, compute them again; default: where a rollout would not fit into memory."""
    sampling_batch_size: Size = 512
    """Completions decoded at once."""
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Added to the end of each prompt as it is, in a chat to the last message of the user."""
    chat_template_kwargs: Options = {}
    """Passed to the chat template, for example {enable_thinking: false}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation. Weights and optimizer are float32 in either case: bfloat16 ones hardly move."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = "auto"
    """auto: the first GPU if there is one."""
    trust_remote_code: bool = False
    fast: bool = True
    """False: the plain implementation, which computes the same and is what the fast one is tested against."""


class ResourcesConfig(Strict):
    """What a process takes of a Ray cluster."""

    num_cpus: Few = 1
    """Cores, and torch's threads."""
    num_gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """Default: 0 for `device: cpu` or where the cluster has no GPU, else 1."""
    custom: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = {}
    """Resources that nodes were started with: `ray start --resources='{"big": 1}'`."""


class AgentResources(ResourcesConfig):
    """What an agent takes of a Ray cluster; with `fsdp`, each of its processes."""

    sampler: ResourcesConfig | None = None
    """With `engine: vllm`: put vLLM into a process of its own, which takes this; null: into the agent's."""


class RayConfig(Strict):
    """Where agents run with `execution: ray`, and what is done when one is lost."""

    address: Annotated[str, Field(pattern=r"^(auto|[^\s:/]+:[0-9]{1,5})$")] | None = None
    """auto: the cluster of this machine; HOST:PORT: that one; null: a private Ray instance, started for this run."""
    on_failure: Literal["restart", "stop"] = "restart"
    """When an agent's process or node is lost: go on from the newest checkpoint, or end the run."""
    max_restarts: Count = 3
    """How many times lost agents are restarted in one call of `hacrl train`."""
    placement_timeout: Seconds = 300.0
    """Seconds to wait for the resources of all agents."""


class Settings(ModelSettings):
    """Settings of an agent. Given for the run they hold for all agents; an agent may override each."""

    num_generations: Annotated[int, Field(ge=1, le=65_536)] = 8
    """G: completions sampled for each prompt."""
    temperature: Annotated[float, Field(gt=0, le=1000)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    """0: no limit."""
    num_iterations: Few = 1
    """Passes over a batch."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off out of the objective (they still count in the baseline)."""
    log_kl: bool = True
    """Log the KL divergence to the starting model even when beta is 0; keeps a copy of its weights."""
    max_logprob_gap: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Largest mean difference, per token, between recorded and recomputed log-probabilities."""
    recompute_logprobs: bool | None = None
    """Take own old log-probabilities from the learner, not from the sampler; default: if dtype is bfloat16."""
    engine: Literal["native", "vllm"] = "native"
    """What samples: the built-in decoder on the weights that are trained, or vLLM, whose copy follows each update."""
    vllm: Options = {}
    """Passed to vllm.LLM, for example {gpu_memory_utilization: 0.4}."""
    sampler_ratio_max: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Weigh own rollouts by their probability for the learner over that for the sampler, at most this; null: do not."""
    resources: AgentResources = AgentResources()
    """With `execution: ray`."""
    fsdp: Few = 1
    """Processes among which weights, gradients and optimizer are divided; with CUDA, a GPU each, from `device` on."""


class AgentConfig(Settings):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: str
    """zoo:NAME, a local folder, or a Hugging Face hub id."""

    @model_validator(mode="after")
    def _possible_engine(self) -> Self:
        if self.engine == "vllm":
            if self.lora is not None:
                raise ValueError("engine: vllm samples from whole weights; use engine: native with lora")
            if (self.top_p < 1 or self.top_k) and self.temperature != 1:
                raise ValueError(
                    "engine: vllm reports log-probabilities before temperature or after top_p and top_k, and learning "
                    "needs those between; with top_p or top_k use temperature: 1, or engine: native"
                )
        elif self.resources.sampler is not None:
            raise ValueError("resources.sampler is the process of vLLM: add engine: vllm, or leave it out")
        if self.sampler_ratio_max is not None and not self.recomputes_logprobs:
            raise ValueError("sampler_ratio_max compares with the learner's own: add recompute_logprobs: true")
        return self

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        if self.optimizer == "adamw_8bit" and self.optimizer_offload:
            raise ValueError("optimizer_offload updates on the CPU, where adamw_8bit does not work; choose one of them")
        if self.fsdp > 1:
            for name in ("lora", "optimizer", "optimizer_offload", "engine"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"fsdp: an agent in several processes has no {name}; leave it out")
        return self

    @property
    def recomputes_logprobs(self) -> bool:
        return self.dtype == "bfloat16" if self.recompute_logprobs is None else self.recompute_logprobs


class RunConfig(Settings):
    algorithm: Annotated[
        InstanceOf[Algorithm],
        PlainSerializer(lambda algorithm: dataclasses.asdict(algorithm), dict),
    ] = RobustHACPO()
    agents: Annotated[list[AgentConfig], Field(min_length=1, max_length=MAX_AGENTS)]
    task: TaskConfig
    prompts_per_step: Size = 32
    rollouts_per_update: Positive = 128
    """Rollouts of one update, whatever the algorithm: a learner that sees more rollouts makes more updates."""
    max_steps: Positive = 60
    eval_every: Count = 20
    """Steps between evaluations on held-out problems; 0: at the start and the end only."""
    eval_samples: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Answers to each held-out problem that are sampled as in training; their mean reward is `eval_sampled`."""
    save_every: Count = 20
    """Steps between checkpoints; 0: at the end only."""
    save_final: bool = True
    """False: none after the last step, unless `keep_best` wants it. For studies whose models nobody needs."""
    save_total_limit: Positive | None = None
    """How many checkpoints are kept, besides the best."""
    keep_best: bool = False
    """Also save when the mean held-out accuracy is the best so far, and never delete that checkpoint."""
    dynamic_sampling: bool = False
    """Replace prompts whose rewards are all equal by further ones (DAPO)."""
    dynamic_sampling_rounds: Few = 3
    """At most so many rounds of sampling a step."""
    seed: Seed = 0
    trace: bool = False
    """Write one line for every rollout each learner used in each update."""
    report_to: list[str] = []
    """Trackers that get the metrics besides metrics.jsonl: tensorboard, wandb, trackio."""
    execution: Literal["local", "ray"] = "local"
    """local: all agents in one process. ray: each in a process of its own, on one machine or a cluster."""
    ray: RayConfig = RayConfig()
    overlap: Annotated[int, Field(ge=0, le=1)] = 0
    """1: agents sample the next step's rollouts before they learn from this step's, without waiting for each other."""
    output_dir: str = "runs/default"

    @model_validator(mode="before")
    @classmethod
    def _share_settings(cls, data: Any) -> Any:
        return share_settings(data, Settings)

    @field_validator("algorithm", mode="before")
    @classmethod
    def _parse_algorithm(cls, value: Any) -> Algorithm:
        return parse_algorithm(value)

    @field_validator("report_to", mode="before")
    @classmethod
    def _known_trackers(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            raise ValueError(f"expected a list of {', '.join(TRACKERS)}, not {value!r}")
        for name in names:
            if name not in TRACKERS:
                raise ValueError(f"unknown tracker {name!r}{nearest(str(name), TRACKERS)}")
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _possible(self) -> Self:
        ids = [agent.id for agent in self.agents]
        if len(set(ids)) < len(ids):
            raise ValueError(f"agents: every id must be unique, but the ids are {', '.join(ids)}")
        if self.rollouts_per_step > MAX_ROLLOUTS:
            raise ValueError(
                f"prompts_per_step x num_generations of all agents must be at most {MAX_ROLLOUTS:,} rollouts a step, "
                f"but is {self.rollouts_per_step:,}"
            )
        alone = not self.algorithm.shares_rollouts or len(ids) == 1
        own_groups = alone or self.algorithm.groups_by_source
        for agent in self.agents:
            where = f"agents.{agent.id}"
            if agent.num_generations == 1 and own_groups:
                raise ValueError(f"{where}.num_generations: 1 gives no group to compare with; use at least 2")
            try:
                if not alone:
                    self.algorithm.check_schedule(self.updates_per_step(agent) * agent.num_iterations)
            except ValueError as error:
                raise ValueError(f"algorithm: {error}") from error
        if self.eval_samples and not self.task.has_heldout:
            raise ValueError("eval_samples: there are no held-out problems to answer; set task.eval")
        if self.keep_best and not self.task.has_heldout:
            raise ValueError("keep_best: the best checkpoint is chosen on held-out problems; set task.eval")
        if self.overlap and self.dynamic_sampling:
            raise ValueError("overlap: dynamic_sampling needs the rewards before it samples more; choose one of them")
        for agent in self.agents:
            if self.execution == "ray" and agent.device.startswith("cuda:"):
                raise ValueError(f"agents.{agent.id}.device: Ray chooses the GPU; write cuda, not {agent.device}")
            if self.execution == "ray" and agent.fsdp > 1 and 0 < (agent.resources.num_gpus or 0) < 1:
                raise ValueError(f"agents.{agent.id}.resources.num_gpus: each process of fsdp needs a whole GPU")
            if self.execution == "ray" and agent.device == "cuda" and agent.resources.num_gpus == 0:
                raise ValueError(f"agents.{agent.id}.resources.num_gpus: device: cuda needs a GPU, not 0")
        return self

    def rollouts_per_prompt(self, learner: AgentConfig) -> int:
        """How many rollouts of a prompt a learner trains on."""
        count = {agent.id: agent.num_generations for agent in self.agents}
        return self.algorithm.rollouts_used(count.pop(learner.id), list(count.values()))

    def updates_per_step(self, learner: AgentConfig) -> int:
        """Mini-batches of one pass: rollouts used / rollouts_per_update, each of at least one prompt."""
        rollouts = self.prompts_per_step * self.rollouts_per_prompt(learner)
        return min(max(round(rollouts / self.rollouts_per_update), 1), self.prompts_per_step)

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * sum(agent.num_generations for agent in self.agents)

    @classmethod
    def load(cls, source: str | Path, overrides: Iterable[str] = ()) -> Self:
        """A preset's name or a YAML file, with `key=value` overrides; UserError if anything is wrong."""
        data, where = read_source(source)
        overrides = list(overrides)
        data = apply_overrides(data, overrides)
        check_command("train", data, where)
        return cls.from_dict(data, with_overrides(where, overrides))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config") -> Self:
        return checked(cls, data, where)

    def to_yaml(self) -> str:
        """The resolved config; an agent's settings only where they differ from the run's."""
        data = without_shared_settings(self.model_dump(mode="json"), Settings)
        order = ["algorithm", "agents", "task"]
        data = {**{name: data[name] for name in order}, **data}
        return dump_yaml(data)


def check_command(command: str, data: dict[str, Any], where: str) -> None:
    """UserError if a file is for another command, by keys that only files of that kind have."""
    agents = data.get("agents")
    sections = [data, *agents] if isinstance(agents, list) else [data]
    if "agents" not in data and STUDY_KEYS & data.keys():
        kind, right = "a study", "study"
    elif "agents" in data and any("data" in section for section in sections if isinstance(section, dict)):
        kind, right = "a warm-up", "warmup"
    elif {"agents", "task"} <= data.keys() <= RunConfig.model_fields.keys():
        kind, right = "a run", "train"
    else:
        return
    if right != command:
        raise UserError(f"{where} looks like {kind}: use `hacrl {right} {where}`.")


def share_settings(data: Any, settings: type[Strict]) -> Any:
    """What is set for the run holds for each agent that does not set it itself."""
    if not isinstance(data, dict) or not isinstance(data.get("agents"), list):
        return data
    shared = {name: data[name] for name in settings.model_fields if name in data}
    agents = []
    for agent in data["agents"]:
        own = agent.model_dump(exclude_unset=True) if isinstance(agent, settings) else agent
        agents.append({**shared, **own} if isinstance(own, dict) else own)
    return {**data, "agents": agents}


def without_shared_settings(data: dict[str, Any], settings: type[Strict]) -> dict[str, Any]:
    """Remove the settings of agents that are equal to the run's."""
    agents = [
        {name: value for name, value in agent.items() if name not in settings.model_fields or value != data[name]}
        for agent in data["agents"]
    ]
    return {**data, "agents": agents}


def parse_algorithm(value: Any) -> Algorithm:
    """An algorithm from its section of the config: `name` chooses, the rest are its options or the usual one's."""
    if isinstance(value, Algorithm):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a section with a name (one of {', '.join(ALGORITHMS)}), not {value!r}")
    if isinstance(value.get("scale_rewards"), bool):  # as TRL has it
        value = {**value, "scale_rewards": "group" if value["scale_rewards"] else "none"}
    name = value.get("name", RobustHACPO.name)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"name: {name!r} is no algorithm{nearest(str(name), ALGORITHMS)}")
    check_options(value, ALGORITHMS[name], name)
    for section, options in (("capability", CapabilityOptions), ("imitation", Imitation)):
        if isinstance(value.get(section), dict):
            check_options(value[section], options, section)
            usual = getattr(ALGORITHMS[name](), section)  # algorithms may have defaults of their own
            value = {**value, section: {**dataclasses.asdict(usual), **value[section]}}
    try:
        return TypeAdapter(ALGORITHMS[name]).validate_python(value)
    except ValidationError as error:
        raise ValueError("; ".join(explain(error))) from None


def check_options(data: dict[str, Any], options: type, section: str) -> None:
    types = {field.name: field.type for field in dataclasses.fields(options)}
    for key, value in data.items():
        if key not in types:
            hint = nearest(str(key), types)
            if options in ALGORITHMS.values() and (owners := owners_of(str(key))):
                names = " or ".join(owners)
                hint = f"; it is an option of {names}: add algorithm.name={names}, or choose from {', '.join(types)}"
            raise ValueError(f"{section} has no option {key!r} (set to {value!r}){hint}")
        if isinstance(value, bool) and is_number(types[key]):
            raise ValueError(f"{section}: {key} is a number, not {str(value).lower()}")


def owners_of(option: str) -> list[str]:
    """The algorithms that have an option."""
    return [name for name, kind in ALGORITHMS.items() if option in {f.name for f in dataclasses.fields(kind)}]


SECTIONS: dict[tuple[str, ...], type[Strict]] = {
    (): RunConfig,
    ("agents",): AgentConfig,
    ("lora",): LoraConfig,
    ("agents", "lora"): LoraConfig,
    ("resources",): AgentResources,
    ("resources", "sampler"): ResourcesConfig,
    ("agents", "resources"): AgentResources,
    ("agents", "resources", "sampler"): ResourcesConfig,
    ("ray",): RayConfig,
    ("task",): TaskConfig,
    ("task", "reward"): RewardConfig,
    ("task", "curriculum"): CurriculumConfig,
    ("task", "mixture"): PartConfig,
    ("task", "mixture", "reward"): RewardConfig,
    ("task", "mixture", "curriculum"): CurriculumConfig,
}


def checked(
    model: type[Checked],
    data: dict[str, Any],
    where: str = "",
    sections: Mapping[tuple[str, ...], type[Strict]] = SECTIONS,
) -> Checked:
    """The typed tree; UserError with a line for each mistake. `where` is what the user knows the data by."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError((f"{where}: " if where else "") + "\n".join(explain(error, sections))) from None


def explain(error: ValidationError, sections: Mapping[tuple[str, ...], type[Strict]] = SECTIONS) -> list[str]:
    """One line for each mistake: the place, the value and what to do. `sections` are the tree's, by their place."""
    items = error.errors()
    for_the_run = {item["loc"] for item in items}
    # A setting of the run, which its agents share, is told once.
    items = [item for item in items if item["loc"][0:1] != ("agents",) or item["loc"][2:] not in for_the_run]
    lines = []
    for item in items[:MAX_MISTAKES]:
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if item["type"] == "extra_forbidden":
            section = tuple(part for part in item["loc"][:-1] if isinstance(part, str))
            key, model = str(item["loc"][-1]), sections.get(section, sections[()])
            if section == ("agents",) and key in sections[()].model_fields:
                message = f"{key} is a setting of the whole run, not of one agent"
            else:
                value = reprlib.repr(item["input"])
                message = f"unknown key {key!r} (set to {value}){nearest(key, model.model_fields)}"
        elif item["type"] == "missing":
            message = "missing"
        elif item["type"] == "less_than_equal":
            message = f"must be at most {item['ctx']['le']:,.12g} (got {reprlib.repr(item['input'])})"
        elif item["type"] != "value_error":
            message = f"{message} (got {reprlib.repr(item['input'])})"
        lines.append(f"{place}: {message}" if place else message)
    if len(items) > MAX_MISTAKES:
        lines.append(f"and {len(items) - MAX_MISTAKES} more mistakes")
    return lines
