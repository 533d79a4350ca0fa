"""The settings of a source that only gives rollouts: a teacher behind an address, or stored rollouts."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from hacrl.config.strict import Label, Length, Options, Positive, Seconds, Strict, written

OWN_FIELDS = {
    "model": "endpoint.model",
    "messages": "the prompts of the task",
    "prompt": "the prompts of the task",
    "temperature": "the source's temperature",
    "stop": "endpoint.stop",
    "logprobs": "endpoint.logprobs",
    "n": "num_generations",
}
"""Fields of a request, and the settings that fill them."""
OWN_NUMBERS = {"seed": "the run's seed", "max_tokens": "max_completion_length"}
"""Fields that are sent unless they are null in extra_body."""
LOGPS_NEEDED = (
    "and the algorithm weighs others' rollouts by the log-probabilities that their sources recorded. Choose another "
    "algorithm, for example hacpo_robust, or another source"
)
"""The end of a sentence about a source that has no log-probabilities, which begins with the reason."""
NO_USE = ("stream", "best_of", "echo")
"""Fields of a request that change the form of an answer, so that it could not be read."""


def _address(url: str) -> str:
    """Return an address of a server; ValueError, which does not repeat it, if it is none or has secrets in it."""
    wanted = "give the address of the server up to the version, for example http://host:8000/v1"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ValueError("an address must not have a user or password in it; api_key_env names a variable for the key")
    if parts.query or parts.fragment:
        raise ValueError(f"{wanted}, without ? and #; api_key_env names a variable for the key")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(wanted)
    return url


def _additions(fields: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of a request; ValueError if a setting fills one of them."""
    for name, value in fields.items():
        if name in OWN_FIELDS:
            raise ValueError(f"{name} is filled by {OWN_FIELDS[name]}: remove it")
        if name in NO_USE:
            raise ValueError(f"{name} cannot be used: remove it")
        if name in OWN_NUMBERS and value is not None:
            raise ValueError(
                f"{name} is filled by {OWN_NUMBERS[name]}: remove it, or give null if the server refuses it"
            )
    most = fields.get("max_completion_tokens", 1)
    if type(most) is not int or not 1 <= most <= 2**20:
        raise ValueError("max_completion_tokens must be a whole number from 1 to 1,048,576")
    return fields


class EndpointConfig(Strict):
    """A server with OpenAI's interface, and how it is asked."""

    url: Annotated[str, AfterValidator(_address)]
    """Address of the server up to the version, for example http://host:8000/v1."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model at the server."""
    api_key_env: Annotated[str, written(r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of an environment variable")] | None = (
        None
    )
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
    extra_body: Annotated[Options, AfterValidator(_additions)] = {}
    """More fields of each request, for example {chat_template_kwargs: {enable_thinking: false}}. null takes a field
    out, for example {seed: null}."""
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
    max_requests: Annotated[int, Field(ge=1, le=1000)] = 32
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

    @property
    def lacks_logps(self) -> str:
        """Why an endpoint's log-probabilities are not those of its sampling, by its settings; empty if they may be."""
        if self.endpoint is None:
            return ""
        if self.endpoint.logprobs == "none":
            return "it has no log-probabilities (endpoint.logprobs: none)"
        if self.endpoint.reasoning:
            return "its text has thinking in it, whose log-probabilities are not known (endpoint.reasoning)"
        if self.temperature == 0:
            return "it answers greedily (temperature: 0), which has no log-probabilities"
        if self.endpoint.logprobs == "raw" and self.temperature != 1:
            return (
                "it reports log-probabilities before temperature (endpoint.logprobs: raw), and its temperature is "
                f"{self.temperature:g}"
            )
        return ""
