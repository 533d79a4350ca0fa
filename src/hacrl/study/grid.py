"""The runs of a study: teams x algorithms x options x seeds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hacrl.algorithms import ALGORITHMS
from hacrl.config import RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.config.strict_yaml import dump_yaml
from hacrl.config.study import NAMING, Changes, StudyConfig, flat
from hacrl.errors import UserError, nearest
from hacrl.training.run_dir import RunDir

ENLARGED = re.compile(r"(.+)_x([1-9][0-9]{0,4})")
"""Labels such as gspo_x2, which is GSPO with twice the rollouts."""


def merge(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes as `key=value` on the command line does: another algorithm.name starts from its defaults."""
    return apply_overrides(data, [f"{key}={dump_yaml(value)}" for key, value in flat(changes)])


def of_present_agents(changes: Mapping[str, Any], present: set[str], known: set[str]) -> dict[str, Any]:
    """Leave out the settings of agents that only other teams have; an id that no team has stays and is refused."""

    def absent(key: str) -> bool:
        owners = [agent for agent in known if f"{key}.".startswith(f"agents.{agent}.")]
        return bool(owners) and max(owners, key=len) not in present  # an id may contain dots

    return {key: value for key, value in flat(changes) if not absent(key)}


def listed_ids(data: Mapping[str, Any]) -> set[str]:
    """Ids of the agents in settings that are not checked yet."""
    agents = data.get("agents")
    items = agents if isinstance(agents, list) else []
    return {str(item["id"]) for item in items if isinstance(item, dict) and "id" in item}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    team: str
    variant: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.team}/{self.variant}/seed-{self.seed}"

    @property
    def folder(self) -> RunDir:
        return RunDir(self.config.output_dir)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of the run if all steps are done, else None."""
        summary = self.folder.summary()
        return summary if summary is not None and summary["steps"] >= self.config.max_steps else None

    @property
    def started(self) -> bool:
        return self.folder.config_file.is_file()

    @property
    def updates(self) -> dict[str, int]:
        """Updates of each agent in the whole run."""
        steps, agents = self.config.max_steps, self.config.agents
        return {agent.id: steps * self.config.updates_per_step(agent) * agent.num_iterations for agent in agents}

    @property
    def rollouts_used(self) -> dict[str, int]:
        """Rollouts that each learner uses in the whole run."""
        prompts, agents = self.config.max_steps * self.config.prompts_per_step, self.config.agents
        return {a.id: prompts * self.config.rollouts_per_prompt(a) * a.num_iterations for a in agents}

    @property
    def cost(self) -> int:
        """Number of rollouts sampled and learned from, to which the run's time is about proportional."""
        return self.config.max_steps * self.config.rollouts_per_step + sum(self.rollouts_used.values())


