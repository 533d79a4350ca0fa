"""The JSON schema of the YAML files of runs, warm-ups and studies, with which editors check and explain them."""

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter

from hacrl.algorithms import ALGORITHMS, CapabilityOptions, Imitation, RobustHACPO
from hacrl.config.run import RunConfig
from hacrl.config.study import StudyConfig
from hacrl.config.warmup import WarmupConfig

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
"""Editors know this version of JSON schema; some do not know later ones."""
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}


def attribute_docs(kind: type) -> dict[str, str]:
    """The descriptions below the attributes of a dataclass and of those it inherits from, each as one line."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each is object:
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for attribute, below in pairwise(definition.body):
            if isinstance(attribute, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(attribute.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def json_schema() -> Schema:
    """One schema for all files: the keys of a file show whether it is a run, a warm-up or a study."""
    kinds: list[Any] = [RunConfig, WarmupConfig, StudyConfig, *ALGORITHMS.values()]
    _, found = TypeAdapter.json_schemas([(kind, "validation", TypeAdapter(kind)) for kind in kinds])
    definitions: Schema = found["$defs"]
    for kind in (*ALGORITHMS.values(), CapabilityOptions, Imitation):
        describe(definitions[kind.__name__], kind)
    definitions["Algorithm"] = algorithm_section()
    definitions["RunConfig"]["properties"]["algorithm"] = {"$ref": "#/$defs/Algorithm"}
    allow_short_forms(definitions)
    in_an_agent = {"properties": {"agents": {"contains": {"required": ["data"]}}}, "required": ["agents"]}
    warmup = {"anyOf": [{"required": ["data"]}, in_an_agent]}
    run_or_warmup = {"if": warmup, "then": {"$ref": "#/$defs/WarmupConfig"}, "else": {"$ref": "#/$defs/RunConfig"}}
    study = {"if": {"required": ["algorithms"]}, "then": {"$ref": "#/$defs/StudyConfig"}, "else": run_or_warmup}
    return {"$schema": DIALECT, "title": "A run, a warm-up or a study of hacrl", **study, "$defs": definitions}


def describe(definition: Schema, kind: type) -> None:
    """Add what pydantic leaves out of a dataclass: the descriptions of its options, and that there are no others."""
    docs = attribute_docs(kind)
    definition["description"] = str(inspect.getdoc(inspect.getmodule(kind))).partition("\n")[0]
    definition["additionalProperties"] = False
    for option, schema in definition["properties"].items():
        schema["description"] = docs[option]
        if option == "scale_rewards":
            schema["enum"] = [*schema["enum"], True, False]
            del schema["type"]


def algorithm_section() -> Schema:
    """The section `algorithm`, whose options depend on its name. A class of one's own may have any."""
    section: Schema = RunConfig.model_json_schema()["properties"]["algorithm"]
    own = {"type": "string", "pattern": r".+:.+", "description": "file.py:Class or module:Class"}
    name = {"anyOf": [{"enum": list(ALGORITHMS)}, own], "default": RobustHACPO.name}
    unnamed = {"if": {"not": {"required": ["name"]}}, "then": {"$ref": f"#/$defs/{RobustHACPO.__name__}"}}
    options = [
        {
            "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {"$ref": f"#/$defs/{kind.__name__}"},
        }
        for name, kind in ALGORITHMS.items()
    ]
    about = {"description": section["description"]}
    return {"type": "object", **about, "properties": {"name": name}, "allOf": [unnamed, *options]}


def allow_short_forms(definitions: Schema) -> None:
    """Allow what validators turn into the types of the fields: a name for a section, one item for a list of them."""

    def allow(section: str, key: str, *forms: Schema) -> None:
        schema = definitions[section]["properties"][key]
        apart = {name: schema.pop(name) for name in ("description", "default") if name in schema}
        definitions[section]["properties"][key] = {**apart, "anyOf": [schema, *forms]}

    def items(section: str) -> Schema:
        return {"type": "array", "items": {"anyOf": [TEXT, {"$ref": f"#/$defs/{section}"}]}}

    for section in ("TaskConfig", "PartConfig"):
        allow(section, "reward", TEXT, {"$ref": "#/$defs/RewardConfig"}, items("RewardConfig"), {"type": "null"})
    for section in ("WarmupConfig", "WarmupAgentConfig"):
        allow(section, "data", TEXT, {"$ref": "#/$defs/DataConfig"}, items("DataConfig"))
    allow("RunConfig", "report_to", TEXT)
    allow("StudyConfig", "seeds", {"type": "integer", "minimum": 1})
    allow("StudyConfig", "base", TEXT)
    settings = {"type": "object", "additionalProperties": {"type": ["object", "null"]}}
    for key in ("algorithms", "options"):
        allow("StudyConfig", key, TEXTS, settings)
    teams = {"type": "object", "additionalProperties": {"type": ["object", "string", "null"]}}
    allow("StudyConfig", "teams", TEXTS, teams)
