"""The usual mathematical benchmarks: where each is found, and how a row becomes a prompt and a reference answer.

Files have the format of the usual repositories; none of them is part of this package.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import digits

from hacrl.errors import UserError, nearest
from hacrl.signs import doing
from hacrl.tasks.boxed import last_box
from hacrl.tasks.dataset import Row, is_missing, read_rows, valid_text
from hacrl.tasks.problem import Problem, digest

SUFFIXES = (".jsonl", ".json", ".parquet")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def reference_of(row: Row) -> str | None:
    """The reference answer of a row: `answer`, else `final_answer`, else the last box of `solution`, else None.

    GSM8K has a worked answer that ends in "#### 72", AMC the number 27.0, OlympiadBench a list of texts. Dollars around
    LaTeX are removed, because the whole reference is the answer.
    """
    candidates = (row.get("answer"), row.get("final_answer"), last_box(str(row.get("solution") or "")))
    answer = next((candidate for candidate in candidates if not is_missing(candidate)), "")
    if isinstance(answer, list):
        answer = ", ".join(str(part) for part in answer)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return re.sub(r"(?<!\\)\$", "", str(answer).rpartition("####")[2]).strip() or None


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is found, and how it is usually evaluated."""

    repository: str
    """Name of the repository on the Hugging Face hub."""
    split: str
    files: tuple[str, ...]
    """Other names of files or folders, besides the benchmark's; capitals, hyphens and underscores are ignored."""
    subset: str | None = None
    samples: int = 1
    """Completions of each problem if --k is not given, as in the paper's tables."""
    solved_in: str | None = None
    """Name of the column with a worked solution that ends in the reference."""


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "test", (), subset="main", solved_in="answer"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", (), solved_in="solution"),
    "math": Benchmark("DigitalLearningGmbH/MATH-lighteval", "test", ("math-lighteval",), solved_in="solution"),
    "amc23": Benchmark("math-ai/amc23", "test", ("amc2023", "amc")),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", ("aime2024",), samples=30),
    "aime25": Benchmark("math-ai/aime25", "test", ("aime2025",), samples=30),
    "minerva": Benchmark("math-ai/minervamath", "test", ("minervamath",), solved_in="solution"),
    "olympiad": Benchmark("math-ai/olympiadbench", "test", ("olympiadbench",)),
}


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one benchmark."""

    name: str
    """Name in the command: `math500`, or `gsm8k:train` for a split other than the usual one."""
    source: str
    problems: list[Problem]
    without_reference: list[str]
    """Places of rows without a reference answer, which are left out because no answer could be right."""

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.name.partition(":")[0]]

    @property
    def digest(self) -> str:
        """Fingerprint of prompts and references; it tells apart different problems under the same name."""
        return digest(self.problems)

    def solution(self, problem: Problem) -> str | None:
        """The worked solution in the data if the benchmark has solutions that end in the reference, else None."""
        solution = problem.columns.get("solution") if self.benchmark.solved_in else None
        return solution if isinstance(solution, str) and solution.strip() else None


@doing("reading the benchmarks")
def load_benchmarks(names: Sequence[str], data: Path | None, limit: int | None = None) -> list[ProblemSet]:
    """Load problem sets from files in `data` or from the hub; UserError if one is unknown or not found."""
    if not names:
        raise UserError(f"No benchmark is named. There are {', '.join(BENCHMARKS)}.")
    for name in names:
        known, _, _ = name.partition(":")
        if known not in BENCHMARKS:
            raise UserError(f"There is no benchmark {known!r}{nearest(known, BENCHMARKS)}")
        if names.count(name) > 1:
            raise UserError(f"The benchmark {name} is named twice.")
    found = [_load(name, data) for name in names]
    if limit is None:
        return found
    return [replace(each, problems=each.problems[:limit], without_reference=[]) for each in found]


def found_in(data: Path) -> list[str]:
    """Names of all benchmarks and splits that have a file in the folder."""
    names = []
    for name, benchmark in BENCHMARKS.items():
        asked = [name] if benchmark.split == "train" else [name, f"{name}:train"]
        names += [each for each in asked if _matches(each, data)]
    if not names:
        raise UserError(f"{data} has no file of {', '.join(BENCHMARKS)}. Give --data the folder with their files.")
    return names


def _load(name: str, data: Path | None) -> ProblemSet:
    known, _, split = name.partition(":")
    benchmark, solved_in = BENCHMARKS[known], BENCHMARKS[known].solved_in
    rows: Iterable[tuple[str, Row]]
    if data:
        paths = _matches(name, data)
        if not paths:
            raise UserError(_not_found(name, data))
        paths = [path for path in paths if path.parent.name == benchmark.subset] or paths
        source = ", ".join(map(str, paths))
        if len({SHARD.sub("", str(path.with_suffix(""))) for path in paths}) > 1:
            raise UserError(f"Several files fit {name}: {source}. Give --data a folder with one.")
        rows = (row for path in paths for row in read_rows(str(path), "", None))
    else:
        source = benchmark.repository
        try:
            rows = read_rows(source, split or benchmark.split, benchmark.subset)
        except UserError as error:
            raise UserError(f"{name} cannot be read from the hub: give its files with --data DIR. {error}") from error
    problems, without = [], []
    for number, (place, row) in enumerate(rows):
        reference = reference_of(row)
        if reference is None:
            without.append(place)
            continue
        columns = {**row, "answer": reference} | ({"solution": row.get(solved_in)} if solved_in else {})
        problems.append(Problem(f"{name}-{number:05d}", _prompt(row, place), reference, columns))
    if not problems:
        raise UserError(f"{source} has no problem with a reference answer for {name}.")
    return ProblemSet(name, source, problems, without)


def _not_found(name: str, data: Path) -> str:
    """Error message that lists the expected files and similar files that exist."""
    known, _, split = name.partition(":")
    wanted = split or "test"
    folders = ", ".join(f"{alias}/**/{wanted}.jsonl" for alias in (known, *BENCHMARKS[known].files))
    looked_for = f"{known}.jsonl, {known}_{wanted}.jsonl, {folders} (or .json, .parquet)"
    message = f"{data} has no file of {name}: looked for {looked_for}."
    if not split and (train := _matches(f"{known}:train", data)):
        message += f" There is {train[0]}: to be evaluated on training problems, ask for {known}:train."
    relatives = [other for other in BENCHMARKS if other.rstrip(digits) == known.rstrip(digits)]  # math and math500
    if others := [other for other in relatives if other != known and _matches(other, data)]:
        message += f" There are files of {', '.join(others)}."
    return message


def _matches(name: str, data: Path) -> list[Path]:
    """Files named after the benchmark, or named after a split in a folder named after the benchmark."""
    if not data.is_dir():
        raise UserError(f"There is no folder {data} for --data.")
    known, _, split = name.partition(":")
    benchmark = BENCHMARKS[known]
    aliases = {plain(alias) for alias in (known, *benchmark.files)}
    here = data.resolve()
    around = here.parent.name if here.name == benchmark.subset else here.name
    files = sorted(path for path in data.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    stems = {path: plain(SHARD.sub("", path.stem)) for path in files}
    inside = {
        path for path in files if aliases & {plain(part) for part in (around, *path.relative_to(data).parts[:-1])}
    }
    for each in [split] if split else ["test", benchmark.split]:
        names = {alias + plain(each) for alias in aliases} | (set() if split else aliases)
        found = [path for path in files if stems[path] in names or (path in inside and stems[path] == plain(each))]
        if found:
            return found
    return []


def plain(name: str) -> str:
    """A name without capitals, hyphens and underscores: `math500` for `MATH-500` and `math_500`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _prompt(row: Row, place: str) -> str:
    column = next((column for column in ("problem", "question", "prompt") if not is_missing(row.get(column))), None)
    if column is None:
        raise UserError(f"{place} has no problem: it has the columns {', '.join(row)}.")
    if not isinstance(row[column], str):
        raise UserError(f"{place}: {column} is a {type(row[column]).__name__}, expected text.")
    context = row.get("context")
    question = valid_text(row[column], place).strip()
    return question if is_missing(context) else f"{str(context).strip()}\n\n{question}"
