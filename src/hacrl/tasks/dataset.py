"""Reads problems from files and from the Hugging Face hub, and sets the order in which training sees them.

A row needs a prompt and an answer. The prompt is the column `prompt` (text or chat messages), else `problem`
or `question`; the answer is `answer`, else `solution`, `ground_truth` or verl's `reward_model.ground_truth`.
"""

import codecs
import difflib
import json
import math
import random
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

from hacrl.config.given import GivenRows
from hacrl.config.strict_yaml import MAX_DEPTH, line_and_column
from hacrl.errors import UserError, require
from hacrl.tasks.problem import Problem, Prompt

Row = dict[str, Any]
Item = TypeVar("Item")

PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "reward_model.ground_truth")

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")
TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")\s*(:?)|[\[{]|[\]}]', re.DOTALL)
"""Matches the tokens that matter for keys and nesting: strings, with a colon if they are keys, and brackets."""


def load_problems(
    source: str | GivenRows, *, split: str, subset: str | None, name: str, key: str = ""
) -> list[Problem]:
    """Load all problems of a data set; `key` is the config key that names it, for error messages.

    `source` is a .jsonl, .json or .parquet file, a folder made by `save_to_disk` of datasets, an id on the hub
    ("org/name"), or rows. `split` and `subset` apply to folders and the hub; all else is always one split.
    """
    problems: dict[str, Problem] = {}
    for number, (place, row) in enumerate(read_rows(source, split, subset, key)):
        problem_id = f"{name}-{number:06d}" if row.get("id") is None else f"{name}-{row['id']}"
        while problem_id in problems:
            problem_id += f"-{number:06d}"
        answer = _answer(row, place)
        problems[problem_id] = Problem(problem_id, _prompt(row, place), answer, {**row, "answer": answer})
    if not problems:
        raise UserError(f"{source} is empty: it needs at least one row with a prompt and an answer.")
    return list(problems.values())


@dataclass(frozen=True)
class Example:
    """A prompt and the completion to learn."""

    prompt: Prompt
    completion: str

    @property
    def question(self) -> str:
        return question_of(self.prompt)


def load_examples(source: str, *, split: str = "train", subset: str | None = None) -> list[Example]:
    """Load all rows of a data set with completions, from the sources that `load_problems` accepts."""
    examples = [example_of(row, place) for place, row in read_rows(source, split, subset, "data")]
    if not examples:
        raise UserError(f"{source} is empty: it needs at least one row with a prompt and a completion.")
    return examples


def overlap(train: Iterable[Problem], evaluation: Iterable[Problem]) -> int:
    """Number of evaluation problems whose question is also in training, whatever their system prompts."""
    asked = {question_of(problem.prompt) for problem in train}
    return sum(question_of(problem.prompt) in asked for problem in evaluation)


class Epochs(Generic[Item]):
    """An endless order of problems or rows: epoch after epoch, each shuffled by (seed, epoch).

    The result of `take` depends only on its arguments, so a run can resume from its position. If all steps have the
    same size, they see each item once per epoch.
    """

    def __init__(self, items: Sequence[Item], seed: int | str) -> None:
        self._items, self._seed = items, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def take(self, position: int, count: int) -> list[Item]:
        """The `count` items from `position` on, all different. If they reach into the next epoch, items of that epoch
        that were already taken are left for the step after."""
        size = len(self._items)
        if count > size:
            advice = f"set prompts_per_step to {size} or less, or add data"
            raise UserError(f"The data set has {size} problems, fewer than the {count} of one step: {advice}.")
        first = position
        while first >= size > count > first % size > 0:  # the previous step reached into this epoch
            first -= count
        chosen: list[int] = []
        for start in range(first, position + 1, max(count, 1)):
            epoch, offset = divmod(start, size)
            order = self._order(epoch)
            if start > first:
                order = _beginning_with(chosen[-offset:], order)
            chosen = order[offset : offset + count]
            if len(chosen) < count:
                chosen = _beginning_with(chosen, self._order(epoch + 1))[:count]
        return [self._items[index] for index in chosen]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._items)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _beginning_with(first: list[int], order: list[int]) -> list[int]:
    """The order with the items `first` moved to the front."""
    taken = set(first)
    return first + [index for index in order if index not in taken]


def is_on_hub(source: str | GivenRows) -> TypeGuard[str]:
    """Whether a data set is read from the hub, because no local file has that name."""
    if isinstance(source, GivenRows):
        return False
    path = Path(source).expanduser()
    return not path.exists() and bool(HUB_ID.fullmatch(source)) and path.suffix not in FILE_SUFFIXES


