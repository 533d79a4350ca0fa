"""What every section of a config is: unknown keys and numbers that are none are errors."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


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
