"""A teacher behind an address with OpenAI's interface."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from threading import Event, Thread
from typing import Any

from hacrl.config.sources import EndpointConfig, SourceConfig
from hacrl.errors import UserError, warn
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import ASK, derive_seed
from hacrl.signs import doing
from hacrl.sources.answers import Entry, Expected, Outcome, disagreement, parsed, read_answer, reported_entries
from hacrl.sources.client import Client, Request, Round
from hacrl.sources.kept import Decision, Kept
from hacrl.sources.outside import Given, OutsideSource
from hacrl.tasks.problem import Problem, text_number

MOST_DISAGREEMENT = 0.05
"""Log-probabilities are not used if those of the same tokens differ by more than this between two greedy answers to one
prompt: the mean over the tokens, of the absolute difference."""
PROBE_TOKENS = 64
"""Length of the two answers that are compared."""
FAILURES_IN_A_ROW = 8
"""After so many failures in a row, or `max_requests` if that is more, a step sends no more requests."""
TEMPLATE_TOKENS = 64
"""Tokens that a chat template adds to a prompt at most, for the budget."""
SEEDS = 2**31
"""Seeds of requests are below this: not all servers take larger ones."""


NEVER = "skipped"
"""Outcome of a request that was not sent."""
LATE = "late"
"""Outcome of a request that was not answered in time."""
ADVICE = {
    "connection": "Check that the server runs, and endpoint.url.",
    "too_slow": "Check that the server runs, or give it more time (endpoint.timeout).",
    "not_json": "Check endpoint.url: for most servers it ends with /v1.",
    "wrong_fields": "Check endpoint.url and endpoint.api.",
    "status_400": "Check endpoint.model, endpoint.api and endpoint.extra_body: a field that is null there is not sent.",
    "status_401": "Check the key in the environment variable that endpoint.api_key_env names.",
    "status_403": "Check the key in the environment variable that endpoint.api_key_env names.",
    "status_404": "Check endpoint.url, for most servers it ends with /v1, and endpoint.model.",
}
"""What to do about a server that fails at the start."""


class Endpoint(OutsideSource):
    """Asks a server for answers, keeps each of them on disk, and does without those that do not come.

    `prepare` sets `client`, `kept` and `decision`.
    """

    client: Client
    kept: Kept
    decision: Decision

    def __init__(self, config: SourceConfig, index: int, seed: int, max_completion_length: int) -> None:
        """`max_completion_length` is the run's."""
        super().__init__(config, index, seed)
        assert config.endpoint is not None
        self.endpoint: EndpointConfig = config.endpoint
        self.max_tokens = config.max_completion_length or max_completion_length
        self.place = f"sources.{config.id}"
        self.opened = ExitStack()
        self.round: Round | None = None
        self.late: list[Thread] = []
        """Threads whose requests did not end in time and may still be under way."""
        self.closed = False
        self.warned: set[str] = set()
        """What is so, and was said."""

    @property
    def is_measured(self) -> bool:
        return self.config.when == "always"

    # --- before the run ------------------------------------------------------------------------------

    def prepare(self, problems: Sequence[Problem], needs_logps: bool, folder: Path) -> list[str]:
        self.client = Client(self.endpoint, f"{self.place}.endpoint")
        self.kept = Kept(folder / f"{self.config.id}.jsonl")
        for opened in (self.client, self.kept):
            self.opened.callback(opened.close)
        for problem in problems:
            self._request(problem, 0)  # a prompt that cannot be sent is an error
        self.decision = self.kept.decision() or self._decide(problems[0], needs_logps)
        self.totals.update({name: self.decision[name] for name in ("requests", "prompt_tokens", "answer_tokens")})
        return [self.decision["remark"]]

    def _decide(self, problem: Problem, needs_logps: bool) -> Decision:
        """Ask for greedy answers to a problem, and decide whether log-probabilities are used."""
        why = self.config.lacks_logps
        with doing(f"asking {self.endpoint.model} at {self.endpoint.url}"):
            probes = [self._probe(problem, seed, not why) for seed in range(1 if why else 2)]
        outcomes = [outcome for outcome, _ in probes]
        measured = disagreement(*(entries for _, entries in probes)) if not why else None
        why = why or doubts(probes, measured)
        return {
            "source": self.config.id,
            "remark": self.without_logps(why, needs_logps) if why else self._trusted(measured),
            "logps": not why,
            "requests": len(outcomes),
            "prompt_tokens": sum(outcome.prompt_tokens for outcome in outcomes),
            "answer_tokens": sum(outcome.answer_tokens for outcome in outcomes),
        }

    def _trusted(self, measured: float | None) -> str:
        return (
            f"Source {self.config.id}: its log-probabilities are used. In two greedy answers to one prompt they differ "
            f"by {measured:.2g} a token."
        )

    def _probe(self, problem: Problem, seed: int, with_logps: bool) -> tuple[Outcome, list[Entry]]:
        """A greedy answer, and the tokens that the server reports with log-probabilities; UserError if none comes."""
        request = self._request(problem, seed, with_logps, temperature=0.0, max_tokens=PROBE_TOKENS)
        entries: list[Entry] = []

        def read(body: bytes) -> Outcome:
            entries[:] = reported_entries(parsed(body, self.endpoint.api)["choices"][0], self.endpoint.api) or []
            return read_answer(body, self._expected(request))

        outcome, said = self.client.send(request, read, Event())
        if not outcome.is_answered:
            said = f": {said}" if said else ""
            advice = ADVICE.get(outcome.failed, ADVICE["connection"])
            again = f" after {outcome.retries} retries" if outcome.retries else ""
            raise UserError(
                f"{self.place}: {self.endpoint.url} gives no answer{again} ({outcome.failed}{said}). {advice}"
            )
        return outcome, entries

    # --- a step --------------------------------------------------------------------------------------

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Given:
        self.kept.open(self.decision, step)
        wanted = self._wanted(problems, step, sampling_round)
        outcomes = self._outcomes([request for _, _, request in wanted[: self._affordable(wanted, step)]], step)
        figures = counted(outcomes)
        figures["over_budget"] = len(wanted) - len(outcomes)
        self.totals.update({name: count for name, count in figures.items() if name != "seconds"})
        rollouts = [
            self._rollout(outcome, problems[position], position, index, step)
            for (position, index, _), outcome in zip(wanted, outcomes, strict=False)
            if not outcome.failed
        ]
        return Given(rollouts, figures)

    def _wanted(self, problems: Sequence[Problem], step: int, sampling_round: int) -> list[tuple[int, int, Request]]:
        """All requests of a round, each with the position of its problem and its number among those to the problem."""
        before, wanted, count = Counter[str](), list[tuple[int, int, Request]](), self.config.num_generations
        for position, problem in enumerate(problems):
            for index in range(count):
                where = text_number(problem.id, 7), before[problem.id] + index
                seed = derive_seed(self.seed, ASK, step, self.index, sampling_round, *where) % SEEDS
                wanted.append((position, index, self._request(problem, seed, self.decision["logps"])))
            before[problem.id] += count  # a problem may occur twice
        return wanted

    def _request(self, problem: Problem, seed: int, with_logps: bool = False, **changes: Any) -> Request:
        own, prompt = self.endpoint, problem.prompt
        if own.api == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if own.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
                messages = [{"role": "system", "content": own.system_prompt}, *messages]
            asked: dict[str, Any] = {"messages": messages}
        elif isinstance(prompt, str):
            asked = {"prompt": prompt}
        else:
            raise UserError(
                f"{self.place}: the prompt of {problem.id} is a chat, and endpoint.api: completions sends plain text "
                "only. Choose endpoint.api: chat."
            )
        limits = {"temperature": self.config.temperature, "max_tokens": self.max_tokens, "seed": seed, **changes}
        if with_logps:
            limits["logprobs"] = True if own.api == "chat" else 1
        if own.stop:
            limits["stop"] = own.stop
        fields = {"model": own.model, **asked, **limits, **own.extra_body}
        most = max(limits["max_tokens"], own.extra_body.get("max_completion_tokens", 0))
        return Request({name: value for name, value in fields.items() if value is not None}, most, seed)

    def _affordable(self, wanted: Sequence[tuple[int, int, Request]], step: int) -> int:
        """How many of the requests the rest of the budget allows, whatever the server answers."""
        budget, used = self.config.budget, self.totals
        tokens = used["prompt_tokens"] + used["answer_tokens"] + used["unknown_tokens"]
        requests_left = math.inf if budget.requests is None else budget.requests - used["requests"]
        tokens_left = math.inf if budget.tokens is None else budget.tokens - tokens
        costs = accumulate(most_tokens(request) for _, _, request in wanted)
        count = sum(n <= requests_left and cost <= tokens_left for n, cost in enumerate(costs, 1))
        what = f"its budget does not cover all requests of step {step}; the rest is left out."
        self._warn("budget", count < len(wanted), what)
        return count

    def _outcomes(self, requests: Sequence[Request], step: int) -> list[Outcome]:
        """What becomes of each request: it was sent earlier in this run, or is sent now. Nothing if the run ends."""
        kept = self.kept
        found = {n: outcome for n, request in enumerate(requests) if (outcome := kept.take(request.key))}

        def keep(n: int, outcome: Outcome) -> None:
            kept.add(requests[n].key, step, outcome)
            found[n] = outcome

        missing = [n for n in range(len(requests)) if n not in found]
        self.late = [thread for thread in self.late if thread.is_alive()]
        threads = max(self.config.max_requests - len(self.late), 1)
        most_failures = max(self.config.max_requests, FAILURES_IN_A_ROW)
        sending = self.round = Round(
            missing, lambda n, stop: self._send(requests[n], stop), keep, threads, most_failures
        )
        sending.wait(self.config.step_timeout)
        if self.closed:
            return []
        sending.end()
        for n in sending.held:
            keep(n, Outcome(failed=NEVER))
        late = [n for n in missing if n not in found]
        for n in late:
            keep(n, Outcome(failed=LATE, unknown_tokens=most_tokens(requests[n])))
        self.late += sending.threads if late else []
        goes_on = f"Step {step} goes on without"
        self._warn("outage", sending.has_given_up, f"{most_failures} requests in a row failed. {goes_on} the rest.")
        self._warn("late", bool(late), f"{goes_on} answers that took longer than step_timeout.")
        return [found[n] for n in range(len(requests))]

    def _send(self, request: Request, stop: Event) -> Outcome:
        outcome, _ = self.client.send(request, lambda body: read_answer(body, self._expected(request)), stop)
        if outcome.failed == "too_slow":
            outcome.unknown_tokens = most_tokens(request)
        return outcome

    def _expected(self, request: Request) -> Expected:
        own, max_tokens = self.endpoint, request.max_tokens
        return Expected(own.api, max_tokens, request.prompt_bytes, bool(own.stop), own.reasoning, self.client.secret)

    def _rollout(self, outcome: Outcome, problem: Problem, position: int, index: int, step: int) -> Rollout:
        return self.rollout(
            problem,
            position,
            index,
            step,
            text=outcome.text,
            logps=outcome.logps if self.decision["logps"] else None,
            num_tokens=outcome.num_tokens,
            finish_reason=outcome.finish_reason,
            ended=outcome.ended,
        )

    def metrics(self, figures: Counter[str]) -> dict[str, float]:
        names = ("requests", "failed", "retries", "late", "skipped", "over_budget", "prompt_tokens", "answer_tokens")
        metrics: dict[str, float] = {name: figures[name] for name in names}
        metrics |= {name: count for name, count in sorted(figures.items()) if name.startswith("failed/")}
        if figures["answered"]:
            metrics["time/latency"] = figures["seconds"] / figures["answered"]
        return metrics

    def close(self) -> None:
        self.closed = True
        if self.round is not None:
            self.round.end()
        self.opened.close()

    def _warn(self, about: str, is_so: bool, what: str) -> None:
        """Print a warning when something begins to be so."""
        if is_so and about not in self.warned:
            warn(f"Source {self.config.id}: {what}")
        (self.warned.add if is_so else self.warned.discard)(about)


