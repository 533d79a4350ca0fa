"""A study as one typed tree: which runs are compared, and how."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hacrl.config.own_algorithm import is_own, resolved
from hacrl.config.run import RunConfig, check_command
from hacrl.config.settings import apply_overrides, preset_names, read_source, with_overrides
from hacrl.config.strict import Few, Label, Seed, Strict, checked
from hacrl.config.strict_yaml import dump_yaml
from hacrl.errors import UserError, nearest, warn

STUDIES = Path(__file__).parent / "studies"

MAX_RUNS = 10_000
RENAMED = "`pairs` is now called `teams`. It is still read; please rename it."
NAMING = {"algorithm", "algorithm.name"}
"""The settings that choose an algorithm."""

Changes = dict[str, Any]
"""Settings of a run, nested or with dots: {algorithm.alpha: 3}."""


class StudyConfig(Strict):
    """A study: teams x algorithms x options x seeds, and how the runs are compared."""

    name: Label
    """Name of the study, and of its folder."""
    title: str = ""
    """Title of the study in tables and reports."""
    base: Changes = Field(default_factory=dict)
    """What all runs start from: a preset, a run's YAML file (its path is relative to the study's), or its content."""
    settings: Changes = Field(default_factory=dict)
    """Settings of all runs, which override base and team. Options of `algorithm` hold for each of the algorithms."""
    teams: dict[Label, Changes] = Field(default_factory=dict)
    """Teams to compare: for each a preset, a file or its content, over base; or a list of presets. None: base alone."""
    algorithms: Annotated[dict[Label, Changes], Field(min_length=1)]
    """Settings by label. The label NAME means that algorithm; NAME_xN means it with N times the rollouts."""
    options: dict[Label, Changes] = Field(default_factory=dict)
    """Settings that are crossed with the algorithms as ALGORITHM+OPTION; without settings, the plain algorithm."""
    seeds: list[Seed] = Field(default=[0, 1, 2], min_length=1, max_length=MAX_RUNS)
    """Seeds of the runs: a list, or a number N for 0 to N - 1."""
    baseline: str | None = None
    """The variant that others are compared with: ALGORITHM or ALGORITHM+OPTION; default: the first."""
    metric: Literal["final_accuracy", "final_sampled"] = "final_accuracy"
    """What is compared: accuracy of greedy answers, or of answers sampled with `eval_samples`."""
    interval: Literal["t", "bootstrap"] = "t"
    """How the 95 % intervals over seeds are computed."""
    jobs: Few | None = None
    """Runs at once; default: as many as there are cores for, or four for each GPU."""
    threads: Few | None = None
    """Threads of each run; default: one, or more if there are fewer runs than cores. Results depend on it."""
    output_dir: str | None = None
    """Folder of the study; default: runs/study-NAME."""

    @field_validator("algorithms", "teams", "options", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        """Turn a list of names, or names without a value, into a mapping with empty settings."""
        if isinstance(value, list):
            twice = [item for position, item in enumerate(value) if item in value[:position]]
            if twice:
                raise ValueError(f"{twice[0]!r} is there twice")
            value = dict.fromkeys(value) if all(isinstance(item, str) for item in value) else value
        return {k: {} if v is None else v for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("algorithms", mode="before")
    @classmethod
    def _labelled(cls, algorithms: Any) -> Any:
        """Refuse a class of one's own without a label, which names folders and rows of tables."""
        own = next((name for name in algorithms if is_own(str(name))), None) if isinstance(algorithms, list) else None
        if own is not None:
            raise ValueError(f"an algorithm of your own needs a label: write {{LABEL: {{algorithm.name: {own}}}}}")
        return algorithms

    @field_validator("base", "algorithms", "teams", "options")
    @classmethod
    def _absolute(cls, changes: Changes) -> Changes:
        """Give files of algorithms absolute paths, so that a study's folder can be continued from anywhere."""
        return with_absolute_algorithms(changes)

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
        runs = max(len(self.teams), 1) * len(self.variants) * len(self.seeds)
        if runs > MAX_RUNS:
            raise ValueError(f"teams x algorithms x options x seeds must be at most {MAX_RUNS:,} runs, but is {runs:,}")
        if "all" in self.teams:
            raise ValueError("teams: all is what the mean over teams is called; choose another name")
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
        """By label of the variant: the label of its algorithm, and the settings of its option."""
        return {
            f"{algorithm}+{option}" if changes else algorithm: (algorithm, changes)
            for algorithm in self.algorithms
            for option, changes in (self.options or {"": {}}).items()
        }

    @property
    def folder(self) -> Path:
        """Where the runs and results are written."""
        return Path(self.output_dir or f"runs/study-{self.name}")

    @classmethod
    def load(cls, source: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a bundled study, a YAML file or a study's folder, with `key=value`; UserError if anything is wrong."""
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
        data = with_teams(read_source(path)[0], str(source), written_by_us=folder_of_study)
        if folder_of_study:
            data["output_dir"] = str(source)
        current = [re.sub(r"^pairs(?=[.=])", "teams", override) for override in overrides]
        if current != list(overrides):
            warn(f"{' '.join(overrides)}: {RENAMED}")
        data = apply_overrides(data, current)
        check_command("study", data, str(source))
        return cls.from_dict(data, with_overrides(str(source), overrides), path.parent)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "study", folder: Path | None = None) -> Self:
        """Check the settings of a YAML file. Files of runs that they name are looked for in `folder`."""
        data = with_teams(data, where)
        for key in data:
            if key not in cls.model_fields:
                hint = f"; it is a setting of a run: settings.{key}" if key in RunConfig.model_fields else ""
                raise UserError(f"{where}: unknown key {key!r}{hint or nearest(str(key), cls.model_fields)}")
        if "base" in data:
            data["base"] = content(data["base"], folder)
        teams = data.get("teams")
        if isinstance(teams, list):
            labels = [Path(str(team)).name.removesuffix(".yaml") for team in teams]
            if len(set(labels)) < len(labels):
                raise UserError(f"{where}: teams: a name is there twice: {', '.join(labels)}")
            teams = dict(zip(labels, teams, strict=True))
        if isinstance(teams, dict):
            data["teams"] = {name: content(team, folder) for name, team in teams.items()}
        return checked(cls, data, where)

    def to_yaml(self) -> str:
        """The study as YAML that stands alone: files and presets are written out, output_dir is left out."""
        return dump_yaml(self.model_dump(mode="json", exclude={"output_dir"}))


