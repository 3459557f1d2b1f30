"""What a guard has measured and warned of over the steps, and the loggers that are told of it."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from forgetless.support.validation import ConfigError

_FIRST = 20  # steps between two moments at the start of a task
_MOST = 40  # moments of a task; where there are more, every second one is dropped
_FOLDER = Path("runs")


@runtime_checkable
class NumberLogger(Protocol):
    """Writes numbers somewhere, as the loggers of `forgetless.report.loggers` do."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers, by name, after so many steps."""


@final
@dataclass(frozen=True)
class Moment:
    """The numbers of a guard after some steps.

    Arguments:
        step: how many steps were taken in all.
        task: the task that was being learned, from 1.
        numbers: by name, as `Guard.metrics` has them.
    """

    step: int
    task: int
    numbers: Mapping[str, float]


@final
class History:
    """The numbers over the steps, when tasks were stored, and the warnings.

    Arguments:
        logger: is told of every moment; None if nobody is.
        is_own: whether the guard opened the logger, and closes it.

    Attributes:
        moments: in order, at most some for each task.
        stored: the step at which each task was stored in this process.
        warnings: each with the step of it.
        scores: task → the step, accuracy and loss of each report on held-out samples.
    """

    def __init__(self, logger: NumberLogger | None = None, *, is_own: bool = False) -> None:
        self._logger, self._is_own = logger, is_own
        self.moments: list[Moment] = []
        self.stored: list[tuple[int, int]] = []
        self.warnings: list[tuple[int, str]] = []
        self.scores: dict[int, list[tuple[int, float | None, float | None]]] = {}
        self._every = _FIRST
        self._first = 0  # moment of the present task

    def is_due(self, taken: int) -> bool:
        """Whether to note a moment after so many steps of the present task."""
        return taken % self._every == 0

    def add(self, step: int, task: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a moment, and log them."""
        if numbers:
            self.moments.append(Moment(step, task, dict(numbers)))
            if self._logger is not None:
                self._logger.log(step, numbers)
        if len(self.moments) - self._first > _MOST:
            self.moments[self._first :] = self.moments[self._first + 1 :: 2]
            self._every *= 2

    def store(self, step: int, task: int) -> None:
        """Note that a task was stored."""
        self.stored.append((task, step))
        self._every, self._first = _FIRST, len(self.moments)

    def close(self) -> None:
        """Close the logger that the guard opened; nothing is logged after it."""
        if self._is_own and self._logger is not None:
            with contextlib.suppress(AttributeError):
                self._logger.close()  # type: ignore[attr-defined]
            self._logger = None


def history_for(
    log: str | NumberLogger | None, settings: Callable[[], Mapping[str, Any]], *, writes: bool
) -> History:
    """The history of a guard that logs to what its user asked for.

    Arguments:
        log: names of loggers, or a logger; None for none.
        settings: of the guard, for a logger that shows them.
        writes: whether this process logs; of several one does.
    """
    if log is None:
        return History()
    if isinstance(log, str):
        # Few guards log, and the loggers import what trains networks.
        from forgetless.report.loggers import LOGGERS, logger_names

        names = logger_names(log, "log")
        if not writes:
            return History()
        folder = next(f for n in count(1) if not (f := _FOLDER / f"guard-{n}").exists())
        opened = [LOGGERS[name](folder, folder.name, settings(), "step") for name in names]
        return History(_Several(opened), is_own=True)
    if not isinstance(log, NumberLogger):
        raise ConfigError(
            f"log must be a name such as 'tensorboard', or a logger with a method log(step, "
            f"numbers), not {log!r}"
        )
    return History(log if writes else None)


@final
class _Several:
    """Loggers as one."""

    def __init__(self, loggers: list[Any]) -> None:
        self._loggers = loggers

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Tell all of them."""
        for logger in self._loggers:
            logger.log(step, numbers)

    def close(self) -> None:
        """Close all of them."""
        for logger in self._loggers:
            logger.close()
