"""`hacrl init`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hacrl.cli.common import say
from hacrl.errors import UserError
from hacrl.signs import doing


def init(
    models: Annotated[
        list[str] | None, Argument(metavar="[MODEL]...", help="Hub ids, local folders or zoo:NAME.")
    ] = None,
    data: Annotated[
        str | None, Option(help="A file, a folder, a hub id, or a task: arithmetic or gym:GENERATOR.")
    ] = None,
    reward: Annotated[
        str | None, Option(help="exact, math, module:function or file.py:function; default: math.")
    ] = None,
    from_trl: Annotated[Path | None, Option(help="A YAML of `trl grpo --config`, to translate.")] = None,
    output: Annotated[Path, Option(help="The file to write; it must not exist.")] = Path("my.yaml"),
) -> None:
    """Write a config to start from, for your models and data or from a config of TRL."""
    from hacrl.config import RunConfig
    from hacrl.config.starting import COMMENTS, commented_yaml, starting_settings, write_new

    head = [f"Check it: hacrl train {output} --dry-run. All settings: docs/config.md."]
    if from_trl is not None:
        text = translated(from_trl, models or [], data, reward, head)
    elif models and data:
        settings = starting_settings(models, data, reward, f"runs/{output.stem}", rows_of(models, data, reward))
        RunConfig.from_dict(settings, "These arguments")
        text = commented_yaml(settings, COMMENTS, head)
    else:
        raise UserError("Name the models and the data: hacrl init MODEL MODEL --data FILE; or give --from-trl FILE.")
    write_new(output, text)
    say(f"Written: {output}. Next: hacrl train {output} --dry-run")


def rows_of(models: list[str], data: str, reward: str | None) -> int | None:
    """How many rows the data have, if that is known; UserError if there are no such data or models."""
    with doing("looking at the models and the data"):
        from hacrl.agents.loading import resolve_model
        from hacrl.config.starting import is_procedural
        from hacrl.tasks.dataset import count_rows

        for model in models:
            resolve_model(model)
        return None if is_procedural(data, reward) else count_rows(data)


def translated(source: Path, models: list[str], data: str | None, reward: str | None, head: list[str]) -> str:
    """The YAML text for a file of TRL; prints what became of each key."""
    from hacrl.config import RunConfig
    from hacrl.config.from_trl import translate
    from hacrl.config.settings import read_source
    from hacrl.config.starting import commented_yaml
    from hacrl.tasks.dataset import count_rows

    if not source.is_file():
        raise UserError(f"There is no file {source}. --from-trl takes the YAML of `trl grpo --config`.")
    given, where = read_source(source)
    if "agents" in given:
        raise UserError(f"{source} is a config of hacrl already: use `hacrl train {source}`.")
    train = data or given.get("dataset_name")
    rows = count_rows(train) if isinstance(train, str) and Path(train).expanduser().is_file() else None
    found = translate(given, models, data, reward, rows)
    RunConfig.from_dict(found.settings, f"{where}, translated")
    lines = [f"{key} -> {ours}" for key, ours in found.taken.items()]
    notes = [f"{key}: {why}" for key, why in found.left_out.items()]
    unknown = [f"{key}: TRL 1.16 does not know this key{hint}" for key, hint in found.unknown.items()]
    say("\n".join([*lines, *(f"not taken over: {note}" for note in [*notes, *unknown])]))
    tail = ["", "Not taken over:", *notes, *unknown] if notes or unknown else []
    return commented_yaml(found.settings, found.origin, [*head, f"Translated from {source.name}."], tail)
