"""The section `algorithm` of a run: its `name` chooses the algorithm, the rest are that algorithm's options."""

import dataclasses
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from hacrl.algorithms import ALGORITHMS, Algorithm, RobustHACPO
from hacrl.config.own_algorithm import is_own, own_algorithm, resolved
from hacrl.config.strict import explain, is_number
from hacrl.config.trl_keys import trl_advice
from hacrl.errors import nearest


def parse_algorithm(value: Any) -> Algorithm:
    """Make the algorithm that a section describes; without a `name` it is the default one."""
    if isinstance(value, type) and issubclass(value, Algorithm):
        value = value()
    if isinstance(value, Algorithm):
        return named(value)
    if not isinstance(value, dict):
        raise ValueError(f"expected a section with a name (one of {', '.join(ALGORITHMS)}), not {value!r}")
    if isinstance(value.get("scale_rewards"), bool):  # TRL also takes true and false
        value = {**value, "scale_rewards": "group" if value["scale_rewards"] else "none"}
    name = value.get("name", RobustHACPO.name)
    kind = algorithm_class(name)
    check_options(value, kind, name)
    for section, default in vars(kind()).items():
        if dataclasses.is_dataclass(default) and isinstance(value.get(section), dict):
            check_options(value[section], type(default), section)
            # Options that are not set keep the algorithm's default, which may differ from the section's default.
            value = {**value, section: {**vars(default), **value[section]}}
    options = {option: given for option, given in value.items() if option != "name"}
    try:
        algorithm = TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        raise ValueError("; ".join(explain(error))) from None
    except PydanticUserError as error:
        allowed, why = "options are numbers, texts, lists and Literal", error.message.partition("\n")[0]
        raise ValueError(f"name: {name} has an option of another type; {allowed}: {why}") from None
    return algorithm if name in ALGORITHMS else dataclasses.replace(algorithm, name=resolved(name))


def named(algorithm: Algorithm) -> Algorithm:
    """The algorithm with a name that leads to its class, which a class of one's own may have inherited or left out."""
    kind = type(algorithm)
    if is_own(algorithm.name) or ALGORITHMS.get(algorithm.name) is kind:
        return algorithm
    return dataclasses.replace(algorithm, name=f"{kind.__module__}:{kind.__qualname__}")


def algorithm_class(name: Any) -> type[Algorithm]:
    """The class that a name in a config stands for."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str) or not is_own(name):
        hint = f"; write {name}:CLASS" if str(name).endswith(".py") else nearest(str(name), ALGORITHMS)
        raise ValueError(f"name: unknown algorithm {name!r}{hint}")
    try:
        return own_algorithm(name)
    except ValueError as error:
        raise ValueError(f"name: {error}") from error


def check_options(data: dict[str, Any], options: type, section: str) -> None:
    """Raise ValueError if a section has an unknown option, or true or false where a number belongs."""
    types = get_type_hints(options, include_extras=True)
    types = {field.name: types[field.name] for field in dataclasses.fields(options)}
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
