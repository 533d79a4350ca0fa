"""A whole run as one typed tree. Every default is in this folder or in the algorithm's own file.

`RunConfig.load` reads a preset or a YAML file, applies `key=value` overrides and refuses unknown keys,
wrong types and impossible combinations before anything is loaded.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, InstanceOf, PlainSerializer, field_validator, model_validator

from hacrl.algorithms import Algorithm, RobustHACPO
from hacrl.config.agent import AgentConfig, Settings, with_current_names, with_ids
from hacrl.config.algorithm import parse_algorithm
from hacrl.config.settings import apply_overrides, read_source, with_overrides
from hacrl.config.sources import LOGPS_NEEDED, SourceConfig
from hacrl.config.strict import Count, Few, Positive, Seconds, Seed, Size, Strict, checked, section_at, written
from hacrl.config.strict_yaml import dump_yaml
from hacrl.config.task import TaskConfig
from hacrl.errors import UserError, nearest

TRACKERS = ("tensorboard", "wandb", "trackio")
MAX_AGENTS = 256
MAX_ROLLOUTS = 10_000_000
"""The most rollouts of one step, which are all in memory."""
STUDY_KEYS = {"algorithms", "teams", "pairs", "seeds", "baseline"}

Member = TypeVar("Member")
Team = Annotated[list[Member], Field(min_length=1, max_length=MAX_AGENTS)]


class TeamConfig(Strict):
    """Settings of several agents: shared ones, and the agents, which may override them."""

    command: ClassVar[str]
    """The `hacrl` command that takes such a file."""
    first_keys: ClassVar[tuple[str, ...]] = ("agents",)
    """Sections that come first in the YAML text."""
    agents: Team[Any]
    """The agents, at least one."""

    @model_validator(mode="before")
    @classmethod
    def _share_settings(cls, data: Any) -> Any:
        """Give each agent the shared settings that it does not set itself."""
        if not isinstance(data, dict) or "agents" not in data:
            return data
        if not isinstance(data["agents"], list | tuple):
            raise ValueError(f"agents: expected a list of {{id: NAME, model: MODEL}}, not {data['agents']!r:.80}")
        for position, agent in enumerate(data["agents"]):
            if not isinstance(agent, dict | Strict):
                raise ValueError(f"agents.{position}: expected {{id: NAME, model: MODEL}}, not {agent!r:.80}")
        shared = {name: data[name] for name in cls.shared_settings() if name in data}
        own = (a.model_dump(exclude_unset=True) if isinstance(a, Strict) else a for a in data["agents"])
        return {**data, "agents": [{**shared, **settings} for settings in own]}

    @model_validator(mode="after")
    def _unique_ids(self) -> Self:
        ids = [agent.id for agent in self.agents]
        if len(set(ids)) < len(ids):
            raise ValueError(f"agents: every id must be unique, but the ids are {', '.join(ids)}")
        return self

    @classmethod
    def shared_settings(cls) -> list[str]:
        """Names of the settings that can be set for all agents and for one."""
        return [name for name in cls.model_fields if name in section_at(cls, ["agents"]).model_fields]

    @classmethod
    def load(cls, source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, a preset or a dict with `key=value` overrides; UserError if anything is wrong."""
        if not isinstance(source, str | Path | dict):
            raise UserError(f"Expected a preset, a YAML file or a dict of settings, not {type(source).__name__}.")
        data, where = (with_ids(source), "config") if isinstance(source, dict) else read_source(source)
        data = apply_overrides(data, overrides)
        check_command(cls.command, data, where)
        return cls.from_dict(data, with_overrides(where, overrides))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config") -> Self:
        return checked(cls, data, where)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain data. An agent lists only settings that differ from the shared ones."""
        data, shared = self.model_dump(mode="json"), self.shared_settings()
        agents = [
            {name: value for name, value in agent.items() if name not in shared or value != data[name]}
            for agent in data["agents"]
        ]
        return {**{name: data[name] for name in self.first_keys}, **data, "agents": agents}

    def to_yaml(self) -> str:
        return dump_yaml(self.to_dict())


class RayConfig(Strict):
    """Where agents run with `execution: ray`, and what happens when one is lost."""

    address: Annotated[str, written(r"^(auto|[^\s:/]+:[0-9]{1,5})$", "auto or HOST:PORT")] | None = None
    """auto: this machine's cluster; or HOST:PORT; null: a private Ray instance."""
    on_failure: Literal["restart", "stop"] = "restart"
    """When an agent is lost: `restart` from the newest checkpoint, or `stop`."""
    max_restarts: Count = 3
    """How many times lost agents are restarted in one call of `hacrl train`."""
    placement_timeout: Seconds = 300.0
    """Seconds to wait for the resources of all agents."""


