"""What is seen of runs on an engine: dashboards one after another, or one board for all."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self, final

from forgetless.cli.board import Board
from forgetless.cli.progress import opened_loggers, watched
from forgetless.engines import Engine, Event
from forgetless.loggers import several
from forgetless.training import Observer


@final
class Dashboards:
    """The dashboard and the loggers of one run after another.

    Arguments:
        log: names of loggers, comma-separated.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._stack = ExitStack()
        self._observer: Observer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        """Show what happened to a job."""
        order = event.job.order
        if event.kind == "begun":
            shown = watched(event.job.name, self._log, order.folder, order.config.as_dict())
            self._observer = self._stack.enter_context(shown)
        elif event.kind in ("finished", "failed"):
            self._stack.close()
        elif event.progress is not None and self._observer is not None:
            self._observer(event.progress)


@final
class Together:
    """One board for all jobs, and the loggers of each run.

    Arguments:
        log: names of loggers, comma-separated.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._board = Board()
        self._stack = ExitStack()
        self._loggers: dict[str, Observer] = {}

    def __enter__(self) -> Self:
        self._stack.enter_context(self._board)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        """Show what happened to a job, and tell the loggers of its run."""
        self._board(event)
        order = event.job.order
        if event.kind == "begun" and order.name not in self._loggers:
            config = order.config.as_dict()
            loggers = opened_loggers(self._stack, order.name, self._log, order.folder, config)
            self._loggers[order.name] = several(*loggers)
        if event.progress is not None:
            self._loggers[order.name](event.progress)


def view_of(engine: Engine, log: str) -> Dashboards | Together:
    """What shows an engine's jobs."""
    return Dashboards(log) if engine.workers == 1 else Together(log)
