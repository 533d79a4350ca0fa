"""A whole warm-up as one typed tree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hacrl.config.agent import AgentConfig, ModelSettings
from hacrl.config.run import Team, TeamConfig
from hacrl.config.strict import Count, Label, Options, Positive, Seed, Size, Strict, Weight
from hacrl.config.task import TaskConfig, is_data_set
from hacrl.errors import UserError

MAX_LAYERS = 1_000
MAX_WIDTH = 10_000_000
"""The largest whole number in the architecture of a new model, such as the size of its vocabulary."""


class DataConfig(Strict):
    """Where rows come from: a file with prompts and completions, or a task that knows completions."""

    file: str | None = None
    """JSONL, JSON or parquet, a folder written by `datasets`, or a hub id; prompt and completion, or messages."""
    split: str = "train"
    """Split of a hub data set, or of a folder with several."""
    subset: str | None = None
    """Subset of a hub data set."""
    task: TaskConfig | None = None
    """arithmetic, gym:GENERATOR, or a mixture of them."""
    weight: Weight = 1.0
    """Share of the rows, where there are several files or tasks."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.file is None) == (self.task is None):
            raise ValueError("give either file or task")
        if (self.split, self.subset) != ("train", None) and not is_data_set(self.file):
            raise ValueError("split and subset are for data sets of the hub (org/name): remove them")
        return self


class WarmupSettings(ModelSettings):
    """Settings of an agent in a warm-up. Set for the warm-up, they hold for all agents; an agent may override them."""

    data: list[DataConfig] = Field(default_factory=list, max_length=100)
    """The rows to learn from: a file, a list of files, or {file or task, weight}."""
    batch_size: Size = 32
    """Rows of one update."""
    max_steps: Positive = 100
    """Number of updates."""
    target_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    """Stop before `max_steps` once greedy accuracy on the held-out problems of `task` reaches this."""
    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-5
    """Learning rate of AdamW."""

    @field_validator("data", mode="before")
    @classmethod
    def _as_list(cls, data: Any) -> Any:
        listed = data if isinstance(data, list) else [data]
        return [{"file": item} if isinstance(item, str) else item for item in listed]


class WarmupAgentConfig(WarmupSettings):
    """One agent of a warm-up: a model, or how to make one, and its settings."""

    id: Label
    """Name of the agent in metrics, files and on the command line."""
    model: str | None = None
    """zoo:NAME, a local folder, or a Hugging Face hub id."""
    max_layers: Positive | None = None
    """How many of the first layers are kept."""
    drop_layers: list[Count] = Field(default_factory=list)
    """Leave these layers out, counted from 0."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained: the model's own weights; random: new weights."""
    config: Options = Field(default_factory=dict)
    """With init: random: options that override `model`'s architecture; without a model, model_type and its options."""
    tokenizer: str | None = None
    """Tokenizer with init: random: zoo:NAME, a folder or a hub id; default: the model's."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.data:
            raise ValueError("data is missing: a file with prompts and completions, or a task")
        if self.init == "pretrained":
            if self.model is None:
                raise ValueError("model is missing")
            if self.config or self.tokenizer:
                raise ValueError("config and tokenizer are for init: random")
            return self
        if self.max_layers or self.drop_layers:
            raise ValueError("max_layers and drop_layers cut a model; with init: random set config.num_hidden_layers")
        if self.model is None and ("model_type" not in self.config or self.tokenizer is None):
            raise ValueError("init: random needs a model, or config.model_type and tokenizer")
        for name, value in self.config.items():
            most = MAX_LAYERS if name.endswith("layers") else MAX_WIDTH
            if isinstance(value, int) and value > most:
                raise ValueError(f"config.{name} must be at most {most:,}, but is {value}")
        return self

    @property
    def starts_from_a_copy(self) -> bool:
        """Whether the starting model has to be made first."""
        return self.init == "random" or bool(self.max_layers or self.drop_layers)

    def for_agent(self, model: str) -> AgentConfig:
        """The settings of the agent that learns, as in a run."""
        shared = {name: getattr(self, name) for name in ModelSettings.model_fields}
        return AgentConfig(**shared, id=self.id, model=model, log_kl=False)


class WarmupConfig(TeamConfig, WarmupSettings):
    """A whole warm-up."""

    command = "warmup"

    agents: Team[WarmupAgentConfig]
    """The agents, at least one; they are trained one beside the other."""
    task: TaskConfig | None = None
    """Task on whose held-out problems greedy accuracy is measured, together with the held-out loss."""
    eval_every: Count = 20
    """Steps between evaluations; 0: at the start and the end only."""
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the prompts in files that is never trained on, but used for the held-out loss."""
    eval_size: Size = 200
    """The most held-out rows of each file or task."""
    save_every: Count = 50
    """Steps between checkpoints; 0: at the end only."""
    save_total_limit: Positive | None = 1
    """How many of the newest checkpoints are kept; null: all."""
    seed: Seed = 0
    """Seed of the order of rows, and of new weights."""
    output_dir: str = "runs/warmup"
    """Folder of the warm-up; it must be new or empty."""

    @model_validator(mode="after")
    def _measures_targets(self) -> Self:
        measured = self.task is not None and self.task.has_heldout
        if not measured and any(agent.target_accuracy is not None for agent in self.agents):
            raise ValueError("target_accuracy is measured on held-out problems: add a task that has some")
        return self

    @property
    def last_step(self) -> int:
        """The step after which no agent learns any more."""
        return max(agent.max_steps for agent in self.agents)

    @classmethod
    def load(cls, source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file or a dict with `key=value` overrides; UserError if anything is wrong."""
        if not isinstance(source, dict) and not Path(source).is_file():
            raise UserError(f"There is no file {source}. The YAML file of a warm-up is needed.")
        return super().load(source, overrides)
