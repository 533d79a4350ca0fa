"""Accuracy on the usual benchmarks: sample, judge, write every completion down, and go on where it was interrupted."""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from rich.console import Console

from hacrl.agents.loading import resolve_model
from hacrl.config import AgentConfig, checked
from hacrl.config.settings import apply_overrides
from hacrl.errors import UserError, warn
from hacrl.evaluation.answers import Answerer, Judge, answer_line
from hacrl.evaluation.figures import NO_ROOM, Figure, Line, by_problem_with_votes, figure, summary
from hacrl.evaluation.options import Options
from hacrl.evaluation.subjects import check_model, evaluated_agents, is_run
from hacrl.files import NUMBER, Kind, read_lines, read_object
from hacrl.seeding import EVALUATE, derive_seed
from hacrl.signs import Activity, doing
from hacrl.statistics import Array, mean_over_sets
from hacrl.tasks.benchmarks import ProblemSet, load_benchmarks
from hacrl.tasks.verify import Verdict
from hacrl.terminal import say
from hacrl.training.run_dir import RunDir, make_folder, to_json, write_atomically

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""System prompt of a model that is not the agent of a run."""
SAMPLE_OF_WEIGHTS = 1 << 16
"""Bytes at the beginning and the end of each file of weights that go into a model's fingerprint."""
FILES_OF_WEIGHTS = (".safetensors", ".bin")
FILES_OF_A_MODEL = (*FILES_OF_WEIGHTS, ".json", ".jinja", ".model", ".txt")
"""Endings of a model's files, with its configuration, tokenizer and chat template."""
ASKED_WITH = ("system_prompt", "chat_template_kwargs", "max_completion_length", "stop", "dtype", "top_p", "top_k")
"""Settings of an agent that change its answers, and so make another evaluation."""
NOT_HERE = {
    "id": "it names the agent of a run",
    "model": "the model is the command's first word",
    "max_prompt_length": "prompts are as long as the model's positions allow",
    "temperature": "use --temperature",
}
"""Settings of an agent that an evaluation does not take as KEY=VALUE, and why."""

JUDGED = {"reward": NUMBER, "vote?": (int, NoneType)}
COMPLETION = Kind(
    "a completion",
    {"prompt_id": str, "index": int, "text": str, "finish_reason": str, "num_tokens": int, **JUDGED},
    "Delete the line, or the file: it is sampled anew.",
    grows=True,
)
RESULTS = Kind(
    "the results of an evaluation",
    {"agents": {"*": {"model": str, "benchmarks": {"*": {"settings": {}}}}}},
    "Delete its folder, and all is sampled again; or choose another --output.",
)

Place = tuple[str, int]
"""A problem's id and the number of one of its completions, from 0."""


def evaluate_benchmarks(target: str, options: Options, console: Console) -> tuple[dict[str, Any], Path]:
    """Evaluate a model, or every agent of a run, on each benchmark: the contents of eval.json, and its folder."""
    agents, seed, usual = _subjects(target, options)
    sets = load_benchmarks(options.benchmarks or [], options.data, options.limit)
    for each in sets:
        if each.without_reference:
            warn(f"{each.name}: {len(each.without_reference)} rows have no reference answer and are left out.")
    folder = EvaluationDir(options.output or usual, alone=[agent.id for agent in agents] == ["model"])
    answerers = (Answerer(agent, as_trained=False) for agent in agents)
    jobs = [[Job(answerer, each, options, seed) for each in sets] for answerer in answerers]
    with folder.locked(), Judge() as judge:
        folder.begin(target, jobs)
        evaluation = Evaluation(folder, judge, console)
        while jobs:
            own = jobs.pop(0)  # nothing holds the model of the agent before any longer
            values = [evaluation.run(job) for job in own]
            folder.set_mean(own, _means(own, values))
    return folder.contents, folder.path


