"""Accuracy on the usual benchmarks: sample, judge, write every completion down, and go on where it was interrupted."""

import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hacrl.agents.loading import (
    end_of_turn_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    resolve_model,
)
from hacrl.agents.master import cast_parameters
from hacrl.agents.policy import Policy
from hacrl.agents.prompts import render
from hacrl.agents.retokenize import decode
from hacrl.config import AgentConfig, RunConfig, checked
from hacrl.errors import UserError, warn
from hacrl.evaluation.figures import Array, by_problem, majority, mean_interval, mean_over_sets
from hacrl.evaluation.heldout import agents_of
from hacrl.rollouts.engine import Engine, SamplingParams
from hacrl.seeding import EVALUATE, derive_seed
from hacrl.tasks.benchmarks import ProblemSet, load_benchmarks
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import MathPool, Verifier
from hacrl.training.run_dir import RunDir, to_json, write_atomically
from hacrl.yaml_settings import apply_overrides

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""What a model is told that is not the agent of a run."""
MAX_COMPLETION_LENGTH = 4096
BATCH_SIZE = 64
VERIFY_SECONDS = 10.0
"""For the judgement of one completion."""
SAMPLE_OF_WEIGHTS = 1 << 16
"""Bytes at the beginning and the end of each file of weights that tell one model from another."""

Line = dict[str, Any]
Figure = dict[str, float | None]


@dataclass(frozen=True)
class Options:
    """What the command line was given; None: what the run has, or the default."""

    benchmarks: Sequence[str]
    data: Path | None = None
    k: int | None = None
    config: str | None = None
    checkpoint: int | None = None
    system_prompt: str | None = None
    max_completion_length: int | None = None
    temperature: float | None = None
    seed: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    output: Path | None = None
    overrides: Sequence[str] = ()
    """key=value for any other setting of an agent."""


def evaluate_benchmarks(target: str, options: Options, console: Console) -> tuple[dict[str, Any], Path]:
    """The contents of eval.json and its folder: figures of a model, or of every agent of a run, on each benchmark."""
    agents, seed, usual = _subjects(target, options)
    sets = load_benchmarks(options.benchmarks, options.data, options.limit)
    for each in sets:
        if each.without_reference:
            warn(f"{each.name}: {len(each.without_reference)} rows have no reference answer and are left out.")
    folder = EvaluationDir(options.output or usual)
    jobs = [[Job(agent, each, options, seed) for each in sets] for agent in agents]
    with folder.locked(), Judge() as judge, _progress(console) as progress:
        folder.begin(target, jobs)
        for agent, own in zip(agents, jobs, strict=True):
            sampler = Sampler(agent, seed)
            values: dict[str, dict[str, Array]] = {}
            for job in own:
                path = folder.completions(job, alone=len(agents) == 1 and agent.id == "model")
                lines = _complete(job, path, sampler, judge, progress)
                values[job.set.name] = _values(job, lines)
                folder.add(job, _result(job, lines, values[job.set.name]))
            folder.set_mean(agent.id, _means(own, values))
    return folder.contents, folder.path


def _subjects(target: str, options: Options) -> tuple[list[AgentConfig], int, Path]:
    """Whom to evaluate, the seed, and the usual folder for the results."""
    changes: dict[str, Any] = {
        "system_prompt": options.system_prompt,
        "max_completion_length": options.max_completion_length,
        "sampling_batch_size": options.batch_size,
    }
    if (Path(target) / "config.yaml").is_file():
        config, agents = agents_of(target, "", options.checkpoint)
        usual = Path(target) / "eval" / Path(agents[0].model).parents[1].name
        seed = config.seed
    else:
        if options.checkpoint is not None:
            raise UserError(f"--checkpoint is for a run, and {target} is none: it has no config.yaml.")
        resolve_model(target)
        defaults: dict[str, Any] = {}
        if options.config is None:
            defaults = {
                "system_prompt": INSTRUCTION,
                "max_completion_length": MAX_COMPLETION_LENGTH,
                "sampling_batch_size": BATCH_SIZE,
            }
        else:
            defaults = RunConfig.load(options.config).agents[0].model_dump()
        agents = [AgentConfig(**{**defaults, "id": "model", "model": target})]
        usual = Path("runs") / f"eval-{Path(target.removeprefix('zoo:')).name}"
        seed = 0
    changes = {name: value for name, value in changes.items() if value is not None}
    changed = []
    for agent in agents:
        changed.append(checked(AgentConfig, apply_overrides({**agent.model_dump(), **changes}, options.overrides)))
    return changed, seed if options.seed is None else options.seed, usual


class Job:
    """One agent and one benchmark."""

    def __init__(self, agent: AgentConfig, problem_set: ProblemSet, options: Options, seed: int) -> None:
        self.agent, self.set, self.seed = agent, problem_set, seed
        self.k = problem_set.benchmark.samples if options.k is None else options.k
        usual = 0.0 if self.k == 1 else agent.temperature
        self.temperature = usual if options.temperature is None else options.temperature
        if self.k > 1 and self.temperature == 0:
            raise UserError(f"--temperature 0 would give {self.k} times the same completion: use --k 1.")

    @property
    def settings(self) -> dict[str, Any]:
        """What makes it another evaluation: the model and its settings, the problems, and how they are sampled."""
        names = ("system_prompt", "chat_template_kwargs", "max_completion_length", "stop", "dtype")
        settings: dict[str, Any] = {"weights": weights_of(self.agent.model), "seed": self.seed}
        settings |= {name: getattr(self.agent, name) for name in names}
        settings |= {"k": self.k, "temperature": self.temperature}
        settings |= {"top_p": self.agent.top_p, "top_k": self.agent.top_k}
        return {**settings, "problems": len(self.set.problems), "problems_digest": self.set.digest}

    @property
    def wanted(self) -> set[tuple[str, int]]:
        return {(problem.id, index) for problem in self.set.problems for index in range(self.k)}


def weights_of(model: str) -> str:
    """A model's identity: a fingerprint of its files, or the name on the hub."""
    folder = Path(resolve_model(model)).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_OF_WEIGHTS))
            file.seek(max(size - SAMPLE_OF_WEIGHTS, 0))
            digest.update(file.read(SAMPLE_OF_WEIGHTS))
    return digest.hexdigest()[:16]


