"""The file in which a run keeps every answer of an endpoint, so that a resumed run asks for none of them again."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, cast

from hacrl.files import Kind, parse_lines, read_bytes, shape_of
from hacrl.sources.answers import Outcome

ADVICE = "Delete that line; the request is then sent again."


class Decision(TypedDict):
    """The first line: what was found out about the source before the first step."""

    source: str
    remark: str
    logps: bool
    """Whether its log-probabilities are used."""
    requests: int
    prompt_tokens: int
    answer_tokens: int


class KeptAnswer(TypedDict):
    """A line for each request, with the fields of its `Outcome`."""

    request: str
    step: int
    failed: str
    text: str
    logps: list[float] | None
    num_tokens: int
    finish_reason: str
    ended: bool
    prompt_tokens: int
    answer_tokens: int
    unknown_tokens: int
    retries: int
    seconds: float


DECISION = Kind("what a run found out about a source", shape_of(Decision), "Start a new run with another output_dir.")
ANSWER = Kind("an answer of a source", shape_of(KeptAnswer), ADVICE, grows=True)


class Kept:
    """What an endpoint has answered in this run, and the file that holds it. One thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self.answers: dict[str, Outcome] = {}
        """Outcomes by request, of the steps that a resumed run does again."""

    def decision(self) -> Decision | None:
        """The first line; None if there is none yet."""
        lines = self._lines()
        if len(lines) < 2:  # without its end the line was not written to the end
            return None
        (_, line), *_ = parse_lines(lines[0], self.path, DECISION)
        return cast(Decision, line)

    def open(self, decision: Decision, step: int) -> None:
        """Begin or go on with the file; answers from this step on will be found."""
        if self.file is not None:
            return
        data = b"\n".join(self._lines())
        _, end, rest = data.partition(b"\n")
        for _, line in parse_lines(rest, self.path, ANSWER, first=2) if end else ():
            if line["step"] >= step:
                self.answers[line["request"]] = Outcome(**{own.name: line[own.name] for own in fields(Outcome)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("ab")
        self.file.truncate(data.rfind(b"\n") + 1)  # a crash may have cut the last line
        if not end:
            self._write(dict(decision))

    def take(self, request: str) -> Outcome | None:
        """What became of a request, if it was sent before."""
        return self.answers.pop(request, None)

    def add(self, request: str, step: int, outcome: Outcome) -> None:
        self._write({"request": request, "step": step, **asdict(outcome)})

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()

    def _lines(self) -> list[bytes]:
        try:
            return read_bytes(self.path).split(b"\n")
        except FileNotFoundError:
            return []