def with_teams(data: dict[str, Any], where: str, written_by_us: bool = False) -> dict[str, Any]:
    """A copy of a study's settings in which `pairs`, the name of earlier versions, is called `teams`."""
    if "pairs" in data and "teams" in data:
        raise UserError(f"{where}: `pairs` is the old name of `teams`, and both are there. Remove `pairs`.")
    if "pairs" in data and not written_by_us:
        warn(f"{where}: {RENAMED}")
    return {"teams" if key == "pairs" else key: value for key, value in data.items()}


def study_names() -> list[str]:
    """Names of the bundled studies."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def content(source: Any, folder: Path | None) -> Any:
    """The settings that a preset or a file holds. Anything but a name is returned as it is."""
    if not isinstance(source, str):
        return source
    beside = (folder or Path()) / source
    data, _ = read_source(beside if beside.is_file() and source not in preset_names() else source)
    return data


def with_absolute_algorithms(changes: Mapping[str, Any]) -> Changes:
    """A copy of settings in which the names of algorithms of one's own have absolute paths."""
    found: Changes = {}
    for key, value in changes.items():
        if isinstance(value, dict):
            found[key] = with_absolute_algorithms(value)
            if key == "algorithm" and is_own(str(value.get("name"))):
                found[key]["name"] = resolved(value["name"])
        else:
            found[key] = resolved(value) if key == "algorithm.name" and is_own(str(value)) else value
    return found


def flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping with their paths."""
    for key, value in changes.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
