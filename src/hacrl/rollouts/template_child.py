"""Renders a chat template to find out whether it finishes. Runs in a child process only.

It imports only jinja2, so that the child starts fast, and renders as transformers does.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tag `{% generation %}`, which marks an assistant's words and changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def lengths(completions: Sequence[dict[str, Any]], template: str) -> list[float]:
    """The number of characters that the template renders for each set of variables; 0 if it fails.

    The variables are passed as completions, because a child process returns one number for each completion.
    """
    return [float(_length(template, variables)) for variables in completions]


def _length(template: str, variables: dict[str, Any]) -> int:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, default=str)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return len(environment.from_string(template).render(**variables))
    except MemoryError:
        raise
    except Exception:  # any error is reported where the template is rendered for use
        return 0


def _raise(message: str) -> None:
    raise TemplateError(message)
