"""`hacrl config`."""

import json
from typing import Annotated

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from hacrl.cli.common import console, say
from hacrl.errors import UserError


def config(
    words: Annotated[list[str] | None, Argument(metavar="[WORD]...", help="Only keys that contain these.")] = None,
    schema: Annotated[bool, Option("--schema", help="Write the JSON schema of all YAML files, for editors.")] = False,
    markdown: Annotated[bool, Option("--markdown", help="Write the tables of docs/config.md.")] = False,
) -> None:
    """List the keys of all YAML files, with defaults and descriptions."""
    from hacrl.config.reference import markdown as page
    from hacrl.config.reference import tables
    from hacrl.config.schema import json_schema

    if schema:
        say(json.dumps(json_schema(), indent=2))
    elif markdown:
        say(page().rstrip())
    else:
        wanted = [word.lower() for word in words or []]
        found = Table("key", "default", "what it does", box=None, pad_edge=False)
        for table in tables():
            keys = [key for key in table.keys if all(word in key.name.lower() for word in wanted)]
            if keys:
                found.add_row(Text(table.title.strip("# ").replace("**", ""), "bold"), end_section=True)
            for key in keys:
                found.add_row(*map(Text, (key.name, key.default, key.text)))
        if not found.rows:
            raise UserError(f"No key contains {' and '.join(wanted)}. `hacrl config` lists all keys.")
        console.print(found)