def count_rows(source: str) -> int | None:
    """Number of rows of a local file; None for a folder or the hub, whose data would have to be loaded first."""
    if is_on_hub(source) or Path(source).expanduser().is_dir():
        return None
    return sum(1 for _ in read_rows(source, "train", None))


def read_rows(source: str | GivenRows, split: str, subset: str | None, key: str = "") -> Iterable[tuple[str, Row]]:
    """Read the rows of a data set, each with its place for error messages."""
    if isinstance(source, GivenRows):
        return ((f"{key}, row {number}", row) for number, row in enumerate(source.rows))
    path = Path(source).expanduser()
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        return _read_json(path)
    if path.is_dir():
        rows = _read_saved(path, split)
    elif path.is_file():
        if path.suffix != ".parquet":
            raise UserError(f"{source} is not a data set: expected a .jsonl, .json or .parquet file.")
        rows = _read_parquet(path)
    elif is_on_hub(source):
        rows = _read_hub(source, split, subset)
    else:
        siblings = {sibling.stem: sibling for sibling in path.parent.iterdir()} if path.parent.is_dir() else {}
        close = difflib.get_close_matches(path.stem, siblings, n=1)
        hint = f"did you mean {siblings[close[0]]}?" if close else "give a file, or org/name for the hub."
        wanted = f"{source} for {key}" if key else source
        raise UserError(f"There is no data set {wanted} (looked for {path.absolute()}): {hint}")
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows))


def _read_json(path: Path) -> Iterable[tuple[str, Row]]:
    """Rows of a file with JSON lines or one JSON array."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        rows = [(f"{path}, row {number}", row) for number, row in enumerate(parse_json(content, str(path)))]
    else:
        places = ((f"{path}, line {number}", line) for number, line in enumerate(content.split(b"\n"), start=1))
        rows = [(place, parse_json(line, place)) for place, line in places if line.strip()]
    for place, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{place}: expected an object with a prompt and an answer, got {type(row).__name__}.")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    require(f"Reading {path}", "data", "pyarrow")
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file that can be read: {error}") from error


def _read_saved(path: Path, split: str) -> list[Row]:
    """Rows of a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    splits = path / "dataset_dict.json"
    if not splits.is_file() and not (path / "dataset_info.json").is_file():
        raise UserError(f"{path} is a folder that datasets' save_to_disk did not make: name one of the files in it.")
    require(f"Reading {path}", "data", "datasets")
    import datasets

    saved = datasets.load_from_disk(path)
    if splits.is_file() and split not in saved:
        raise UserError(f"{path} has no split {split!r}: it has {', '.join(saved)}.")
    return list((saved[split] if splits.is_file() else saved).to_list())


def _read_hub(source: str, split: str, subset: str | None) -> list[Row]:
    require(f"Reading {source}", "data", "datasets")
    import datasets

    try:
        return list(datasets.load_dataset(source, subset, split=split).to_list())
    except (OSError, ValueError) as error:
        chosen = f"split {split!r}" + (f" and subset {subset!r}" if subset else "")
        on_hub = f"the hub's data set of that name cannot be loaded with {chosen}"
        raise UserError(f"There is no file {source}, and {on_hub}: {error}") from error


def _prompt(row: Row, place: str) -> Prompt:
    column = next((column for column in PROMPT_COLUMNS if not is_missing(row.get(column))), None)
    if column is None:
        raise UserError(_lacks(row, place, "prompt", PROMPT_COLUMNS))
    prompt = row[column]
    if isinstance(prompt, str):
        return valid_text(prompt, place)
    if not isinstance(prompt, list) or not all(map(_is_message, prompt)):
        expected = "a list of chat messages, each with text as role and content"
        raise UserError(f"{place}: {column} is neither text nor {expected}.")
    return [{"role": message["role"], "content": valid_text(message["content"], place)} for message in prompt]


