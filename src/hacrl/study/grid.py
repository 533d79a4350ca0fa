"""A study as one typed tree, and the runs it stands for: pairs x algorithms x options x seeds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hacrl.algorithms import ALGORITHMS
from hacrl.config import RunConfig, checked
from hacrl.config.run import check_command
from hacrl.config.settings import apply_overrides, preset_names, read_source, with_overrides
from hacrl.config.strict import Few, Seed, Strict
from hacrl.config.strict_yaml import dump_yaml
from hacrl.errors import UserError, nearest
from hacrl.training.run_dir import RunDir

STUDIES = Path(__file__).parents[1] / "config" / "studies"

LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ENLARGED = re.compile(r"(.+)_x([1-9][0-9]{0,4})")
"""gspo_x2: GSPO with twice the rollouts."""
MAX_RUNS = 10_000
NAMING = {"algorithm", "algorithm.name"}
"""The settings that choose an algorithm."""

Label = Annotated[str, Field(pattern=LABEL)]
Changes = dict[str, Any]
"""Settings of a run, nested or with dots: {algorithm.alpha: 3}."""


class StudyConfig(Strict):
    name: Label
    title: str = ""
    base: Changes = Field(default_factory=dict)
    """What all runs start from: a preset, a run's YAML file (its path is relative to the study's), or its content."""
    settings: Changes = Field(default_factory=dict)
    """Over base and pair, for all runs. What it says of `algorithm` holds for each of the algorithms."""
    pairs: dict[Label, Changes] = Field(default_factory=dict)
    """Over base: a preset, a file or its content for each; a list of presets will do. Without any: base alone."""
    algorithms: Annotated[dict[Label, Changes], Field(min_length=1)]
    """Label -> settings. A label NAME is that algorithm; NAME_xN the same with N times the rollouts."""
    options: dict[Label, Changes] = Field(default_factory=dict)
    """Crossed with the algorithms as ALGORITHM+OPTION; one without settings is the algorithm as it is."""
    seeds: list[Seed] = Field(default=[0, 1, 2], min_length=1, max_length=MAX_RUNS)
    """A list, or how many from 0 on."""
    baseline: str | None = None
    """What the others are compared with: ALGORITHM or ALGORITHM+OPTION; default: the first."""
    metric: Literal["final_accuracy", "final_sampled"] = "final_accuracy"
    """What is compared: greedy accuracy, or what `eval_samples` found."""
    interval: Literal["t", "bootstrap"] = "t"
    """How the 95 % intervals over seeds are made."""
    jobs: Few | None = None
    """Runs at once; default: as many as there are cores for, or four for each GPU."""
    threads: Few | None = None
    """Threads of each run; default: one, or more if there are fewer runs than cores. Results depend on it."""
    output_dir: str | None = None
    """Default: runs/study-NAME."""

    @field_validator("algorithms", "pairs", "options", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        """A list of names is a mapping without settings, and so is a name without any."""
        if isinstance(value, list):
            twice = [item for position, item in enumerate(value) if item in value[:position]]
            if twice:
                raise ValueError(f"{twice[0]!r} is there twice")
            value = dict.fromkeys(value) if all(isinstance(item, str) for item in value) else value
        return {k: {} if v is None else v for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("seeds", mode="before")
    @classmethod
    def _as_list(cls, seeds: Any) -> Any:
        if isinstance(seeds, int) and seeds > MAX_RUNS:
            raise ValueError(f"must be at most {MAX_RUNS:,} (got {seeds})")
        return list(range(seeds)) if isinstance(seeds, int) else seeds

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: every seed must be there once")
        runs = max(len(self.pairs), 1) * len(self.variants) * len(self.seeds)
        if runs > MAX_RUNS:
            raise ValueError(f"pairs x algorithms x options x seeds must be at most {MAX_RUNS:,} runs, but is {runs:,}")
        if "all" in self.pairs:
            raise ValueError("pairs: all is what the mean over pairs is called; choose another name")
        if sum(not changes for changes in self.options.values()) > 1:
            raise ValueError("options: only one can be without settings")
        if self.baseline is not None and self.baseline not in self.variants:
            raise ValueError(f"baseline: there is no {self.baseline!r}{nearest(self.baseline, self.variants)}")
        places = {"settings": self.settings}
        places |= {f"algorithms.{name}": changes for name, changes in self.algorithms.items()}
        places |= {f"options.{name}": changes for name, changes in self.options.items()}
        for place, changes in places.items():
            for key in {key for key, _ in flat(changes)} & {"seed", "output_dir"}:
                raise ValueError(f"{place}.{key}: a study sets it itself, from seeds and output_dir of the study")
        for key in {key for key, _ in flat(self.settings)} & NAMING:
            raise ValueError(
                f"settings.{key}: which algorithms run is said under algorithms, for example algorithms: [gspo] or "
                "{mine: {algorithm.name: gspo}}; in settings only their options can be, as algorithm.OPTION"
            )
        return self

    @property
    def variants(self) -> dict[str, tuple[str, Changes]]:
        """Label -> the label of its algorithm, and the settings of its option."""
        return {
            f"{algorithm}+{option}" if changes else algorithm: (algorithm, changes)
            for algorithm in self.algorithms
            for option, changes in (self.options or {"": {}}).items()
        }

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"runs/study-{self.name}")

    @classmethod
    def load(cls, source: str | Path, overrides: Sequence[str] = ()) -> Self:
        """A bundled study, a YAML file or the folder of a study, with `key=value`; UserError if anything is wrong."""
        path = Path(source)
        bundled = str(source) in study_names()
        folder_of_study = not bundled and (path / "study.yaml").is_file()
        if bundled:
            path = STUDIES / f"{source}.yaml"
        elif folder_of_study:
            path /= "study.yaml"
        elif not path.is_file():
            meant = nearest(str(source), study_names())
            raise UserError(f"{source} is neither a bundled study, nor a YAML file, nor the folder of a study{meant}")
        data, _ = read_source(path)
        if folder_of_study:
            data["output_dir"] = str(source)
        data = apply_overrides(data, overrides)
        check_command("study", data, str(source))
        return cls.from_dict(data, with_overrides(str(source), overrides), path.parent)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "study", folder: Path | None = None) -> Self:
        """`folder`: where the files of runs that it names are looked for."""
        for key in data:
            if key not in cls.model_fields:
                known = list(cls.model_fields)
                hint = f"; it is a setting of a run: settings.{key}" if key in RunConfig.model_fields else ""
                raise UserError(f"{where}: unknown key {key!r}{hint or nearest(str(key), known)}")
        data = {**data}
        if "base" in data:
            data["base"] = content(data["base"], folder)
        if isinstance(data.get("pairs"), list):
            labels = [Path(str(pair)).name.removesuffix(".yaml") for pair in data["pairs"]]
            if len(set(labels)) < len(labels):
                raise UserError(f"{where}: pairs: a name is there twice: {', '.join(labels)}")
            data["pairs"] = dict(zip(labels, data["pairs"], strict=True))
        if isinstance(data.get("pairs"), dict):
            data["pairs"] = {name: content(pair, folder) for name, pair in data["pairs"].items()}
        return checked(cls, data, where)

    def to_yaml(self) -> str:
        """Files and presets are written out, so that it stands alone; the folder is where it lies."""
        return dump_yaml(self.model_dump(mode="json", exclude={"output_dir"}))


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def content(source: Any, folder: Path | None) -> Any:
    """The settings that a preset or a file holds; what is no name is the settings themselves."""
    if not isinstance(source, str):
        return source
    beside = (folder or Path()) / source
    data, _ = read_source(beside if beside.is_file() and source not in preset_names() else source)
    return data


def flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping with their paths."""
    for key, value in changes.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merge(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over settings, as `key=value` on the command line: another algorithm.name starts from its defaults."""
    return apply_overrides(data, [f"{key}={dump_yaml(value)}" for key, value in flat(changes)])


def of_present_agents(changes: Mapping[str, Any], present: set[str], known: set[str]) -> dict[str, Any]:
    """Without the settings of agents that only other pairs have; an id that no pair has stays, to be refused."""

    def absent(key: str) -> bool:
        owners = [agent for agent in known if f"{key}.".startswith(f"agents.{agent}.")]
        return bool(owners) and max(owners, key=len) not in present  # an id may have dots itself

    return {key: value for key, value in flat(changes) if not absent(key)}


def listed_ids(data: Mapping[str, Any]) -> set[str]:
    """Ids of the agents in settings that nobody has checked yet."""
    agents = data.get("agents")
    items = agents if isinstance(agents, list) else []
    return {str(item["id"]) for item in items if isinstance(item, dict) and "id" in item}


@dataclass(frozen=True)
class Run:
    pair: str
    variant: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.pair}/{self.variant}/seed-{self.seed}"

    @property
    def folder(self) -> RunDir:
        return RunDir(self.config.output_dir)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What came out, if all steps are done."""
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
        """By each learner, in the whole run."""
        prompts, agents = self.config.max_steps * self.config.prompts_per_step, self.config.agents
        return {a.id: prompts * self.config.rollouts_per_prompt(a) * a.num_iterations for a in agents}

    @property
    def cost(self) -> int:
        """Rollouts sampled and learned from: what its time is about proportional to."""
        return self.config.max_steps * self.config.rollouts_per_step + sum(self.rollouts_used.values())


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    runs: list[Run]
    """Seed after seed, so that what is there of an unfinished study can be compared."""

    @classmethod
    def build(cls, config: StudyConfig) -> Self:
        """UserError unless every run of the grid is a possible one."""
        runs = []
        for pair, over_base in (config.pairs or {"main": {}}).items():
            for variant, (algorithm, option) in config.variants.items():
                where = f"{config.name}: {pair}/{variant}"
                first = RunConfig.from_dict(run_settings(config, over_base, algorithm, option, where), where)
                check_comparable(config, first, where)
                for seed in config.seeds:
                    folder = config.folder / "runs" / pair / variant / f"seed-{seed}"
                    run = first.model_copy(update={"seed": seed, "output_dir": str(folder)})
                    runs.append(Run(pair, variant, seed, run))
        order = {seed: position for position, seed in enumerate(config.seeds)}
        return cls(config, sorted(runs, key=lambda run: order[run.seed]))

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def pairs(self) -> list[str]:
        return list(self.config.pairs) or ["main"]

    @property
    def variants(self) -> list[str]:
        return list(self.config.variants)

    @property
    def baseline(self) -> str:
        return self.config.baseline or self.variants[0]

    def group(self, pair: str, variant: str) -> list[Run]:
        """The runs that differ in their seed alone."""
        return [run for run in self.runs if (run.pair, run.variant) == (pair, variant)]


def run_settings(
    config: StudyConfig, over_base: Changes, algorithm: str, option: Changes, where: str
) -> dict[str, Any]:
    """The settings of one run: base, pair, settings, algorithm, option, each over those before it."""
    usual = RunConfig.model_fields["algorithm"].default.name
    data = merge({"algorithm": {"name": usual}}, config.base)
    data = merge(data, over_base)
    present, known = listed_ids(data), listed_ids(config.base).union(*map(listed_ids, config.pairs.values()))
    settings, changes, option = (
        of_present_agents(layer, present, known) for layer in (config.settings, config.algorithms[algorithm], option)
    )
    # A checkpoint every few steps, as in many a config, would fill the disk with what nobody looks at.
    data = merge({**data, "save_every": 0}, settings)
    of_algorithms = {key: value for key, value in settings.items() if key.startswith("algorithm.")}
    enlarged = ENLARGED.fullmatch(algorithm)
    name, times = (enlarged[1], int(enlarged[2])) if enlarged else (algorithm, 1)
    if name in ALGORITHMS:
        data = merge_choice(data, {"algorithm.name": name}, of_algorithms)
    elif not changes:
        labels = [*ALGORITHMS, *(f"{label}_x2" for label in ALGORITHMS)]
        raise UserError(f"{where}: {algorithm!r} is no algorithm and has no settings{nearest(algorithm, labels)}")
    elif enlarged:
        raise UserError(
            f"{where}: _x{times} is {times} times the rollouts of an algorithm, but {name!r} is none. Choose another "
            "label, and set num_generations if more rollouts are meant."
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
    """Flat settings over settings; if they choose another algorithm, `of_algorithms` are over its defaults."""
    chosen = merge(data, {key: value for key, value in changes.items() if key in NAMING})
    if chosen["algorithm"] != data["algorithm"]:
        chosen = merge(chosen, of_algorithms)
    return merge(chosen, {key: value for key, value in changes.items() if key not in NAMING})


def enlarge(data: dict[str, Any], times: int) -> dict[str, Any]:
    """Every agent samples so many times as many completions of each prompt."""

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
