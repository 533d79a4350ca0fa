"""A table in a notebook, updated in place. Rich's own would need ipywidgets."""

import html
from collections.abc import Callable
from typing import Any

from rich.text import Text

from hacrl.errors import harmless

STYLE = "line-height: normal; overflow-x: auto; white-space: pre"


class NotebookTable:
    """Shows lines in the output of a cell. It has the methods of rich's `Live` that we use."""

    def __init__(self, lines: Callable[[], list[Text]]) -> None:
        self._lines = lines
        self._handle: Any = None
        self.transient = True
        """As in `Live`, but without effect: the table stays, because nothing is printed below it."""

    def start(self, refresh: bool = True) -> None:
        from IPython.display import display

        if self._handle is None:  # once in a cell
            self._handle = display(_both(self._lines()), raw=True, display_id=True)

    def refresh(self) -> None:
        self._handle.update(_both(self._lines()), raw=True)

    def stop(self) -> None:
        if self._handle is not None:
            self.refresh()


def _both(lines: list[Text]) -> dict[str, str]:
    """The lines as plain text and as HTML."""
    text = "\n".join(harmless(line.plain) for line in lines)
    return {"text/plain": text, "text/html": f'<pre style="{STYLE}">{html.escape(text)}</pre>'}