@dataclass(frozen=True)
class Study:
    """A study and the runs it stands for."""

    config: StudyConfig
    runs: list[Run]
    """All runs, seed after seed, so that the finished part of a study can be compared."""

    @classmethod
    def build(cls, config: StudyConfig) -> Self:
        """List the runs of the grid; UserError unless every one is possible."""
        groups = []
        for team, over_base in (config.teams or {"main": {}}).items():
            for variant, (algorithm, option) in config.variants.items():
                where = f"{config.name}: {team}/{variant}"
                first = RunConfig.from_dict(run_settings(config, over_base, algorithm, option, where), where)
                check_comparable(config, first, where)
                groups.append((team, variant, first))
        runs = []
        for seed in config.seeds:
            for team, variant, first in groups:
                folder = config.folder / "runs" / team / variant / f"seed-{seed}"
                run = first.model_copy(update={"seed": seed, "output_dir": str(folder)})
                runs.append(Run(team, variant, seed, run))
        return cls(config, runs)

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def teams(self) -> list[str]:
        return list(self.config.teams) or ["main"]

    @property
    def variants(self) -> list[str]:
        return list(self.config.variants)

    @property
    def baseline(self) -> str:
        return self.config.baseline or self.variants[0]

    @cached_property
    def groups(self) -> dict[tuple[str, str], list[Run]]:
        """The runs that differ in their seed alone, by team and variant."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.team, run.variant), []).append(run)
        return found


def run_settings(
    config: StudyConfig, over_base: Changes, algorithm: str, option: Changes, where: str
) -> dict[str, Any]:
    """The settings of one run: base, team, settings, algorithm, option, each of which overrides those before it."""
    usual = RunConfig.model_fields["algorithm"].default.name
    data = merge({"algorithm": {"name": usual}}, config.base)
    data = merge(data, over_base)
    present, known = listed_ids(data), listed_ids(config.base).union(*map(listed_ids, config.teams.values()))
    settings, changes, option = (
        of_present_agents(layer, present, known) for layer in (config.settings, config.algorithms[algorithm], option)
    )
    # A checkpoint every few steps, as in many configs, would fill the disk with files that nobody uses.
    data = merge({**data, "save_every": 0}, settings)
    of_algorithms = {key: value for key, value in settings.items() if key.startswith("algorithm.")}
    enlarged = ENLARGED.fullmatch(algorithm)
    name, times = (enlarged[1], int(enlarged[2])) if enlarged else (algorithm, 1)
    if name in ALGORITHMS:
        data = merge_choice(data, {"algorithm.name": name}, of_algorithms)
    elif not changes:
        labels = [*ALGORITHMS, *(f"{label}_x2" for label in ALGORITHMS)]
        meant = nearest(algorithm, labels)
        raise UserError(f"{where}: {algorithm!r} is neither an algorithm nor a label with settings{meant}")
    elif enlarged:
        raise UserError(
            f"{where}: _x{times} is {times} times the rollouts of an algorithm, but {name!r} is not one. Choose "
            "another label, and set num_generations if more rollouts are meant."
        )
    for layer in (changes, option):
        data = merge_choice(data, layer, of_algorithms)
    if name not in ALGORITHMS:
        return data
    chosen = data["algorithm"].get("name") if isinstance(data["algorithm"], dict) else None
    if chosen != name:
        raise UserError(f"{where}: the label says {name}, the settings {chosen}. Choose another label.")
    return enlarge(data, times)


def merge_choice(data: dict[str, Any], changes: Mapping[str, Any], of_algorithms: Mapping[str, Any]) -> dict[str, Any]:
    """Apply flat changes to settings. If they choose another algorithm, `of_algorithms` override its defaults."""
    chosen = merge(data, {key: value for key, value in changes.items() if key in NAMING})
    if chosen["algorithm"] != data["algorithm"]:
        chosen = merge(chosen, of_algorithms)
    return merge(chosen, {key: value for key, value in changes.items() if key not in NAMING})


def enlarge(data: dict[str, Any], times: int) -> dict[str, Any]:
    """Multiply the number of completions that every agent samples for each prompt."""

    def enlarged(section: dict[str, Any], count: Any) -> dict[str, Any]:
        return {**section, "num_generations": times * count} if isinstance(count, int) else section

    if isinstance(data.get("agents"), list):
        agents = [enlarged(a, a.get("num_generations")) if isinstance(a, dict) else a for a in data["agents"]]
        data = {**data, "agents": agents}
    return enlarged(data, data.get("num_generations", RunConfig.model_fields["num_generations"].default))


def check_comparable(study: StudyConfig, run: RunConfig, where: str) -> None:
    if not run.task.has_heldout:
        raise UserError(f"{where}: a study compares accuracy on held-out problems; set task.eval.")
    if study.metric == "final_sampled" and not run.eval_samples:
        raise UserError(f"{where}: metric final_sampled needs answers that are sampled; set settings.eval_samples.")
    if "all" in [agent.id for agent in run.agents]:
        raise UserError(f"{where}: an agent cannot be called all, which is the mean over agents. Choose another id.")