# --- files -----------------------------------------------------------------------------------------


class EvaluationDir:
    """The folder of an evaluation: eval.json, and a file of completions for each benchmark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents: dict[str, Any] = {}

    @property
    def summary_file(self) -> Path:
        return self.path / "eval.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """UserError if it is something else's folder, or if another process evaluates into it."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file. Choose another --output.")
        if self.path.is_dir() and not self.summary_file.is_file() and set(os.listdir(self.path)) - {".lock"}:
            raise UserError(f"{self.path} is not empty and not an evaluation. Choose another --output.")
        self.path.mkdir(parents=True, exist_ok=True)
        with RunDir(self.path).locked(f"Another process evaluates into {self.path}"):
            yield

    def begin(self, target: str, jobs: list[list[Job]]) -> None:
        """Refuse to mix what was done before with something else; note down what is about to be done."""
        if self.summary_file.is_file():
            self.contents = json.loads(self.summary_file.read_text(encoding="utf-8"))
        else:
            self.contents = {"target": target, "agents": {}}
        for job in (job for own in jobs for job in own):
            agent = self.contents["agents"].setdefault(job.agent.id, {"model": job.agent.model, "benchmarks": {}})
            before = agent["benchmarks"].setdefault(job.set.name, {"settings": job.settings})["settings"]
            changed = [name for name in job.settings if before.get(name) != job.settings[name]]
            if changed:
                was = ", ".join(f"{name} {before.get(name)!r}, now {job.settings[name]!r}" for name in changed)
                raise UserError(
                    f"{self.path} holds {job.set.name} of {agent['model']} with other settings: {was}. "
                    "Choose another --output."
                )
        self.save()

    def completions(self, job: Job, alone: bool) -> Path:
        folder = self.path if alone else self.path / job.agent.id
        folder.mkdir(exist_ok=True)
        return folder / f"{job.set.name.replace(':', '-')}.jsonl"

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self.contents["agents"][job.agent.id]["benchmarks"][job.set.name] |= result
        self.save()

    def set_mean(self, agent: str, mean: dict[str, Figure]) -> None:
        self.contents["agents"][agent]["mean"] = mean
        self.save()

    def save(self) -> None:
        write_atomically(self.summary_file, json.dumps(self.contents, indent=2, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a file; what an interruption cut off is not there."""
    if not path.is_file():
        return []
    *whole, _ = path.read_text(encoding="utf-8", errors="surrogatepass").split("\n")
    return [json.loads(line) for line in whole]


def key(line: Line) -> tuple[str, int]:
    return line["prompt_id"], line["index"]


def _write(path: Path, lines: Sequence[Line]) -> None:
    write_atomically(path, "".join(to_json(line) + "\n" for line in lines))


def _append(path: Path, lines: Sequence[Line]) -> None:
    with path.open("a", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        file.write("".join(to_json(line) + "\n" for line in lines))


# --- sampling and judging --------------------------------------------------------------------------


class Sampler:
    """A model that answers. It is loaded when something is to be sampled."""

    def __init__(self, config: AgentConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config)

    @cached_property
    def engine(self) -> Engine:
        model = load_model(self.config).requires_grad_(False)
        policy = Policy(model, self.config, end_of_turn_ids(model, self.tokenizer, self.config.id))
        cast_parameters(model, policy.dtype)
        return policy.engine(self.tokenizer)

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Through the chat template; without one, the instruction stands behind the problem."""
        system = self.config.system_prompt
        if self.tokenizer.chat_template or not system or not isinstance(problem.prompt, str):
            return render(self.tokenizer, self.config, problem.prompt)
        plain = self.config.model_copy(update={"system_prompt": None})
        return render(self.tokenizer, plain, f"{problem.prompt}\n{system}\n")

    def room(self, job: Job, longest: int) -> int:
        """Tokens that a completion may have."""
        positions = getattr(load_model_config(self.config).get_text_config(), "max_position_embeddings", None)
        wanted = self.config.max_completion_length
        if not positions or longest + wanted <= positions:
            return wanted
        if longest >= positions:
            raise UserError(
                f"{job.set.name}: a prompt has {longest} tokens, and {self.config.model} has {positions} positions."
            )
        warn(
            f"{job.set.name}: completions have {positions - longest} tokens at most, because the longest prompt has "
            f"{longest} and {self.config.model} has {positions} positions."
        )
        return int(positions) - longest


class Judge:
    """Verdicts and votes, by math-verify in processes with limits. They are started when they are needed."""

    def __init__(self) -> None:
        self._workers = min(os.cpu_count() or 1, 8)
        self._verifier: Verifier | None = None
        self._pool: MathPool | None = None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *error: object) -> None:
        for part in (self._verifier, self._pool):
            if part is not None:
                part.close()

    def verdicts(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Line]:
        if self._verifier is None:
            self._verifier = Verifier([("math", 1.0)], timeout=VERIFY_SECONDS, workers=self._workers)
        answers = [problem.answer for problem in problems]
        verdicts = self._verifier.score([problem.prompt for problem in problems], texts, {"answer": answers})
        return [{"reward": v.reward, "problem": v.problem, "detail": v.detail} for v in verdicts]

    def votes(self, groups: Sequence[Sequence[Line]]) -> list[list[int | None]]:
        """Of the completions of each problem: 0 for the right answer, the same number for equal wrong ones."""
        if self._pool is None:
            self._pool = MathPool("same_answer", VERIFY_SECONDS, self._workers)
        return list(self._pool.threads.map(self._votes, groups))

    def _votes(self, group: Sequence[Line]) -> list[int | None]:
        assert self._pool is not None
        known: dict[str, int | None] = {}
        different: list[str] = []
        votes: list[int | None] = []
        for line in group:
            text, vote = line["text"], None
            if line["reward"] == 1:
                vote = 0
            elif line["reward"] is not None and text in known:
                vote = known[text]
            elif line["reward"] is not None:
                reply = self._pool.call({"completions": [text], "others": [different]})
                place = reply.values[0] if reply.outcome == "returned" else None
                if place == -1:
                    different.append(text)
                    place = len(different) - 1
                vote = known[text] = None if place is None else int(place) + 1
            votes.append(vote)
        return votes


def _complete(job: Job, path: Path, sampler: Sampler, judge: Judge, progress: Progress) -> list[Line]:
    """All lines of a benchmark, in the order of the problems; what is not there yet is sampled and judged."""
    task = progress.add_task(f"{job.agent.id} · {job.set.name}", total=len(job.wanted), rate="")
    lines = {key(line): line for line in read_lines(path)}
    if not lines.keys() >= job.wanted:
        lines = _sample(job, path, lines, sampler, judge, progress, task)
    progress.update(task, completed=len(job.wanted), rate="")
    groups = [[lines[problem.id, index] for index in range(job.k)] for problem in job.set.problems]
    ordered = [line for group in groups for line in group]
    if job.k > 1 and not all("vote" in line for line in ordered):
        progress.update(task, rate="counting votes")
        for group, votes in zip(groups, judge.votes(groups), strict=True):
            for line, vote in zip(group, votes, strict=True):
                line["vote"] = vote
        _write(path, ordered)
        progress.update(task, rate="")
    return ordered


def _sample(
    job: Job,
    path: Path,
    lines: dict[tuple[str, int], Line],
    sampler: Sampler,
    judge: Judge,
    progress: Progress,
    task: TaskID,
) -> dict[tuple[str, int], Line]:
    ids = {problem.id: sampler.prompt_ids(problem) for problem in job.set.problems}
    unknown = sampler.tokenizer.unk_token_id
    if unknown is not None and any(unknown in prompt for prompt in ids.values()):
        warn(f"{job.set.name}: prompts have characters that the tokenizer of {job.agent.model} does not know.")
    room = sampler.room(job, max(map(len, ids.values())))
    # Longest first: memory that suffices for the first batch suffices for all.
    problems = sorted(job.set.problems, key=lambda problem: -len(ids[problem.id]))
    rows = [(problem, index) for problem in problems for index in range(job.k)]
    size = job.agent.sampling_batch_size
    batches = {start: rows[start : start + size] for start in range(0, len(rows), size)}
    # Only whole batches count, so that a batch has the same random numbers whenever it is sampled.
    whole = {s: b for s, b in batches.items() if lines.keys() >= {(problem.id, index) for problem, index in b}}
    kept = {(problem.id, index) for batch in whole.values() for problem, index in batch}
    lines = {place: line for place, line in lines.items() if place in kept}
    if path.is_file():
        _write(path, list(lines.values()))
    progress.update(task, completed=len(kept))
    params = SamplingParams(1, room, job.temperature, job.agent.top_p, job.agent.top_k, tuple(job.agent.stop))
    tokens, began = 0, time.perf_counter()
    for start, batch in batches.items():
        if start in whole:
            continue
        seed = derive_seed(job.seed, EVALUATE, zlib.crc32(job.set.name.encode()), start)
        sampled = sampler.engine.sample([ids[problem.id] for problem, _ in batch], params, seed)
        completions = [completion for (completion,) in sampled]
        tokens += sum(len(completion.token_ids) for completion in completions)
        rate = f"{tokens / (time.perf_counter() - began):,.0f} tokens/s"
        texts = [decode(sampler.tokenizer, completion.content_ids) for completion in completions]
        verdicts = judge.verdicts([problem for problem, _ in batch], texts)
        new = [
            {
                "prompt_id": problem.id,
                "index": index,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "text": text,
                "finish_reason": completion.finish_reason,
                "num_tokens": len(completion.token_ids),
                **verdict,
            }
            for (problem, index), completion, text, verdict in zip(batch, completions, texts, verdicts, strict=True)
        ]
        _append(path, new)
        lines |= {key(line): line for line in new}
        progress.update(task, advance=len(batch), rate=rate)
    return lines


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


# --- figures ---------------------------------------------------------------------------------------


def _values(job: Job, lines: Sequence[Line]) -> dict[str, Array]:
    """Each figure's value for each problem."""
    rewards = [math.nan if line["reward"] is None else line["reward"] for line in lines]
    correct_PK = np.array(rewards).reshape(-1, job.k)
    values = by_problem(correct_PK)
    if job.k > 1:
        votes = [[line["vote"] for line in lines[start : start + job.k]] for start in range(0, len(lines), job.k)]
        majorities = np.array([majority(own) for own in votes])
        values[f"maj@{job.k}"] = np.where(np.isnan(correct_PK).all(1), np.nan, majorities)
    return values


def _result(job: Job, lines: Sequence[Line], values: dict[str, Array]) -> dict[str, Any]:
    figures = {}
    for name, value_P in values.items():
        known = value_P[~np.isnan(value_P)]
        mean = float(known.mean()) if len(known) else math.nan
        figures[name] = {**_figure(mean, *mean_interval(known)), "problems": len(known)}
    return {
        "source": job.set.source,
        "without_reference": len(job.set.without_reference),
        "completions": len(lines),
        "unverified": sum(line["reward"] is None for line in lines),
        "cut_off": sum(line["finish_reason"] == "length" for line in lines),
        "mean_tokens": sum(line["num_tokens"] for line in lines) / len(lines),
        "figures": figures,
    }


def _means(jobs: Sequence[Job], values: dict[str, dict[str, Array]]) -> dict[str, Figure]:
    """Over benchmarks, each with the same weight: avg@k of all; and as in the paper's tables, AIME by best@k."""
    average = [values[job.set.name][f"avg@{job.k}"] for job in jobs]
    table = [
        values[job.set.name][f"best@{job.k}"] if job.set.benchmark.samples > 1 and job.k > 1 else own
        for job, own in zip(jobs, average, strict=True)
    ]
    return {"avg": _figure(*mean_over_sets(average)), "paper": _figure(*mean_over_sets(table))}


def _figure(value: float, low: float, high: float) -> Figure:
    numbers = {"value": value, "low": low, "high": high}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
