"""Accuracy on the usual benchmarks: sample, judge, write every completion down, and go on where it was interrupted."""

import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hacrl.agents.loading import resolve_model
from hacrl.config import AgentConfig, RunConfig, checked
from hacrl.config.settings import apply_overrides
from hacrl.errors import UserError, warn
from hacrl.evaluation.answers import Judge, Line, Sampler
from hacrl.evaluation.figures import by_problem, majority
from hacrl.evaluation.heldout import agents_of, check_model
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.retokenize import decode
from hacrl.seeding import EVALUATE, derive_seed
from hacrl.statistics import Array, mean_interval, mean_over_sets
from hacrl.tasks.benchmarks import ProblemSet, load_benchmarks
from hacrl.tasks.boxed import stated
from hacrl.tasks.problem import Problem
from hacrl.training import files
from hacrl.training.files import NUMBER, Kind, read_object
from hacrl.training.run_dir import RunDir, make_folder, to_json, write_atomically

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""What a model is told that is not the agent of a run."""
MAX_COMPLETION_LENGTH = 4096
BATCH_SIZE = 64
SAMPLE_OF_WEIGHTS = 1 << 16
"""Bytes at the beginning and the end of each file of weights that tell one model from another."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two progress lines in a log."""
FILES_OF_WEIGHTS = (".safetensors", ".bin")
FILES_OF_A_MODEL = (*FILES_OF_WEIGHTS, ".json", ".jinja", ".model", ".txt")
"""With its configuration, tokenizer and chat template."""
SHOWN = {"weights": "tokenizer, template or weights"}
"""Settings whose names in eval.json do not say it all."""

NOT_HERE = {
    "id": "it names the agent of a run",
    "model": "the model is the command's first word",
    "max_prompt_length": "prompts are as long as the model's positions allow",
    "temperature": "use --temperature",
}
"""Settings of an agent that an evaluation does not take as KEY=VALUE, and why."""

COMPLETION = Kind(
    "a completion",
    {
        "prompt_id": str,
        "index": int,
        "text": str,
        "reward": NUMBER,
        "finish_reason": str,
        "num_tokens": int,
        "vote?": (int, NoneType),
    },
    "Delete the line, or the file: it is sampled anew.",
    grows=True,
)
RESULTS = Kind(
    "the results of an evaluation",
    {"agents": {"*": {"model": str, "benchmarks": {"*": {"settings": {}}}}}},
    "Delete its folder, and all is sampled again; or choose another --output.",
)

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
                lines = _complete(job, path, folder, sampler, judge, progress)
                found = _values(job, lines)
                if job.greedy:
                    beside = path.with_name(f"{path.stem}-greedy.jsonl")
                    answers = _complete(job.greedy, beside, folder, sampler, judge, progress)
                    found = _values(job.greedy, answers) | found
                    lines += answers
                values[job.set.name] = found
                folder.add(job, _result(job, lines, found))
                if not console.is_terminal:
                    _say(console, f"{agent.id}: {job.set.name} done")
            folder.set_mean(agent.id, [job.set.name for job in own], _means(own, values))
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
        check_model(target, options.checkpoint)
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
    if options.limit is not None:  # a first look should not be in the way of the whole
        usual = usual.with_name(f"{usual.name}-limit-{options.limit}")
    changes = {name: value for name, value in changes.items() if value is not None}
    for name in (override.partition("=")[0] for override in options.overrides):
        if name in NOT_HERE:
            raise UserError(f"{name}=... has no meaning here: {NOT_HERE[name]}.")
    changed = []
    for agent in agents:
        changed.append(checked(AgentConfig, apply_overrides({**agent.model_dump(), **changes}, options.overrides)))
    return changed, seed if options.seed is None else options.seed, usual


