"""Sends requests to a server with OpenAI's interface, again if need be, several at once, and never for too long."""

import hashlib
import json
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from hacrl.config.sources import EndpointConfig
from hacrl.errors import UserError, harmless
from hacrl.sources.answers import NotAnAnswer, Outcome

LARGEST_RESPONSE = 4 * 2**20
"""Bytes of a response that are read at most, besides those that log-probabilities need."""
BYTES_PER_ENTRY = 512
"""Bytes that the log-probability of one token may take in a response."""
LARGEST_REFUSAL = 2**16
"""Bytes of an error response that are read."""
SECRET_LENGTH = 8
"""Shorter keys are placeholders, such as EMPTY, which may occur in answers."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a request is sent again: the first pause, which doubles, and the longest."""
AGAIN = ("connection", "too_slow", "not_json", "status_408", "status_409", "status_429")
"""Failures after which a request is sent again, besides errors of the server (5xx)."""


@dataclass(frozen=True)
class Request:
    """A request for one answer."""

    fields: dict[str, Any]
    """What is sent."""
    max_tokens: int
    """The most tokens of the answer."""
    seed: int
    """A number that tells requests of the same content apart; it is part of what is sent unless the config forbids."""

    @property
    def key(self) -> str:
        """The name of the request in the file of answers: a checksum of what is sent, wherever it is sent."""
        content = json.dumps([self.fields, self.seed], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def prompt_bytes(self) -> int:
        prompt = self.fields.get("prompt") or "".join(str(each.get("content")) for each in self.fields["messages"])
        return len(prompt.encode(errors="surrogatepass"))


class Failure(Exception):
    """A request that has no answer. The message is the failure's short name."""

    def __init__(self, reason: str, said: str = "", retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.said, self.retry_after = reason, said, retry_after

    @property
    def may_pass(self) -> bool:
        return self.reason in AGAIN or self.reason.startswith("status_5")


class Client:
    """A server, and how it is asked. Nothing that it raises, logs or returns has the key in it."""

    def __init__(self, config: EndpointConfig, place: str) -> None:
        """`place` is where the config of the endpoint is, for messages."""
        try:
            import openai
        except ImportError:
            raise UserError(f"{place} needs the package openai: pip install 'hacrl[endpoint]'.") from None
        self.config, self.openai, key = config, openai, _key(config, place)
        self.secret = key if len(key) >= SECRET_LENGTH else ""
        http = openai.DefaultHttpxClient(follow_redirects=False, event_hooks={"response": [self._refuse]})
        fixed = {"max_retries": 0, "timeout": config.timeout, "http_client": http}
        self.client = openai.OpenAI(base_url=config.url, api_key=key or "none", **fixed)
        self.not_before = 0.0
        """Time until which nothing is sent, because the server has asked for a pause."""

    def send(self, request: Request, read: Callable[[bytes], Outcome], stop: Event) -> tuple[Outcome, str]:
        """The outcome of a request, and what the server said if it refused. `read` reads the body of a response.

        `stop` ends the waiting; then no further attempt is made.
        """
        outcome, attempt, key = Outcome(failed="too_slow"), 0, request.key
        while not stop.wait(max(self.not_before - time.monotonic(), 0.0)):
            began = time.monotonic()
            try:
                outcome, failure = read(self._body(request)), None
            except NotAnAnswer as error:
                outcome, failure = Outcome(failed=str(error)), Failure(str(error))
            except Failure as error:
                outcome, failure = Outcome(failed=error.reason), error
            outcome.retries, outcome.seconds = attempt, time.monotonic() - began
            if failure is not None and failure.retry_after is not None:
                self.not_before = time.monotonic() + min(max(failure.retry_after, 0.0), self.config.timeout)
            if failure is None or not failure.may_pass or attempt == self.config.max_retries:
                return outcome, failure.said if failure else ""
            attempt += 1
            if failure.retry_after is None and stop.wait(self._pause(key, attempt)):
                break
        return outcome, ""

    def close(self) -> None:
        self.client.close()

    def _pause(self, key: str, attempt: int) -> float:
        """Seconds before the next attempt, where the server does not ask for any: longer each time."""
        longest = min(FIRST_PAUSE * 2.0 ** min(attempt - 1, 30), LONGEST_PAUSE)
        return longest * (0.5 + 0.5 * random.Random(f"{key}/{attempt}").random())

    def _body(self, request: Request) -> bytes:
        """The body of the response to one attempt; Failure if it is too large, incomplete or too late."""
        largest = LARGEST_RESPONSE + BYTES_PER_ENTRY * request.max_tokens
        deadline, openai = time.monotonic() + self.config.timeout, self.openai
        is_chat = "messages" in request.fields
        resource = self.client.chat.completions if is_chat else self.client.completions
        own = {name: request.fields[name] for name in ("model", "messages" if is_chat else "prompt")}
        rest = {name: value for name, value in request.fields.items() if name not in own}
        body = bytearray()
        try:
            with resource.with_streaming_response.create(**own, extra_body=rest) as response:
                for part in response.iter_bytes():
                    body += part
                    if len(body) > largest:
                        raise Failure("too_large")
                    if time.monotonic() > deadline:
                        raise Failure("too_slow")
        except Failure:
            raise
        except openai.APITimeoutError:
            raise Failure("too_slow") from None
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, Failure):  # early versions of openai wrap what a hook raises
                raise error.__cause__ from None
            raise Failure("connection", type(error.__cause__ or error).__name__) from None
        except Exception as error:  # httpx's or httpx2's, depending on the version of openai
            reason = "too_slow" if "Timeout" in type(error).__name__ else "connection"
            raise Failure(reason, type(error).__name__) from None
        return bytes(body)

    def _refuse(self, response: Any) -> None:
        """Turn a response that is no success into a Failure, after a look at its beginning."""
        if response.is_success:
            return
        begun = bytearray()
        for part in response.iter_bytes():
            begun += part
            if len(begun) >= LARGEST_REFUSAL:
                break
        said = " ".join(bytes(begun[:LARGEST_REFUSAL]).decode(errors="replace").split())
        if self.secret:
            said = said.replace(self.secret, "***")
        known = response.status_code in {status.value for status in HTTPStatus}
        reason = f"status_{response.status_code if known else 'unknown'}"
        raise Failure(reason, harmless(said[:200]), _seconds(response.headers.get("retry-after", "")))


def _key(config: EndpointConfig, place: str) -> str:
    """The key, from the environment variable that the config names; empty without one."""
    name = config.api_key_env
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(f"{place}.api_key_env: the environment variable {name} is not set. Set it to the key.")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UserError(
            f"{place}.api_key_env: the environment variable {name} does not hold a key: it has white space or "
            "characters that are not ASCII."
        )
    return key


def _seconds(retry_after: str) -> float | None:
    """What the header Retry-After asks for: seconds, or a date; None if it is neither."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", retry_after):
        return float(retry_after)
    try:
        until: datetime = parsedate_to_datetime(retry_after)
        return (until - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


class Round:
    """Requests that are sent at the same time, a few at once, from threads that end with the process."""

    def __init__(
        self,
        jobs: Sequence[int],
        send: Callable[[int, Event], Outcome],
        keep: Callable[[int, Outcome], None],
        threads: int,
        most_failures: int,
    ) -> None:
        """`keep` gets each outcome, one at a time and before the next request of its thread, until the round is ended.

        After `most_failures` requests in a row that were not answered, no more are sent.
        """
        self.waiting, self.send, self.keep, self.stop = deque(jobs), send, keep, Event()
        self.most_failures, self.failures, self.lock = most_failures, 0, Lock()
        self.missing = set(jobs)
        """Jobs whose outcome is still waited for."""
        self.held: list[int] = []
        """Jobs that are never sent."""
        self.has_given_up = False
        self.done: SimpleQueue[int | Exception | None] = SimpleQueue()
        """Jobs as their outcomes come in, or what a thread raised; None: the round was ended from outside."""
        self.threads = [Thread(target=self._work, daemon=True, name="request") for _ in range(min(threads, len(jobs)))]
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self.waiting.popleft()
            except IndexError:
                return
            try:
                outcome = self.send(job, self.stop)
                with self.lock:
                    if self.stop.is_set():
                        return
                    self.keep(job, outcome)
                    self.failures = 0 if outcome.is_answered else self.failures + 1
                    if self.failures == self.most_failures:
                        self.has_given_up = True
                        self.hold()
            except Exception as error:  # the thread that waits raises it
                self.done.put(error)
                return
            self.done.put(job)

    def wait(self, seconds: float) -> None:
        """Wait until all outcomes are there, the time is over or the round is ended."""
        deadline = time.monotonic() + seconds
        while self.missing:
            try:
                done = self.done.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                return
            if done is None:
                return
            if isinstance(done, Exception):
                raise done
            self.missing.remove(done)

    def hold(self) -> None:
        """Send no more requests."""
        with suppress(IndexError):
            while True:
                self.held.append(self.waiting.popleft())
        self.missing -= set(self.held)

    def end(self) -> None:
        """Send no more requests, none again, keep no more outcomes, and wake the thread that waits."""
        self.hold()
        with self.lock:
            self.stop.set()
        self.done.put(None)