def _subjects(target: str, options: Options) -> tuple[list[AgentConfig], int, Path]:
    """Whom to evaluate, the seed, and the usual folder for the results."""
    seed = 0
    if is_run(target) or options.config is not None:
        config, agents = evaluated_agents(target, options.config or "", options.checkpoint)
        seed = config.seed if is_run(target) else 0
    else:
        check_model(target, options.checkpoint)
        asked = {"system_prompt": INSTRUCTION, "max_completion_length": 4096, "sampling_batch_size": 64}
        agents = [AgentConfig.model_validate({"id": "model", "model": target, **asked})]
    usual = Path("runs") / f"eval-{Path(target.removeprefix('zoo:')).name}"
    if is_run(target):
        usual = Path(target) / "eval" / Path(agents[0].model).parents[1].name
    if options.limit is not None:  # a first look should not be in the way of the whole
        usual = usual.with_name(f"{usual.name}-limit-{options.limit}")
    given = {"system_prompt": options.system_prompt, "max_completion_length": options.max_completion_length}
    given |= {"sampling_batch_size": options.batch_size}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in (override.partition("=")[0] for override in options.overrides):
        if name in NOT_HERE:
            raise UserError(f"{name}=... has no meaning here: {NOT_HERE[name]}.")
    settings = [apply_overrides({**agent.model_dump(), **changes}, options.overrides) for agent in agents]
    return [checked(AgentConfig, own) for own in settings], seed if options.seed is None else options.seed, usual


class Job:
    """One agent and one benchmark: k completions of each problem, and for k above 1 the greedy ones beside them."""

    def __init__(self, answerer: Answerer, problem_set: ProblemSet, options: Options, seed: int) -> None:
        self.answerer, self.agent, self.set, self.seed = answerer, answerer.config, problem_set, seed
        self.k = problem_set.benchmark.samples if options.k is None else options.k
        usual = 0.0 if self.k == 1 else self.agent.temperature
        self.temperature = usual if options.temperature is None else options.temperature
        if self.k > 1 and self.temperature == 0:
            raise UserError(f"--temperature 0 would give {self.k} times the same completion: use --k 1.")

    @cached_property
    def agent_settings(self) -> dict[str, Any]:
        """What makes it another model, or another way to ask it: equal for all benchmarks of a folder."""
        settings: dict[str, Any] = {"weights": weights_of(self.agent.model), "seed": self.seed}
        settings["prompt_suffix"] = self.agent.prompt_suffix or None  # as in folders from before there was one
        return settings | {name: getattr(self.agent, name) for name in ASKED_WITH}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What makes it another evaluation."""
        own = {"k": self.k, "temperature": self.temperature}
        return {**self.agent_settings, **own, "problems": len(self.set.problems), "problems_digest": self.set.digest}

    @cached_property
    def prompts(self) -> dict[str, list[int]]:
        """Token ids of the prompts, by id of the problem; UserError if none fits into the model."""
        ids = {problem.id: self.answerer.prompt_ids(problem) for problem in self.set.problems}
        self.answerer.check(self.set.name, list(ids.values()))
        return ids

    def batches(self, k: int) -> tuple[list[Place], dict[int, list[Place]]]:
        """Completions whose prompt does not fit into the model, and batches of the others by where they begin. The
        longest come first: memory that suffices for the first batch suffices for all."""
        longest_first = sorted(self.prompts, key=lambda name: -len(self.prompts[name]))
        places = [(name, index) for name in longest_first for index in range(k)]
        fitting = [place for place in places if len(self.prompts[place[0]]) < self.answerer.positions]
        size = self.agent.rows_at_once()
        batches = {start: fitting[start : start + size] for start in range(0, len(fitting), size)}
        return places[: len(places) - len(fitting)], batches


def weights_of(model: str) -> str:
    """A model's identity: a fingerprint of weights, configuration, tokenizer and template, or its name on the hub."""
    folder = Path(resolve_model(model)).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in FILES_OF_A_MODEL and path.is_file()):
        size, is_weights = path.stat().st_size, path.suffix in FILES_OF_WEIGHTS
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_OF_WEIGHTS if is_weights else -1))
            if is_weights:
                file.seek(max(size - SAMPLE_OF_WEIGHTS, 0))
                digest.update(file.read(SAMPLE_OF_WEIGHTS))
    return digest.hexdigest()[:16]


