"""What is seen of runs on an engine: dashboards one after another, or one board for all."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import final

from forgetless.cli.board import Board
from forgetless.cli.progress import opened_loggers, watched
from forgetless.launch.engines import Engine, Event, Watch
from forgetless.report.loggers import several
from forgetless.training.settings import Observer


@contextmanager
def view_of(engine: Engine, log: str) -> Iterator[Watch]:
    """What shows an engine's jobs.

    Arguments:
        engine: the engine.
        log: names of loggers, comma-separated, which are told of every run.
    """
    with ExitStack() as stack:
        yield _Dashboards(log, stack) if engine.workers == 1 else _Together(log, stack)


@final
class _Dashboards:
    """The dashboard and the loggers of one run after another, open as long as it goes on."""

    def __init__(self, log: str, stack: ExitStack) -> None:
        self._log = log
        self._stack = stack
        self._observer: Observer | None = None

    def __call__(self, event: Event) -> None:
        order = event.job.order
        if event.kind == "begun":
            shown = watched(event.job.name, self._log, order.folder, order.config.as_dict())
            self._observer = self._stack.enter_context(shown)
        elif event.kind in ("finished", "failed"):
            self._stack.close()
        elif event.progress is not None and self._observer is not None:
            self._observer(event.progress)


@final
class _Together:
    """One board for all jobs, and the loggers of each run."""

    def __init__(self, log: str, stack: ExitStack) -> None:
        self._log = log
        self._stack = stack
        self._board = stack.enter_context(Board())
        self._loggers: dict[str, Observer] = {}

    def __call__(self, event: Event) -> None:
        self._board(event)
        order = event.job.order
        if event.kind == "begun" and order.name not in self._loggers:
            config = order.config.as_dict()
            loggers = opened_loggers(self._stack, order.name, self._log, order.folder, config)
            self._loggers[order.name] = several(*loggers)
        if event.progress is not None:
            self._loggers[order.name](event.progress)
