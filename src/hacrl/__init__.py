"""Heterogeneous agents learn together: collaborative reinforcement learning with verifiable rewards.

    from hacrl import RunConfig, train
    result = train(RunConfig.load("run.yaml"))

`hacrl.algorithms` needs torch alone, so the trainer is imported only when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from hacrl.errors import TrainingDiverged, UserError

if TYPE_CHECKING:
    from hacrl.config import RunConfig
    from hacrl.run import RunResult, train

__version__ = "0.2.0"
__all__ = ["RunConfig", "RunResult", "TrainingDiverged", "UserError", "__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "RunConfig":
        from hacrl.config import RunConfig

        return RunConfig
    if name in ("RunResult", "train"):
        from hacrl import run

        return getattr(run, name)
    raise AttributeError(f"module 'hacrl' has no attribute {name!r}")