class EvaluationDir:
    """The folder of an evaluation: eval.json, and a file of completions for each benchmark."""

    def __init__(self, path: Path, alone: bool = True) -> None:
        """`alone`: a model, whose files lie in the folder itself; agents of a run have a folder each."""
        self.path, self.alone, self.summary_file = path, alone, path / "eval.json"
        self.contents: dict[str, Any] = {}

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
        """Read what was done before; UserError if it has other settings."""
        self.contents = {"target": target, "agents": {}}
        if self.summary_file.is_file():
            self.contents = read_object(self.summary_file, RESULTS)
        for job in (job for own in jobs for job in own):
            agent = self.contents["agents"].get(job.agent.id, {"benchmarks": {}})
            for name, row in agent["benchmarks"].items():
                now, then = job.settings if name == job.set.name else job.agent_settings, row["settings"]
                if changed := [key for key in now if then.get(key) != now[key]]:
                    shown = {"weights": "tokenizer, template or weights"}
                    was = ", ".join(f"{shown.get(key, key)} {then.get(key)!r}, now {now[key]!r}" for key in changed)
                    held = f"{self.path} holds {name} of {agent['model']} with other settings"
                    raise UserError(f"{held}: {was}. Choose another --output.")

    def completions(self, job: Job, greedy: bool = False) -> Path:
        """The file of a job's completions, or of the greedy ones beside them."""
        folder = self.path if self.alone else self.path / job.agent.id
        return folder / f"{job.set.name.replace(':', '-')}{'-greedy' if greedy else ''}.jsonl"

    def add(self, job: Job, **result: Any) -> None:
        """Write down the results of a job; without any, that it has begun: the folder holds its settings from then."""
        agent = self.contents["agents"].setdefault(job.agent.id, {"model": job.agent.model, "benchmarks": {}})
        agent["benchmarks"].setdefault(job.set.name, {"settings": job.settings}).update(result)
        self._save()

    def set_mean(self, jobs: list[Job], mean: dict[str, Figure]) -> None:
        names = [job.set.name for job in jobs]
        self.contents["agents"][jobs[0].agent.id]["mean"] = {"benchmarks": names, **mean}
        self._save()

    def _save(self) -> None:
        write_atomically(self.summary_file, json.dumps(self.contents, indent=2, allow_nan=False) + "\n")


def completions_in(path: Path) -> list[Line]:
    """The whole lines of a file; what an interruption cut off is not there."""
    return read_lines(path, COMPLETION) if path.is_file() else []


def _placed(places: Sequence[Place], answers: Sequence[Line]) -> dict[Place, Line]:
    """Answers as they are written down, each with the number of the completion; benchmarks have no parts."""
    lines = [{name: value for name, value in answer.items() if name != "part"} for answer in answers]
    return {own: {"prompt_id": own[0], "index": own[1]} | line for own, line in zip(places, lines, strict=True)}


def _text(lines: Iterable[Line]) -> str:
    return "".join(to_json(line) + "\n" for line in lines)


