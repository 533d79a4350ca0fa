"""What every section of a config is: unknown keys and numbers that are none are errors. Every number has a limit."""

import math
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MOST = 1_000_000_000
Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
"""How many prompts, rows or problems are handled together."""
Length = Annotated[int, Field(ge=1, le=2**20)]
"""Tokens of a text."""
Few = Annotated[int, Field(ge=1, le=1024)]
"""Processes, threads, passes and the like, each of which costs."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A time limit; at most a year."""
Weight = Annotated[float, Field(gt=0, le=1e6)]


def plain_data(value: Any, place: str = "") -> Any:
    """ValueError unless JSON can hold it, with numbers of a usual size: it is written to files and read again."""
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
"""Options that somebody else's code takes."""


class Strict(BaseModel):
    """Unknown keys are errors, and so are true/false where a number is meant."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, validate_default=True
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


def is_number(annotation: Any) -> bool:
    """Whether a type is int or float, optional ones and those with limits included."""
    return annotation in (int, float) or any(is_number(part) for part in get_args(annotation))