class RunConfig(TeamConfig, Settings):
    """A whole run: algorithm, agents, task and settings."""

    command = "train"
    first_keys = ("algorithm", "agents", "task")

    algorithm: Annotated[
        InstanceOf[Algorithm],
        PlainSerializer(lambda algorithm: dataclasses.asdict(algorithm), dict),
    ] = RobustHACPO()
    """Its name, or file.py:Class or module:Class of your own, and its options."""
    agents: Team[AgentConfig]
    """At least one; each has an id, a model, and settings that differ from the run's."""
    sources: Annotated[list[SourceConfig], Field(max_length=MAX_AGENTS)] = []
    """Sources that only give rollouts: teachers behind an address, and stored rollouts."""
    task: TaskConfig
    """Where problems come from, and how answers are verified."""
    prompts_per_step: Size = 32
    """Prompts of one step; every agent answers all of them."""
    rollouts_per_update: Positive = 128
    """About how many rollouts one update uses; a learner that sees more makes more updates."""
    max_steps: Positive = 60
    """Number of steps."""
    eval_every: Count = 20
    """Steps between evaluations on held-out problems; 0: at the start and the end only."""
    eval_samples: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Answers sampled as in training to each held-out problem, for `eval_sampled`: their mean reward."""
    save_every: Count = 20
    """Steps between checkpoints; 0: at the end only."""
    save_final: bool = True
    """False: no checkpoint after the last step, unless `keep_best` saves one."""
    save_total_limit: Positive | None = None
    """How many of the newest checkpoints are kept, besides the best; null: all."""
    keep_best: bool = False
    """Also save when mean held-out accuracy is the best so far; never delete that one."""
    dynamic_sampling: bool = False
    """Replace prompts whose rewards are all equal by further ones (DAPO)."""
    dynamic_sampling_rounds: Few = 3
    """The most rounds of sampling in one step."""
    seed: Seed = 0
    """Seed of all random choices."""
    trace: bool = False
    """Write a trace: one line for every rollout that a learner used in an update."""
    report_to: list[str] = []
    """Trackers that get the metrics besides metrics.jsonl: tensorboard, wandb, trackio."""
    execution: Literal["local", "ray"] = "local"
    """local: all agents in one process; ray: each in one of its own."""
    ray: RayConfig = RayConfig()
    """Where agents run with `execution: ray`, and what happens when one is lost."""
    overlap: Annotated[int, Field(ge=0, le=1)] = 0
    """1: agents sample the next step's rollouts before they learn from this step's."""
    output_dir: str = "runs/default"
    """Folder of the run; it must be new or empty."""

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config") -> Self:
        return super().from_dict(with_current_names(data, where), where)

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
    def _possible_updates(self) -> Self:
        if self.rollouts_per_step > MAX_ROLLOUTS:
            raise ValueError(
                f"prompts_per_step x num_generations of all agents must be at most {MAX_ROLLOUTS:,} rollouts a step, "
                f"but is {self.rollouts_per_step:,}"
            )
        alone = not self.algorithm.shares_rollouts or len(self.names) == 1
        for agent in self.agents:
            if agent.num_generations == 1 and (alone or self.algorithm.groups_by_source):
                where = f"agents.{agent.id}.num_generations"
                raise ValueError(f"{where}: 1 gives no group to compare with; use at least 2")
            try:
                if not alone:
                    self.algorithm.check_schedule(self.updates_per_step(agent) * agent.num_iterations)
            except ValueError as error:
                raise ValueError(f"algorithm: {error}") from error
        return self

    @model_validator(mode="after")
    def _useful_sources(self) -> Self:
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"sources: agents and sources need different ids, but they are {', '.join(names)}")
        imitation = self.algorithm.imitation
        imitates = imitation.when != "never" and imitation.answers != "own"
        if self.sources and not self.algorithm.shares_rollouts and not imitates:
            raise ValueError(
                f"sources: {self.algorithm.name} uses an agent's own rollouts only; choose an algorithm that shares, "
                "for example hacpo_robust"
            )
        if self.sources and self.algorithm.compares_tokens:
            raise ValueError(
                f"sources: {self.algorithm.name} compares tokens, and the tokens of a source are not known; choose "
                "another algorithm"
            )
        for source in self.sources:
            if self.algorithm.needs_logps and (why := source.lacks_logps):
                raise ValueError(f"sources.{source.id}: {why}, {LOGPS_NEEDED}")
        return self

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        if self.eval_samples and not self.task.has_heldout:
            raise ValueError("eval_samples: there are no held-out problems to answer; set task.eval")
        if self.keep_best and not self.task.has_heldout:
            raise ValueError("keep_best: the best checkpoint is chosen on held-out problems; set task.eval")
        if self.overlap and self.dynamic_sampling:
            raise ValueError("overlap: dynamic_sampling needs the rewards before it samples more; choose one of them")
        for agent in self.agents if self.execution == "ray" else []:
            where, gpus = f"agents.{agent.id}", agent.resources.num_gpus
            if agent.device.startswith("cuda:"):
                raise ValueError(f"{where}.device: Ray chooses the GPU; write cuda, not {agent.device}")
            if agent.fsdp > 1 and 0 < (gpus or 0) < 1:
                raise ValueError(f"{where}.resources.num_gpus: each process of fsdp needs a whole GPU")
            if agent.device == "cuda" and gpus == 0:
                raise ValueError(f"{where}.resources.num_gpus: device: cuda needs a GPU, not 0")
        return self

    def remarks(self) -> list[str]:
        """What the algorithm will do, and which rewards it may take for something else than is meant, for people."""
        imitation = self.algorithm.imitation
        told = [imitation.sentence(), self.algorithm.explain(len(self.names)).decision]
        if imitation.when != "never":
            told += [part.doubt(imitation.min_reward) for part in (self.task, *self.task.mixture)]
        return [sentence for sentence in told if sentence]

    def rollouts_per_prompt(self, learner: AgentConfig) -> int:
        """The most rollouts of a prompt that a learner trains on."""
        return round(self._rollouts_used(learner, [source.num_generations for source in self.sources]))

    def _rollouts_used(self, learner: AgentConfig, outside: Sequence[float]) -> float:
        """How many rollouts of a prompt a learner trains on if other sources than agents give so many each."""
        count: dict[str, float] = {agent.id: agent.num_generations for agent in self.agents}
        return self.algorithm.rollouts_used(count.pop(learner.id), [*count.values(), *outside])

    def updates_per_step(self, learner: AgentConfig, outside: Sequence[int] | None = None) -> int:
        """Mini-batches of one pass: rollouts used / rollouts_per_update, each of at least one prompt.

        `outside` is what each source that is no agent gave in the step; None: the most that it can give.
        """
        rollouts: float = self.prompts_per_step * self.rollouts_per_prompt(learner)
        if outside is not None:
            given = [count / self.prompts_per_step for count in outside if count]
            rollouts = self.prompts_per_step * self._rollouts_used(learner, given)
        return min(max(round(rollouts / self.rollouts_per_update), 1), self.prompts_per_step)

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that all agents sample in one step."""
        return self.prompts_per_step * sum(agent.num_generations for agent in self.agents)

    @property
    def names(self) -> list[str]:
        """All sources of rollouts: the agents, then the others."""
        return [agent.id for agent in self.agents] + [source.id for source in self.sources]


def check_command(command: str, data: dict[str, Any], where: str) -> None:
    """Raise UserError if a file is for another command, which keys of that kind of file show."""
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
