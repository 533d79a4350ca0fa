"""Stored rollouts as a source: those of an earlier run, or a data set of prompts and completions."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hacrl.config.settings import read_source
from hacrl.config.sources import SourceConfig
from hacrl.errors import UserError
from hacrl.rollouts.lines import read_rollouts
from hacrl.rollouts.rollout import FinishReason, Rollout
from hacrl.seeding import STORED, permutation
from hacrl.sources.outside import Given, OutsideSource
from hacrl.tasks.dataset import example_of, is_on_hub, question_of, read_rows
from hacrl.tasks.problem import Problem, Prompt, text_number

BYTES_PER_TOKEN = 4
"""Stored text without a number of tokens counts as one token for so many bytes."""
MOST_BYTES_PER_TOKEN = 64
"""Texts with more bytes for each token of the run's longest completion are left out: no tokenizer would fit them in."""
MOST_TOKENS = 2**20
"""A row that reports more tokens than this is not believed: no completion may be longer."""
LARGEST = 1e9
DAY = 86_400


@dataclass(frozen=True)
class Stored:
    """An answer that was stored with its question."""

    question: str
    text: str
    reward: float | None
    finish_reason: FinishReason
    ended: bool
    """Whether the source ended its turn; a stop string may have ended the answer instead."""
    logp_sum: float | None
    num_tokens: int
    opened: str = ""
    lead: str = ""


