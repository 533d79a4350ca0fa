"""The section `algorithm` of a run: its `name` chooses the algorithm, the rest are that algorithm's options."""

import dataclasses
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hacrl.algorithms import ALGORITHMS, Algorithm, RobustHACPO
from hacrl.config.strict import explain, is_number
from hacrl.config.trl_keys import trl_advice
from hacrl.errors import nearest


def parse_algorithm(value: Any) -> Algorithm:
    """Make the algorithm that a section describes; without a `name` it is the default one."""
    if isinstance(value, Algorithm):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a section with a name (one of {', '.join(ALGORITHMS)}), not {value!r}")
    if isinstance(value.get("scale_rewards"), bool):  # TRL also takes true and false
        value = {**value, "scale_rewards": "group" if value["scale_rewards"] else "none"}
    name = value.get("name", RobustHACPO.name)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"name: {name!r} is no algorithm{nearest(str(name), ALGORITHMS)}")
    check_options(value, ALGORITHMS[name], name)
    for section, default in vars(ALGORITHMS[name]()).items():
        if dataclasses.is_dataclass(default) and isinstance(value.get(section), dict):
            check_options(value[section], type(default), section)
            # Options that are not set keep the algorithm's default, which may differ from the section's default.
            value = {**value, section: {**vars(default), **value[section]}}
    try:
        return TypeAdapter(ALGORITHMS[name]).validate_python(value)
    except ValidationError as error:
        raise ValueError("; ".join(explain(error))) from None


def check_options(data: dict[str, Any], options: type, section: str) -> None:
    """Raise ValueError if a section has an unknown option, or true or false where a number belongs."""
    types = {field.name: field.type for field in dataclasses.fields(options)}
    for key, value in data.items():
        if key not in types:
            hint = trl_advice(str(key)) or nearest(str(key), types)
            owners = [name for name, kind in ALGORITHMS.items() if key in {f.name for f in dataclasses.fields(kind)}]
            if options in ALGORITHMS.values() and owners:
                names = " or ".join(owners)
                hint = f"; it is an option of {names}: add algorithm.name={names}, or choose from {', '.join(types)}"
            raise ValueError(f"{section} has no option {key!r} (set to {value!r}){hint}")
        if isinstance(value, bool) and is_number(types[key]):
            raise ValueError(f"{section}: {key} is a number, not {str(value).lower()}")