class Evaluation:
    """Fills the folder of an evaluation: samples and judges what it does not hold yet."""

    def __init__(self, folder: EvaluationDir, judge: Judge, console: Console) -> None:
        self.folder, self.judge, self.console = folder, judge, console

    def run(self, job: Job) -> dict[str, Array]:
        """Do a job, write its figures down, and return their values for each problem."""
        groups = self._groups(job, job.k, job.temperature, self.folder.completions(job))
        values = by_problem_with_votes(groups)
        if job.k > 1:
            greedy = self._groups(job, 1, 0.0, self.folder.completions(job, greedy=True))
            values, groups = by_problem_with_votes(greedy) | values, groups + greedy
        found = summary([line for group in groups for line in group], values)
        self.folder.add(job, source=job.set.source, without_reference=len(job.set.without_reference), **found)
        say(self.console, f"{job.agent.id}: {job.set.name} done")
        return values

    def _groups(self, job: Job, k: int, temperature: float, path: Path) -> list[list[Line]]:
        """The completions of each problem; those that the file does not hold yet are sampled and judged."""
        places = [[(problem.id, index) for index in range(k)] for problem in job.set.problems]
        lines = {(line["prompt_id"], line["index"]): line for line in completions_in(path)}
        if not lines.keys() >= {place for own in places for place in own}:
            with doing(f"{job.agent.id}: {job.set.name}", k * len(places)) as activity:
                lines = self._sample(job, k, temperature, path, lines, activity)
        groups = [[lines[place] for place in own] for own in places]
        ordered = [line for group in groups for line in group]
        if k > 1 and not all("vote" in line for line in ordered):
            with doing(f"{job.agent.id}: {job.set.name}, counting votes"):
                for group, votes in zip(groups, self.judge.votes(groups), strict=True):
                    for line, vote in zip(group, votes, strict=True):
                        line["vote"] = vote
            write_atomically(path, _text(ordered))
        return groups

    def _sample(
        self, job: Job, k: int, temperature: float, path: Path, lines: dict[Place, Line], activity: Activity
    ) -> dict[Place, Line]:
        """Sample and judge the completions that are missing, and write them down batch by batch."""
        problems = {problem.id: problem for problem in job.set.problems}
        without_room, batches = job.batches(k)
        # Only whole batches count, so that a batch has the same random numbers whenever it is sampled.
        done = {start for start, places in batches.items() if lines.keys() >= set(places)}
        kept = {place for start in done for place in batches[start]}
        lines = {place: line for place, line in lines.items() if place in kept}
        _ = job.answerer.source  # a model that cannot be loaded leaves nothing behind
        self.folder.add(job)
        path.parent.mkdir(exist_ok=True)
        wrong = [answer_line(problems[name], "", NO_ROOM, 0, Verdict(0.0)) for name, _ in without_room]
        lines |= _placed(without_room, wrong)
        if path.is_file() or without_room:
            write_atomically(path, _text(lines.values()))
        activity.begin(activity.what, done=len(lines))
        judged = [line["reward"] for line in lines.values() if line["reward"] is not None]
        began, tokens = time.perf_counter(), 0
        for start, places in [batch for batch in batches.items() if batch[0] not in done]:
            own, prompts = [problems[name] for name, _ in places], [job.prompts[name] for name, _ in places]
            seed = derive_seed(job.seed, EVALUATE, zlib.crc32(job.set.name.encode()), start)
            new = _placed(places, job.answerer.answers(own, prompts, self.judge.score, temperature, seed))
            with path.open("a", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
                file.write(_text(new.values()))
            lines |= new
            tokens += sum(line["num_tokens"] for line in new.values())
            judged += [line["reward"] for line in new.values() if line["reward"] is not None]
            right = f"{100 * sum(judged) / max(len(judged), 1):.1f} % right so far"
            activity.done = len(lines)
            activity.note = f"{right}, {tokens / (time.perf_counter() - began):,.0f} tokens/s"
        return lines


def _means(jobs: Sequence[Job], values: Sequence[dict[str, Array]]) -> dict[str, Figure]:
    """Over benchmarks, each with the same weight: avg@1, avg@k; and avg@1 with AIME by best@k, as the paper has it."""
    names = {
        "avg@1": ["avg@1" for _ in jobs],
        "avg": [f"avg@{job.k}" for job in jobs],
        "paper": [f"best@{job.k}" if min(job.k, job.set.benchmark.samples) > 1 else "avg@1" for job in jobs],
    }
    sets = {mean: [own[name] for own, name in zip(values, each, strict=True)] for mean, each in names.items()}
    return {mean: figure(*mean_over_sets(own)) for mean, own in sets.items()}
