"""Who is evaluated: a model, or the agents of a run at one of its checkpoints."""

from pathlib import Path

from hacrl.agents.loading import resolve_model
from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import UserError
from hacrl.training import checkpoint
from hacrl.training.run_dir import RunDir


def is_run(target: str) -> bool:
    """Whether the target of an evaluation is the folder of a run; otherwise it is a model."""
    return (Path(target) / "config.yaml").is_file()


def config_of(target: str, config_source: str) -> RunConfig:
    """The config of a run; for a model, the given one."""
    return RunDir.open(target).config() if is_run(target) else RunConfig.load(config_source)


def evaluated_agents(target: str, config_source: str, step: int | None) -> tuple[RunConfig, list[AgentConfig]]:
    """The agents of a run as they were at a checkpoint, or a model with the settings of the config's first agent."""
    if not is_run(target):
        check_model(target, step)
        config = config_of(target, config_source)
        return config, [config.agents[0].model_copy(update={"id": "model", "model": target})]
    config, folder = config_of(target, config_source), checkpoint.find_checkpoint(Path(target), step) / "agents"
    return config, [agent.model_copy(update={"model": str(folder / agent.id)}) for agent in config.agents]


def check_model(target: str, step: int | None) -> None:
    """UserError if what is not a run is no model either: it says what it is, and what to give instead."""
    path = Path(target).expanduser()
    if (path / "warmup.yaml").is_file():
        newest = [path / "checkpoint-STEP", *checkpoint.complete_checkpoints(path)][-1]
        raise UserError(f"{target} is a warm-up. Give one of its models: {newest}/agents/ID.")
    if (path / "study.yaml").is_file():
        started = [path / "runs/TEAM/ALGORITHM/seed-N", *(file.parent for file in path.glob("runs/*/*/*/config.yaml"))]
        raise UserError(f"{target} is a study. Give one of its runs, for example {started[-1]}.")
    if (path / checkpoint.MARKER).is_file():
        if (path.parent / "config.yaml").is_file() and checkpoint.NAME.fullmatch(path.name):
            how = f"`hacrl eval {path.parent} --checkpoint {checkpoint.step_of(path)}`"
            raise UserError(f"{target} is a checkpoint of a run. Evaluate it with {how}.")
        raise UserError(f"{target} is a checkpoint. Give one of its models: {target}/agents/ID.")
    if path.is_file():
        raise UserError(f"{target} is a file. Give the folder of a run, or a model: zoo:NAME, a folder or a hub id.")
    if step is not None:
        raise UserError(f"--checkpoint is for a run, and {target} is not one: it has no config.yaml.")
    if not path.exists() and (target.startswith((".", "/", "~", "runs/")) or target.count("/") > 1):
        raise UserError(f"There is no folder {target}. Give the folder of a run or of a model.")
    resolve_model(target)
    checkpoint.refuse_damaged_model("model", target)
