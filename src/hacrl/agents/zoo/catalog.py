"""The bundled models. `warmup.json` in each folder says how the model was made; zoo.yaml makes similar ones."""

import json
from dataclasses import dataclass

from hacrl.agents.loading import ZOO, zoo_names


@dataclass(frozen=True)
class ZooModel:
    name: str
    architecture: str
    tokenizer: str
    parameters: int
    sampled_accuracy: float
    """Share of validation problems solved by one answer sampled at temperature 1."""
    validation_accuracy: float
    """Share of validation problems solved by greedy answers."""


def catalog() -> list[ZooModel]:
    """All bundled models, sorted by name."""
    models = []
    for name in zoo_names():
        data = json.loads((ZOO / name / "warmup.json").read_text(encoding="utf-8"))
        models.append(ZooModel(**{field: data[field] for field in ZooModel.__dataclass_fields__}))
    return models
