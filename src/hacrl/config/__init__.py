"""The settings of a run as one typed tree; tasks, warm-ups and studies beside it."""

from hacrl.config.run import (
    AgentConfig,
    LoraConfig,
    ModelSettings,
    ResourcesConfig,
    RunConfig,
    Settings,
    check_command,
    checked,
    parse_algorithm,
    without_shared_settings,
)

__all__ = [
    "AgentConfig",
    "LoraConfig",
    "ModelSettings",
    "ResourcesConfig",
    "RunConfig",
    "Settings",
    "check_command",
    "checked",
    "parse_algorithm",
    "without_shared_settings",
]
