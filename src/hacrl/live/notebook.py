"""The live table in a notebook, updated in place. Rich's own would need ipywidgets."""

import html
from typing import TYPE_CHECKING, Any

from hacrl.errors import harmless

if TYPE_CHECKING:
    from hacrl.live.progress import View

STYLE = "line-height: normal; overflow-x: auto; white-space: pre"


class NotebookTable:
    """Shows a view in the output of a cell, with the methods of rich's `Live` that `Progress` uses."""

    transient = True
    """`Progress` makes this False if the run fails: then the table also keeps what the run was doing."""

    def __init__(self, view: "View", width: int) -> None:
        self._view, self._width = view, width
        self._handle: Any = None

    def start(self, refresh: bool = True) -> None:
        from IPython.display import display

        self._handle = display(self._shown(), raw=True, display_id=True)

    def refresh(self) -> None:
        self._handle.update(self._shown(), raw=True)

    def stop(self) -> None:
        if self.transient:
            self._view.phase = ""
        self.refresh()

    def _shown(self) -> dict[str, str]:
        text = "\n".join(harmless(line.plain) for line in self._view.lines(self._width))
        return {"text/plain": text, "text/html": f'<pre style="{STYLE}">{html.escape(text)}</pre>'}
