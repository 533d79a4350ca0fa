"""The settings of a source that only gives rollouts: a teacher behind an address, or stored rollouts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hacrl.config.strict import Label, Length, Options, Positive, Seconds, Strict


class EndpointConfig(Strict):
    """A server with OpenAI's interface, and how it is asked."""

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """Address of the server up to the version, for example http://host:8000/v1."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the server."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable that holds the key. The key itself is written nowhere."""
    api: Literal["chat", "completions"] = "chat"
    """`chat` sends messages; `completions` sends the text of the prompt as it is."""
    logprobs: Literal["raw", "at_temperature", "none"] = "raw"
    """What the server reports: log-probabilities before temperature (`raw`), `at_temperature`, or `none`. Raw ones are
    used at temperature 1 only."""
    reasoning: bool = False
    """Put the thinking that the server reports as reasoning_content before the answer."""
    system_prompt: str | None = None
    """System message before every prompt that has none, with `api: chat`."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end an answer."""
    extra_body: Options = {}
    """More fields of each request, for example {chat_template_kwargs: {enable_thinking: false}}."""
    timeout: Seconds = 120.0
    """Seconds that one request may take."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 4
    """How many times a request that failed is sent again, after pauses that grow."""


class BudgetConfig(Strict):
    """What a source may use in the whole run. When it is spent, the source is left out."""

    requests: Positive | None = None
    """The most requests; null: no limit."""
    tokens: Positive | None = None
    """The most tokens of prompts and answers; null: no limit."""


FOR_ENDPOINTS = ("max_requests", "step_timeout", "budget", "temperature", "max_completion_length")
FOR_STORED = ("agents", "split", "subset", "trust_rewards")


class SourceConfig(Strict):
    """One source: an `endpoint` that answers, or stored `rollouts`."""

    id: Label
    """Name of the source in metrics and files."""
    endpoint: EndpointConfig | None = None
    """A teacher behind an OpenAI-compatible address."""
    rollouts: Annotated[str, Field(min_length=1)] | None = None
    """Stored rollouts: the folder of a run, a JSONL or parquet file, or a hub id."""
    num_generations: Annotated[int, Field(ge=1, le=65_536)] = 2
    """The most rollouts that the source gives for a prompt in a step."""
    when: Literal["always", "hard"] = "always"
    """`always`, or `hard`: on prompts for which no agent's own answer was right."""
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Temperature of an endpoint."""
    max_completion_length: Length | None = None
    """The most tokens of an endpoint's answer, in its own tokens; default: the run's."""
    max_requests: Annotated[int, Field(ge=1, le=4096)] = 32
    """Requests to an endpoint at the same time."""
    step_timeout: Seconds = 600.0
    """Seconds to wait for an endpoint in a step; what is not there by then is left out."""
    budget: BudgetConfig = BudgetConfig()
    """What an endpoint may use in the whole run."""
    agents: Annotated[list[Label], Field(min_length=1)] | None = None
    """Whose rollouts of a stored run are used; default: those of all its agents and sources."""
    split: str = "train"
    """Split of stored rollouts on the hub."""
    subset: str | None = None
    """Subset of stored rollouts on the hub."""
    trust_rewards: bool = False
    """Take the rewards of stored rollouts as they are. Otherwise the verifier judges them again."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.endpoint is None) == (self.rollouts is None):
            raise ValueError("give either endpoint (a server that answers) or rollouts (stored ones)")
        of_other = {"stored rollouts": FOR_STORED} if self.rollouts is None else {"endpoints": FOR_ENDPOINTS}
        for other, names in of_other.items():
            for name in names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is a setting of {other}: remove it")
        return self
