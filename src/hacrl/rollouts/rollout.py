"""One sampled completion, and everything that agents exchange about it."""

from dataclasses import dataclass, field
from typing import Any, Literal

from hacrl.tasks.problem import Prompt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one sample, in the tokens of the model that made it."""

    token_ids: list[int]
    """The sampled tokens, including the end-of-turn token if it was sampled."""
    logps: list[float]
    """Log-probability of each token: after temperature, before top-p and top-k."""
    finish_reason: FinishReason
    ended: bool
    """Whether the last token is an end-of-turn token (a stop string ends a completion without one)."""

    @property
    def content_ids(self) -> list[int]:
        """The tokens that carry the text: all but the end of turn."""
        return self.token_ids[:-1] if self.ended else self.token_ids


@dataclass
class Rollout:
    """A completion as it travels between agents: text, ids, log-probabilities and reward."""

    step: int
    prompt_id: str
    prompt: Prompt
    """The prompt as the task gives it. Every agent renders it in its own way."""
    prompt_index: int
    """Position of the prompt in the step's batch."""
    source: int
    """Index of the source: the run's agents come first, then its other sources."""
    index: int
    """Number of this completion among those that the source sampled for the prompt."""
    text: str
    token_ids: list[int]
    """The source's tokens; empty if they are not known."""
    logps: list[float] | None
    """Log-probability of each token, as the source recorded it; None if it did not."""
    finish_reason: FinishReason
    ended: bool
    special_inside: bool
    """Whether the completion has special tokens before its end, which `text` leaves out."""
    vocabulary: str
    """Fingerprint of the source's vocabulary. A learner with the same one takes `token_ids`, others read `text`."""
    policy_version: int
    """How many updates the source had made when it sampled the rollout."""
    num_tokens: int = 0
    """Number of the source's tokens; it must be given where `token_ids` are not known."""
    lead: str = ""
    """White space between the source's prompt and `text`, where decoding the completion alone leaves it out."""
    opened: str = ""
    """The block that the source's prompt opens for the completion, for example <think>."""
    learner_logps: list[float] | None = None
    """With `overlap`: the learner's log-probabilities right after sampling, before the updates that follow."""
    reward: float | None = None
    verdict: dict[str, Any] = field(default_factory=dict)
    """What the verifier reports besides the reward: parts, problem, detail."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids) or self.num_tokens
        if not self.num_tokens or (self.logps is not None and len(self.logps) != self.num_tokens):
            raise ValueError(
                f"a rollout needs a token at least, and a log-probability for each: it has {self.num_tokens} tokens "
                f"and {len(self.logps or [])} log-probabilities"
            )

    @property
    def key(self) -> tuple[int, int, int]:
        """What identifies the rollout within its step."""
        return self.source, self.prompt_index, self.index

    @property
    def logp_sum(self) -> float | None:
        """Log-probability of the whole completion for its source; None if the source did not record it."""
        return None if self.logps is None else float(sum(self.logps))

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8", errors="surrogatepass"))

    def record(self, source_id: str) -> dict[str, Any]:
        """The line of this rollout in `rollouts/step-*.jsonl`."""
        return {
            "step": self.step, "prompt_id": self.prompt_id, "source": source_id, "index": self.index,
            "prompt": self.prompt, "text": self.text, "reward": self.reward, "finish_reason": self.finish_reason,
            "num_tokens": self.num_tokens, "logp_sum": self.logp_sum, "policy_version": self.policy_version,
            **{name: text for name in ("lead", "opened") if (text := getattr(self, name))}, **self.verdict,
        }  # fmt: skip
