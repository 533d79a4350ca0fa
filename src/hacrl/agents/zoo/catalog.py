"""What is known of the bundled models: each folder's `warmup.json` says how it was made."""

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
    validation_accuracy: float


def catalog() -> list[ZooModel]:
    models = []
    for name in zoo_names():
        data = json.loads((ZOO / name / "warmup.json").read_text(encoding="utf-8"))
        models.append(ZooModel(**{field: data[field] for field in ZooModel.__dataclass_fields__}))
    return models
