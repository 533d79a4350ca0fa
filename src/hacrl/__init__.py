"""Heterogeneous agents learn together: collaborative reinforcement learning with verifiable rewards.

    import hacrl
    run = hacrl.train(agents=["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"], train="train.jsonl", reward="math")
    run = hacrl.train(hacrl.RunConfig.load("run.yaml"))

`hacrl.algorithms` needs torch alone, so the trainer is imported only when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hacrl.errors import TrainingDiverged, UserError

if TYPE_CHECKING:
    from hacrl import algorithms as algorithms
    from hacrl.api import train
    from hacrl.config import RunConfig
    from hacrl.run import RunResult

__version__ = "0.2.0"
__all__ = ["RunConfig", "RunResult", "TrainingDiverged", "UserError", "__version__", "train"]

LATER = {"RunConfig": "hacrl.config", "RunResult": "hacrl.run", "train": "hacrl.api"}
"""Public names that are imported when they are asked for, and the module of each."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    if name == "algorithms":
        return importlib.import_module("hacrl.algorithms")
    raise AttributeError(f"module 'hacrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "algorithms"])
