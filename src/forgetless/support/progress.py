"""How far a long computation is, for whoever watches it: a bar on a terminal, or nobody."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, final

_PATIENCE = 2.0  # seconds without a bar

# From what is being done, how much of it is done, and how much there is.
Watcher = Callable[[str, float, float], None]
_WATCHER: ContextVar[Watcher | None] = ContextVar("who watches the progress", default=None)


def advance(what: str, done: float, total: float) -> None:
    """Tell whoever watches how much of something is done."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(what, done, total)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """What is done inside is told to the watcher."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


@contextmanager
def bar_on_terminal(what: str, *, patience: float = _PATIENCE) -> Iterator[None]:
    """Show what is done inside as a bar on standard error, if that is a terminal and it takes long.

    Arguments:
        what: all of it, in a few words.
        patience: seconds until there is a bar.
    """
    if sys.stderr is None or not sys.stderr.isatty() or _WATCHER.get() is not None:
        yield
        return
    from rich.console import Console  # a training loop without a bar need not wait for it

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with _Bar(what, console, patience) as bar, watched_by(bar):
        yield


@final
class _Bar:
    """A watcher that draws a bar, from some seconds after the start on, and removes it.

    Arguments:
        what: all that is done, in a few words.
        console: the terminal.
        patience: seconds until there is a bar.
    """

    def __init__(self, what: str, console: Any, patience: float) -> None:
        self._what, self._console, self._patience = what, console, patience
        self._started = time.monotonic()
        self._shown: Any = None
        self._rows: dict[str, Any] = {}
        self._closing = ExitStack()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def __call__(self, what: str, done: float, total: float) -> None:
        if time.monotonic() - self._started < self._patience:
            return
        if self._shown is None:
            self._show()
        if what not in self._rows:
            for row in self._rows.values():  # one stage after the other
                self._shown.update(row, visible=False)
            self._rows[what] = self._shown.add_task(f"{self._what}: {what}", total=total)
        self._shown.update(self._rows[what], completed=done, total=total, visible=True)

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn()
        bars = Progress(*columns, console=self._console, transient=True)
        self._shown = self._closing.enter_context(bars)
