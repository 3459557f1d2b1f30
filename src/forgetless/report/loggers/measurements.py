"""From progress to numbers with names, in one place for all loggers."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from forgetless.support.errors import ConfigError
from forgetless.trace import metrics
from forgetless.training.settings import Observer, Progress


@final
class Measurements:
    """Collects the accuracy matrix of each seed and says what is new in it."""

    def __init__(self) -> None:
        self._accuracy: dict[int, NDArray[np.float64]] = {}

    @property
    def mean(self) -> NDArray[np.float64]:
        """The accuracy after each task on each task, mean over the seeds that have it, (T, T)."""
        known = np.stack(list(self._accuracy.values()))
        counts = np.isfinite(known).sum(axis=0)
        sums = np.nansum(known, axis=0)
        return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def new(self, progress: Progress) -> Iterator[tuple[int, int, dict[str, float]]]:
        """For each seed that was evaluated: seed, number of the task (from 1), named numbers."""
        t, tasks = progress.task - 1, progress.tasks
        for seed, row in zip(progress.seeds, progress.measured, strict=True):
            if not np.isfinite(row[t]):
                continue
            matrix = self._accuracy.setdefault(seed, np.full((tasks, tasks), np.nan))
            matrix[t] = row
            digits = len(str(tasks))
            numbers = {
                f"accuracy/task {s + 1:0{digits}d}": float(value)
                for s, value in enumerate(row)
                if np.isfinite(value)
            }
            numbers["average accuracy"] = float(metrics.average_accuracy(matrix))
            numbers["forgetting"] = float(metrics.forgetting(matrix))
            yield seed, progress.task, numbers


class Logger(ABC):
    """An observer that writes numbers somewhere, and has to be closed."""

    def __init__(self) -> None:
        self._measurements = Measurements()

    @abstractmethod
    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """Write what is new of a seed after a task (from 1)."""

    @abstractmethod
    def close(self) -> None:
        """Finish: nothing is written after it."""

    def __call__(self, progress: Progress) -> None:
        for seed, task, numbers in self._measurements.new(progress):
            self.write(seed, task, numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def several(*observers: Observer) -> Callable[[Progress], None]:
    """One observer that tells several, in their order."""

    def tell(progress: Progress) -> None:
        for observer in observers:
            observer(progress)

    return tell


def package(module: str, install: str) -> Any:
    """An optional package, or a sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this logger needs {install}: pip install {install}") from error