def valid_text(text: str, place: str, what: str = "prompt") -> str:
    """Return the text; UserError if it has half of a character, "\\ud83d", which JSON allows and tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: the {what} is not valid Unicode ({error}). Fix or remove it.") from error
    return text


def example_of(row: Row, place: str) -> Example:
    """The example in a row: its prompt and completion, or its messages with the last turn as the completion."""
    conversation = row.get("messages")
    if "completion" not in row and isinstance(conversation, list):
        if len(conversation) < 2 or not (_is_message(conversation[-1]) and conversation[-1]["role"] == "assistant"):
            raise UserError(f"{place}: messages does not end with a turn of the assistant behind another one.")
        row = {"prompt": conversation[:-1], "completion": conversation[-1:]}
    return Example(_prompt(row, place), _completion(row, place))


def _completion(row: Row, place: str) -> str:
    """The completion of a row: a text or, as in TRL, a list with one message of the assistant."""
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and _is_message(completion[0]):
        completion = completion[0]["content"]
    if is_missing(completion):
        has = "is empty" if "completion" in row else f"is missing: the columns are {', '.join(row) or '(none)'}"
        raise UserError(f"{place}: the completion {has}. Add it, or remove the row.")
    if not isinstance(completion, str):
        raise UserError(f"{place}: the completion is a {type(completion).__name__}, expected text.")
    return valid_text(completion, place, "completion")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _answer(row: Row, place: str) -> str:
    answer = next((answer for answer in _answers(row, place) if not is_missing(answer)), None)
    if answer is None:
        raise UserError(_lacks(row, place, "answer", ANSWER_COLUMNS))
    if isinstance(answer, Real) and not isinstance(answer, bool) and answer == answer // 1:
        return str(math.floor(answer))
    if isinstance(answer, str | Real | Decimal):
        return str(answer)
    raise UserError(
        f"{place}: the answer is a {type(answer).__name__}, expected text or a number. Every column reaches the "
        "reward functions: keep the structure in a column of another name, and put a text in answer."
    )


def _answers(row: Row, place: str) -> Iterator[object]:
    """The values of ANSWER_COLUMNS, in order. Of a worked solution that ends in "#### 72", as in GSM8K, the 72."""
    for column in ANSWER_COLUMNS:
        outer, _, inner = column.partition(".")
        value = row.get(outer)
        if inner and isinstance(value, str):  # verl's nested column may be a JSON text
            value = parse_json(value.encode(), f"{place}, {outer}")
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        yield value.rpartition("####")[2].strip() if isinstance(value, str) else value


def is_missing(value: object) -> bool:
    """Whether a value is null, NaN, an empty list or a blank text."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list) and not value)


def _lacks(row: Row, place: str, what: str, understood: Sequence[str]) -> str:
    advice = f"Put the {what} in one of {', '.join(understood)}, or remove the row."
    return f"{place} has no {what}: it has the columns {', '.join(row) or '(none)'}. {advice}"


def question_of(prompt: Prompt) -> str:
    """The user's question in a prompt, with normalised white space."""
    if not isinstance(prompt, str):
        prompt = "\n".join(message["content"] for message in prompt if message["role"] == "user")
    return " ".join(prompt.split())


class _Twice(ValueError):
    """Raised if an object has the same key twice."""


def parse_json(content: bytes, place: str) -> Any:
    """Parse a JSON text; a UserError names the place, the column and, if there are several lines, the line."""
    try:
        value = json.loads(content, object_pairs_hook=_unique)
        # A text with few brackets cannot nest deeply, even if some of them are inside strings.
        if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        return value
    except (RecursionError, _Twice):
        text = content.decode(json.detect_encoding(content), "replace")
        position, fault = _first_fault(text)
        raise UserError(f"{place}, {_place(text[:position], text)}: {fault}. Fix or delete it.") from None
    except json.JSONDecodeError as error:
        where, fault = _place(error.doc[: error.pos], error.doc), error.msg
    except UnicodeDecodeError as error:
        text = content.decode(error.encoding, "replace")
        before = content[: error.start].decode(error.encoding, "replace")
        where, fault = _place(before, text), f"not text in {error.encoding} ({error.reason})"
    except ValueError:  # Python reads integers of up to 4,300 digits
        where, fault = "", "a number has too many digits"
    raise UserError(f"{place} is not valid JSON: {f'{where}: ' if where else ''}{fault}. Fix or delete it.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _first_fault(text: str) -> tuple[int, str]:
    """The first position where a key is repeated or the nesting is too deep, and a message saying which."""
    keys: list[set[str]] = []
    for token in TOKEN.finditer(text):
        if token[0] in "[{":
            keys.append(set())
            if len(keys) > MAX_DEPTH:
                return token.start(), f"nested deeper than {MAX_DEPTH} levels"
        elif token[0] in "]}":
            keys.pop()
        elif token[2]:
            key = json.loads(token[1])
            if key in keys[-1]:
                return token.start(), f"the key {reprlib.repr(key)} is there twice"
            keys[-1].add(key)
    raise AssertionError("a text without a fault was refused")


def _place(before: str, text: str) -> str:
    line, column = line_and_column(before)
    return f"line {line}, column {column}" if "\n" in text.rstrip() else f"column {column}"
