"""The settings of a run as one typed tree; tasks, warm-ups and studies beside it."""

from hacrl.config.agent import AgentConfig, LoraConfig, ModelSettings, ResourcesConfig, Settings
from hacrl.config.algorithm import parse_algorithm
from hacrl.config.run import RunConfig
from hacrl.config.strict import checked

__all__ = [
    "AgentConfig",
    "LoraConfig",
    "ModelSettings",
    "ResourcesConfig",
    "RunConfig",
    "Settings",
    "checked",
    "parse_algorithm",
]