class Archive(OutsideSource):
    """Gives stored answers to the problems that have some: each of them once before any is given again."""

    is_measured = False

    def __init__(self, config: SourceConfig, index: int, seed: int, max_length: int) -> None:
        """`max_length` is the length of the run's completions in tokens; far longer answers are left out."""
        super().__init__(config, index, seed)
        self.max_bytes = max_length * MOST_BYTES_PER_TOKEN
        self.answers: dict[str, list[Stored]] = {}
        """Stored answers by question."""
        self.given: Counter[str] = Counter()
        """How many answers to each question were given so far; checkpoints hold it."""
        self.digest = ""
        """Checksum of all stored answers."""
        self.written: float | None = None
        """When the newest of the files was written, in seconds since 1970; None for a data set of the hub."""

    def prepare(self, problems: Sequence[Problem], needs_logps: bool, folder: Path) -> list[str]:
        path = Path(str(self.config.rollouts)).expanduser()
        if path.resolve() == folder.parent.resolve():
            raise UserError(f"{self.place}: {path} is the folder of this run itself. Give that of an earlier one.")
        left_out = self._load(path)
        questions = {question_of(problem.prompt) for problem in problems}
        joined = len(questions & self.answers.keys())
        if not joined:
            raise UserError(
                f"{self.place}: none of the {len(questions):,} problems that were compared is among the "
                f"{len(self.answers):,} prompts of {self.config.rollouts}. Give rollouts of this task's problems; the "
                "user's words in the prompts must be the same."
            )
        everything = [answer for own in self.answers.values() for answer in own]
        aside = f"; {left_out:,} others are empty or far too long" if left_out else ""
        remark = (
            f"Source {self.config.id}: {len(everything):,} stored rollouts of {len(self.answers):,} prompts{aside}; "
            f"{joined / len(questions):.0%} of the {len(questions):,} problems that were compared have some."
        )
        return [remark, *self._remark_on_logps(everything, needs_logps)]

    def _remark_on_logps(self, answers: Sequence[Stored], needs_logps: bool) -> list[str]:
        without = sum(answer.logp_sum is None for answer in answers)
        if not without:
            return []
        if without == len(answers):
            return [self.without_logps("the stored rollouts have no log-probabilities", needs_logps)]
        what = "are left out" if needs_logps else "count as if the learner had found them as likely (s = 1)"
        return [f"Source {self.config.id}: {without:,} stored rollouts have no log-probabilities; they {what}."]

    def _load(self, path: Path) -> int:
        """Read all stored answers; return how many are left out because they are empty or far too long."""
        is_run = (path / "rollouts").is_dir()
        answers, left_out, checksum = self._of_run(path) if is_run else self._of_data(path), 0, hashlib.blake2b()
        for answer in answers:
            size = len(answer.text.encode(errors="surrogatepass"))
            if not answer.text.strip() or size > self.max_bytes:
                left_out += 1
                continue
            checksum.update(f"{answer}".encode(errors="surrogatepass"))
            self.answers.setdefault(answer.question, []).append(answer)
        self.digest = checksum.hexdigest()[:16]
        return left_out

    def _of_run(self, path: Path) -> Iterator[Stored]:
        """The rollouts that a run has written, of the agents that the config names."""
        config, _ = read_source(path / "config.yaml")
        stops = {agent["id"]: agent.get("stop", config.get("stop")) for agent in config.get("agents", [])}
        stops |= {other["id"]: (other.get("endpoint") or {}).get("stop") for other in config.get("sources") or []}
        for agent in self.config.agents or []:
            if agent not in stops:
                raise UserError(f"{self.place}.agents: the run {path} has no agent {agent}; it has {', '.join(stops)}.")
        files = sorted((path / "rollouts").glob("step-*.jsonl"))
        if not files:
            raise UserError(f"{self.place}: the run {path} has no rollouts yet.")
        self.written = files[-1].stat().st_mtime
        for file in files:
            for line in read_rollouts(file):
                if self.config.agents is None or line["source"] in self.config.agents:
                    answer = stored(line, question_of(cast(Prompt, line["prompt"])), line["text"])
                    ended = answer.ended and not stops.get(line["source"])  # a stop string may have ended it
                    yield replace(answer, ended=ended, opened=line.get("opened", ""), lead=line.get("lead", ""))

    def _of_data(self, path: Path) -> Iterator[Stored]:
        """The rows of a file or a hub id, with the columns prompt and completion."""
        self.written = path.stat().st_mtime if path.exists() else None
        rows = read_rows(str(self.config.rollouts), self.config.split, self.config.subset, f"{self.place}.rollouts")
        for place, row in rows:
            example = example_of(row, place)
            yield stored(row, example.question, example.completion)

    @property
    def is_on_hub(self) -> bool:
        return is_on_hub(str(self.config.rollouts))

    @property
    def place(self) -> str:
        return f"sources.{self.config.id}"

    def sample(self, problems: Sequence[Problem], step: int, sampling_round: int) -> Given:
        rollouts, figures = list[Rollout](), Counter(given=0)
        for position, problem in enumerate(problems):
            question = question_of(problem.prompt)
            stored = self.answers.get(question, [])
            first, count = self.given[question], min(self.config.num_generations, len(stored))
            self.given[question] += count
            before = sum((first + n) // len(stored) for n in range(count))
            figures.update(given=count, joined=bool(stored), before=before)
            order = permutation(len(stored), self.seed, STORED, self.index, text_number(question, 7))
            for n in range(count):
                answer = stored[order[(first + n) % len(stored)]]
                rollouts.append(self._rollout(answer, problem, position, n, step))
        return Given(rollouts, figures)

    def _rollout(self, answer: Stored, problem: Problem, position: int, index: int, step: int) -> Rollout:
        logps = None
        if answer.logp_sum is not None:
            logps = [answer.logp_sum / answer.num_tokens] * answer.num_tokens
        return self.rollout(
            problem,
            position,
            index,
            step,
            text=answer.text,
            logps=logps,
            num_tokens=answer.num_tokens,
            finish_reason=answer.finish_reason,
            ended=answer.ended,
            lead=answer.lead,
            opened=answer.opened,
            reward=answer.reward if self.config.trust_rewards else None,
        )

    def metrics(self, figures: Counter[str]) -> dict[str, float]:
        given = figures["given"]
        metrics = {"joined": figures["joined"] / max(figures["prompts"], 1)}
        if given:
            metrics["times_given_before"] = figures["before"] / given
        if self.written is not None:
            metrics["time/age_days"] = (time.time() - self.written) / DAY
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "given": self.given, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["digest"] != self.digest:
            raise UserError(
                f"{self.place}: {self.config.rollouts} no longer holds the rollouts that the run was started with. Put "
                "them back, or start a new run with another output_dir."
            )
        super().load_state_dict(state)
        self.given = Counter(state["given"])


def stored(row: Mapping[str, Any], question: str, text: str) -> Stored:
    """An answer with what its row says about it. Numbers that cannot be are not believed."""
    reward, logp_sum, tokens = (number(row.get(name)) for name in ("reward", "logp_sum", "num_tokens"))
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        tokens = None
    known = tokens is not None and logp_sum is not None and logp_sum <= 0
    cut_off = row.get("finish_reason") == "length"
    return Stored(
        question=question,
        text=text,
        reward=reward,
        finish_reason="length" if cut_off else "stop",
        ended=not cut_off,
        logp_sum=logp_sum if known else None,
        num_tokens=int(tokens or 0) or max(len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN, 1),
    )


def number(value: object) -> float | None:
    """A number as large as a reward may be, or None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None