class Job:
    """One agent and one benchmark."""

    greedy: "Job | None" = None
    """Beside several completions, the one answer that avg@1 counts."""

    def __init__(self, agent: AgentConfig, problem_set: ProblemSet, options: Options, seed: int) -> None:
        self.agent, self.set, self.seed = agent, problem_set, seed
        self.k = problem_set.benchmark.samples if options.k is None else options.k
        usual = 0.0 if self.k == 1 else agent.temperature
        self.temperature = usual if options.temperature is None else options.temperature
        if self.k > 1 and self.temperature == 0:
            raise UserError(f"--temperature 0 would give {self.k} times the same completion: use --k 1.")
        if self.k > 1:
            self.greedy = Job(agent, problem_set, replace(options, k=1, temperature=0.0), seed)

    @cached_property
    def agent_settings(self) -> dict[str, Any]:
        """What makes it another model, or another way to ask it: the same for all benchmarks of a folder."""
        names = ("system_prompt", "chat_template_kwargs", "max_completion_length", "stop", "dtype", "top_p", "top_k")
        settings: dict[str, Any] = {"weights": weights_of(self.agent.model), "seed": self.seed}
        settings["prompt_suffix"] = self.agent.prompt_suffix or None  # as in folders from before there was one
        return settings | {name: getattr(self.agent, name) for name in names}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What makes it another evaluation."""
        own = {"k": self.k, "temperature": self.temperature}
        return {**self.agent_settings, **own, "problems": len(self.set.problems), "problems_digest": self.set.digest}

    @property
    def wanted(self) -> set[tuple[str, int]]:
        return {(problem.id, index) for problem in self.set.problems for index in range(self.k)}


def weights_of(model: str) -> str:
    """A model's identity: a fingerprint of weights, configuration, tokenizer and template, or its name on the hub."""
    folder = Path(resolve_model(model)).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in FILES_OF_A_MODEL and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if path.suffix not in FILES_OF_WEIGHTS:
                digest.update(file.read())
                continue
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
        make_folder(self.path, "--output")
        with RunDir(self.path).locked(f"Another process evaluates into {self.path}"):
            yield

    def begin(self, target: str, jobs: list[list[Job]]) -> None:
        """Refuse to mix what was done before with something else."""
        self.contents = {"target": target, "agents": {}}
        if self.summary_file.is_file():
            self.contents = read_object(self.summary_file, RESULTS)
        for job in (job for own in jobs for job in own):
            agent = self.contents["agents"].get(job.agent.id, {"benchmarks": {}})
            for name, row in agent["benchmarks"].items():
                settings = job.settings if name == job.set.name else job.agent_settings
                changed = [key for key in settings if row["settings"].get(key) != settings[key]]
                if changed:
                    was = ", ".join(
                        f"{SHOWN.get(key, key)} {row['settings'].get(key)!r}, now {settings[key]!r}" for key in changed
                    )
                    raise UserError(
                        f"{self.path} holds {name} of {agent['model']} with other settings: {was}. "
                        "Choose another --output."
                    )

    def claim(self, job: Job) -> None:
        """Note down what is about to be sampled: from here on the folder holds this and nothing else."""
        self._row(job)
        self.save()

    def _row(self, job: Job) -> dict[str, Any]:
        agents = self.contents["agents"]
        agent = agents.setdefault(job.agent.id, {"model": job.agent.model, "benchmarks": {}})
        row: dict[str, Any] = agent["benchmarks"].setdefault(job.set.name, {"settings": job.settings})
        return row

    def completions(self, job: Job, alone: bool) -> Path:
        folder = self.path if alone else self.path / job.agent.id
        return folder / f"{job.set.name.replace(':', '-')}.jsonl"

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self._row(job).update(result)
        self.save()

    def set_mean(self, agent: str, benchmarks: list[str], mean: dict[str, Figure]) -> None:
        self.contents["agents"][agent]["mean"] = {"benchmarks": benchmarks, **mean}
        self.save()

    def save(self) -> None:
        write_atomically(self.summary_file, json.dumps(self.contents, indent=2, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a file; what an interruption cut off is not there."""
    if not path.is_file():
        return []
    return files.read_lines(path, COMPLETION)


def key(line: Line) -> tuple[str, int]:
    return line["prompt_id"], line["index"]


def _write(path: Path, lines: Sequence[Line]) -> None:
    write_atomically(path, "".join(to_json(line) + "\n" for line in lines))


def _append(path: Path, lines: Sequence[Line]) -> None:
    with path.open("a", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        file.write("".join(to_json(line) + "\n" for line in lines))


# --- sampling and judging --------------------------------------------------------------------------


def _complete(
    job: Job, path: Path, folder: EvaluationDir, sampler: Sampler, judge: Judge, progress: Progress
) -> list[Line]:
    """All lines of a benchmark, in the order of the problems; what is not there yet is sampled and judged."""
    task = progress.add_task(f"{job.agent.id} · {job.set.name}", total=len(job.wanted), rate="")
    lines = {key(line): line for line in read_lines(path)}
    if not lines.keys() >= job.wanted:
        lines = _sample(job, path, folder, lines, sampler, judge, progress, task)
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
    folder: EvaluationDir,
    lines: dict[tuple[str, int], Line],
    sampler: Sampler,
    judge: Judge,
    progress: Progress,
    task: TaskID,
) -> dict[tuple[str, int], Line]:
    ids = {problem.id: sampler.prompt_ids(problem) for problem in job.set.problems}
    sampler.check(job.set.name, list(ids.values()))
    # Longest first: memory that suffices for the first batch suffices for all.
    problems = sorted(job.set.problems, key=lambda problem: -len(ids[problem.id]))
    fitting = [problem for problem in problems if len(ids[problem.id]) < sampler.positions]
    rows = [(problem, index) for problem in fitting for index in range(job.k)]
    size = job.agent.sampling_batch_size
    batches = {start: rows[start : start + size] for start in range(0, len(rows), size)}
    # Only whole batches count, so that a batch has the same random numbers whenever it is sampled.
    whole = {s: b for s, b in batches.items() if lines.keys() >= {(problem.id, index) for problem, index in b}}
    kept = {(problem.id, index) for batch in whole.values() for problem, index in batch}
    lines = {place: line for place, line in lines.items() if place in kept}
    _ = sampler.engine  # a model that cannot be loaded leaves nothing behind
    folder.claim(job)
    path.parent.mkdir(exist_ok=True)
    unanswered = [(problem, index) for problem in problems[: -len(fitting)] for index in range(job.k)]
    lines |= {(problem.id, index): _line(problem, index) for problem, index in unanswered}
    if path.is_file() or unanswered:
        _write(path, list(lines.values()))
    progress.update(task, completed=len(lines))
    tokens, began = 0, time.perf_counter()
    said = began
    for start, batch in batches.items():
        if start in whole:
            continue
        seed = derive_seed(job.seed, EVALUATE, zlib.crc32(job.set.name.encode()), start)
        prompts = [ids[problem.id] for problem, _ in batch]
        room = int(min(job.agent.max_completion_length, sampler.positions - len(prompts[0])))
        params = SamplingParams(1, room, job.temperature, job.agent.top_p, job.agent.top_k, tuple(job.agent.stop))
        completions = sampler.complete(prompts, params, seed)
        tokens += sum(len(completion.token_ids) for completion in completions)
        rate = f"{tokens / (time.perf_counter() - began):,.0f} tokens/s"
        texts = [decode(sampler.tokenizer, completion.content_ids) for completion in completions]
        verdicts = judge.verdicts([problem for problem, _ in batch], texts)
        new = [
            _line(problem, index, text, completion.finish_reason, len(completion.token_ids), verdict)
            for (problem, index), completion, text, verdict in zip(batch, completions, texts, verdicts, strict=True)
        ]
        _append(path, new)
        lines |= {key(line): line for line in new}
        progress.update(task, advance=len(batch), rate=rate)
        if not progress.console.is_terminal and time.perf_counter() - said >= SECONDS_BETWEEN_LINES:
            said = time.perf_counter()
            judged = [line["reward"] for line in lines.values() if line["reward"] is not None]
            right = 100 * sum(judged) / max(len(judged), 1)
            so_far = f"{len(lines):,} of {len(job.wanted):,} completions, {right:.1f} % right so far, {rate}"
            _say(progress.console, f"{job.agent.id}: {job.set.name} {so_far}")
    return lines


NO_ROOM = "no_room"
"""Why there is no answer to a problem that does not fit into the model."""
WRONG: Line = {"reward": 0.0, "problem": None, "detail": ""}


def _line(
    problem: Problem, index: int, text: str = "", finish_reason: str = NO_ROOM, tokens: int = 0, verdict: Line = WRONG
) -> Line:
    """A completion as it is written down; without more, that of a problem for which there is no room in the model."""
    return {
        "prompt_id": problem.id,
        "index": index,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "text": text,
        "finish_reason": finish_reason,
        "num_tokens": tokens,
        "stated": stated(text),
        **verdict,
    }


def _say(console: Console, text: str) -> None:
    """Where there is no bar to look at: in a log."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


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
        "no_room": sum(line["finish_reason"] == NO_ROOM for line in lines),
        "mean_tokens": sum(line["num_tokens"] for line in lines) / len(lines),
        "figures": figures,
    }


def _means(jobs: Sequence[Job], values: dict[str, dict[str, Array]]) -> dict[str, Figure]:
    """Over benchmarks, each with the same weight: avg@1, avg@k; and avg@1 with AIME by best@k, as the paper has it."""
    single = [values[job.set.name]["avg@1"] for job in jobs]
    average = [values[job.set.name][f"avg@{job.k}"] for job in jobs]
    table = [
        values[job.set.name][f"best@{job.k}"] if job.set.benchmark.samples > 1 and job.k > 1 else own
        for job, own in zip(jobs, single, strict=True)
    ]
    sets = {"avg@1": single, "avg": average, "paper": table}
    return {name: _figure(*mean_over_sets(own)) for name, own in sets.items()}


def _figure(value: float, low: float, high: float) -> Figure:
    numbers = {"value": value, "low": low, "high": high}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