def doubts(probes: Sequence[tuple[Outcome, list[Entry]]], measured: float | None) -> str:
    """Why the log-probabilities of greedy answers to one prompt are not used; empty if they are.

    `measured` says how much they disagree.
    """
    for outcome, entries in probes:
        if outcome.failed:
            return f"a greedy answer to a prompt cannot be used ({outcome.failed})"
        if not entries:
            return "it reports no log-probabilities"
        if not b"".join(token for token, _ in entries).startswith(outcome.text.encode()):
            return "the tokens whose log-probabilities it reports do not make up its text"
    if measured is None:
        return "two greedy answers to one prompt begin with different tokens"
    if measured > MOST_DISAGREEMENT:
        return (
            f"the log-probabilities of two greedy answers to one prompt differ by {measured:.2g} a token, more than "
            f"{MOST_DISAGREEMENT}"
        )
    return ""


def most_tokens(request: Request) -> int:
    """The most tokens that a request can use."""
    return request.max_tokens + request.prompt_bytes + TEMPLATE_TOKENS


def counted(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Figures of some requests."""
    figures = Counter[str]()
    for outcome in outcomes:
        if outcome.failed == NEVER:
            figures["skipped"] += 1
            continue
        figures.update(
            requests=1,
            retries=outcome.retries,
            prompt_tokens=outcome.prompt_tokens,
            answer_tokens=outcome.answer_tokens,
            unknown_tokens=outcome.unknown_tokens,
        )
        if outcome.failed == LATE:
            figures["late"] += 1
        elif outcome.failed:
            figures.update({"failed": 1, f"failed/{outcome.failed}": 1})
        else:
            figures["answered"] += 1
            figures["seconds"] += outcome.seconds  # type: ignore[assignment]  # a Counter adds any numbers
    return figures
