"""The settings of runs, tasks, warm-ups and studies, each as one typed tree."""

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
