"""What all settings have in common: unknown keys are errors, every number has a limit, each mistake is one line."""

import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hacrl.config.trl_keys import trl_advice
from hacrl.errors import UserError, nearest

MOST = 1_000_000_000
Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
"""How many prompts, rows or problems are handled together."""
Length = Annotated[int, Field(ge=1, le=2**20)]
"""Length of a text in tokens."""
Few = Annotated[int, Field(ge=1, le=1024)]
"""A number of processes, threads or passes, each of which is costly."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A time limit; at most a year."""
Weight = Annotated[float, Field(gt=0, le=1e6)]
FORMS: dict[str, str] = {}
"""What each pattern for texts asks for, in words."""


def written(pattern: str, words: str) -> Any:
    """Limits a text to a pattern; error messages say what it asks for in these words."""
    FORMS[pattern] = words
    return Field(pattern=pattern)


Label = Annotated[
    str, written(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "letters, digits, '.', '_' and '-', first a letter or a digit")
]
"""A name that can be part of a path and of a metric."""
SAID = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    "finite_number": "expected a finite number",
    "string_type": "expected a text",
    "list_type": "expected a list",
    "dict_type": "expected a section of keys and values",
    "literal_error": "expected {expected}",
    "greater_than_equal": "must be at least {ge:,.12g}",
    "greater_than": "must be greater than {gt:,.12g}",
    "less_than_equal": "must be at most {le:,.12g}",
    "less_than": "must be less than {lt:,.12g}",
    "too_short": "needs {min_length} or more entries",
    "too_long": "may have at most {max_length} entries",
    "string_too_short": "needs {min_length} or more characters",
}
"""How pydantic's errors are said here."""

MAX_MISTAKES = 20
"""The most mistakes that one error message lists."""


def plain_data(value: Any, place: str = "") -> Any:
    """Return the value; ValueError unless JSON can hold it, with numbers of a usual size. It is written to files."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place}{key}: a key must be a text; write it in quotes")
            plain_data(item, f"{place}{key}.")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            plain_data(item, f"{place}{position}.")
    elif isinstance(value, int) and abs(value) > 2**63 - 1:
        raise ValueError(f"{place[:-1]} must lie between -2**63 and 2**63 - 1")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place[:-1]} must be finite, but is {value}")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{place[:-1]} is a {type(value).__name__}; write it in quotes if a text is meant")
    return value


Options = Annotated[dict[str, Any], AfterValidator(plain_data)]
"""Options that are passed to another library."""


class Strict(BaseModel):
    """A section of settings. Unknown keys are errors, and so are true and false where a number belongs."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, value in data.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field and is_number(field.annotation):
                    raise ValueError(f"{name} is a number, not {str(value).lower()}")
        return data


def parts(annotation: Any) -> Iterator[Any]:
    """A type and the types it is made of, such as those inside a list or a union."""
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def is_number(annotation: Any) -> bool:
    """Whether a type is int or float, also if it is optional or has limits."""
    return any(part in (int, float) for part in parts(annotation))


def section_at(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """The section that a place in a tree of settings leads to, for example ("agents", 0, "lora")."""
    for name in place:
        if name in model.model_fields:
            kinds = parts(model.model_fields[str(name)].annotation)
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Strict)), model)
    return model


def elsewhere(model: type[BaseModel], key: str) -> str | None:
    """End of a message about a key at the top of a config that belongs into a section; None for other keys."""
    sections = {name: section_at(model, [name]) for name in model.model_fields}
    places = [name for name, section in sections.items() if section is not model and key in section.model_fields]
    return f"; it belongs to the section {places[0]}: {places[0]}.{key}" if places else None


Tree = TypeVar("Tree", bound=BaseModel)


def checked(model: type[Tree], data: dict[str, Any], where: str = "") -> Tree:
    """Build the typed tree; UserError with a line for each mistake. `where` names the data for the user."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError((f"{where}: " if where else "") + "\n".join(explain(error, model))) from None


def explain(error: ValidationError, model: type[BaseModel] = Strict) -> list[str]:
    """One line for each mistake: the place, the value and what to do. `model` is the tree that has the mistakes."""
    mistakes = error.errors()
    for_all_agents = {mistake["loc"] for mistake in mistakes}
    # A mistake in a setting that agents share is reported once.
    mistakes = [each for each in mistakes if each["loc"][:1] != ("agents",) or each["loc"][2:] not in for_all_agents]
    lines = []
    for mistake in mistakes[:MAX_MISTAKES]:
        place, message = ".".join(map(str, mistake["loc"])), explanation(mistake, model)
        lines.append(f"{place}: {message}" if place else message)
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more mistakes")
    return lines


def explanation(mistake: Any, model: type[BaseModel]) -> str:
    """What is wrong with one value, as pydantic found it."""
    kind, value = mistake["type"], reprlib.repr(mistake["input"])
    message: str = mistake["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind == "extra_forbidden":
        *above, key = mistake["loc"]
        if len(above) == 2 and above[0] == "agents" and key in model.model_fields:
            return f"{key} is a setting of the whole run, not of one agent"
        advice = trl_advice(str(key)) or (None if above else elsewhere(model, str(key)))
        advice = advice or nearest(str(key), section_at(model, above).model_fields)
        return f"unknown key {str(key)!r} (set to {value}){advice}"
    if kind == "missing":
        return "missing"
    if kind == "value_error":
        return message
    if kind == "model_type":
        message = f"expected a section with keys ({', '.join(section_at(model, mistake['loc']).model_fields)})"
    elif kind == "string_pattern_mismatch" and (form := FORMS.get(mistake["ctx"]["pattern"])):
        message = f"expected {form}"
    elif kind in SAID:
        message = SAID[kind].format(**mistake.get("ctx", {}))
    return f"{message} (got {value})"
