"""Signs of life: shows what this process is doing while it takes long.

Whatever may take longer than a few seconds says so with `doing`, wherever it is. A `Display` shows it: in a terminal
below everything that is printed, elsewhere as a line whenever nothing has been printed for a while.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock, RLock, Thread
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hacrl.terminal import OutputClosed, say

REFRESH_SECONDS = 0.25
"""Seconds between two looks at what goes on."""
SHOW_AFTER = 1.0
"""Seconds after which an activity is shown in a terminal."""
LOG_SECONDS = 25.0
"""The most seconds without a line where there is no terminal."""


@dataclass(eq=False)
class Activity:
    """Something that takes long, and how much of it is done."""

    what: str
    total: int | None = None
    done: int = 0
    note: str = ""
    """A remark, for example how fast it is."""
    before: int = 0
    """How much was done before it began."""
    began: float = field(default_factory=time.monotonic)

    def begin(self, what: str, done: int = 0) -> None:
        """Begin something else, `done` of which is done already."""
        self.what, self.done, self.before, self.began = what, done, done, time.monotonic()

    def __str__(self) -> str:
        seconds, done, total = time.monotonic() - self.began, self.done, self.total
        parts = [self.what]
        if total is not None:
            parts.append(f"{done:,} of {total:,}")
        elif done:
            parts.append(f"{done:,} done")
        parts += [self.note] * bool(self.note) + [clock(seconds)]
        if total is not None and self.before < done < total:
            parts.append(f"left {clock(seconds * (total - done) / (done - self.before))}")
        return ", ".join(parts)


_activities: list[Activity] = []
"""What goes on in this process, outermost first."""
_displays: list["Display"] = []
"""All displays; the last one shows what goes on."""
_counting = Lock()


def clock(seconds: float) -> str:
    """Seconds as 0:07, 1:05 or 2:01:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def doing(what: str, total: int | None = None) -> Iterator[Activity]:
    """Say what goes on while this lasts; `total` is how many things there are to do."""
    for display in _displays:
        display.check_output()
    activity = Activity(what, total)
    _activities.append(activity)
    try:
        yield activity
    finally:
        _activities.remove(activity)


def advance(count: int) -> None:
    """Count things that are done, in the innermost activity."""
    with _counting:
        if _activities:
            _activities[-1].done += count


def going_on() -> str:
    """What goes on, from the outermost activity to the innermost; empty if nothing does."""
    return " › ".join(str(activity) for activity in list(_activities))


class Drawing(Protocol):
    """Something that is drawn again at every look, such as rich's `Live`."""

    transient: bool
    """Whether it is gone after `stop`."""

    def start(self) -> None: ...
    def refresh(self) -> None: ...
    def stop(self) -> None: ...


class Display:
    """Shows on a console what goes on. A display inside another one takes its place."""

    def __init__(
        self,
        console: Console,
        lines: Callable[[int], list[Text]] | None = None,
        line: Callable[[], str] = going_on,
        tick: Callable[[], None] = lambda: None,
        table: Callable[[], Drawing] | None = None,
    ) -> None:
        """`lines` are shown in a terminal of that width, `line` elsewhere; `tick` is called at every look.

        `table` makes what draws the lines where there is no terminal, as in a notebook.
        """
        self.console, self._lines, self._line, self._tick = console, lines or _lines, line, tick
        self._stays = lines is not None
        self._table = table or self._rich_table if table or console.is_interactive else None
        self._live: Drawing | None = None
        self._shown: list[Text] = []
        self._lock, self._ended, self._closed = RLock(), Event(), False
        self._said = time.monotonic()
        self._thread = Thread(target=self._follow, name="display", daemon=True)

    def __enter__(self) -> Self:
        _displays.append(self)
        for other in _displays[:-1]:
            other.hide()
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self.hide(stays=self._stays and error is not None)  # what was reached before an error stays
        finally:
            _displays.remove(self)
        if error is None:
            self.check_output()

    @property
    def draws(self) -> bool:
        """Whether it shows lines that change; otherwise it prints one after the other."""
        return self._table is not None

    def say(self, text: str) -> None:
        """Print a line; the next sign of life waits `LOG_SECONDS` from then."""
        self.check_output()
        self._said = time.monotonic()
        say(self.console, text)

    def hide(self, stays: bool = False) -> None:
        with self._lock:
            if self._live:
                if stays:
                    self._shown = self._lines(self.console.width)
                self._live.transient = not stays
                self._live.stop()
                self._live, self._shown = None, []

    def check_output(self) -> None:
        """Raise OutputClosed if nobody reads the output any more."""
        if self._closed:
            raise OutputClosed

    def _follow(self) -> None:
        try:
            while not self._ended.is_set():
                self._look()
                self._ended.wait(REFRESH_SECONDS)
        except OutputClosed:  # the command learns of it when it begins or says something
            self._closed = True

    def _look(self) -> None:
        self._tick()
        with self._lock:
            if _displays[-1] is not self:
                return
            if self._table:
                self._draw(self._table, self._lines(self.console.width))
            elif time.monotonic() - self._said >= LOG_SECONDS and (line := self._line()):
                self.say(line)

    def _draw(self, table: Callable[[], Drawing], lines: list[Text]) -> None:
        if not lines:
            self.hide()
        elif lines != self._shown:
            self._shown = lines
            if self._live is None:
                self._live = table()
                self._live.start()
            self._live.refresh()

    def _rich_table(self) -> Drawing:
        return Live(console=self.console, auto_refresh=False, get_renderable=self._renderable)

    def _renderable(self) -> Text:
        return Text("\n", no_wrap=True, overflow="ellipsis").join(self._shown)


def _lines(width: int) -> list[Text]:
    """What a terminal shows: what goes on, once it has taken `SHOW_AFTER` seconds."""
    lasts = any(time.monotonic() - activity.began >= SHOW_AFTER for activity in list(_activities))
    return [Text(going_on(), style="dim")] if lasts else []
