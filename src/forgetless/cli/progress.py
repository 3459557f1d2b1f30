"""What is seen while a run goes on: a dashboard on standard error, and what loggers write."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from forgetless.report.loggers import (
    Logger,
    Measurements,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    several,
)
from forgetless.support.errors import require
from forgetless.training.settings import Observer, Progress

# From low to high accuracy: anchors of the viridis scale, and what can be read on them.
_COLOURS = (
    ("#440154", "#ffffff"), ("#46327e", "#ffffff"), ("#365c8d", "#ffffff"), ("#277f8e", "#ffffff"),
    ("#1fa187", "#000000"), ("#4ac16d", "#000000"), ("#a0da39", "#000000"), ("#fde725", "#000000"),
)  # fmt: skip
_CELL = 4  # characters

_Maker = Callable[[Path, str, Mapping[str, Any]], Logger]
LOGGERS: dict[str, _Maker] = {
    "tensorboard": lambda folder, name, config: TensorBoardLogger(folder / "tensorboard"),
    "mlflow": lambda folder, name, config: MLflowLogger(name=name, params=config),
    "wandb": lambda folder, name, config: WandbLogger(name=name, folder=folder, config=config),
}


def logger_names(log: str) -> list[str]:
    """The loggers of the option --log, checked."""
    names = [name.strip() for name in log.split(",") if name.strip()]
    good = all(name in LOGGERS for name in names) and len(set(names)) == len(names)
    require(good, "--log", log, f"one or more of {', '.join(LOGGERS)}, comma-separated")
    return names


@contextmanager
def watched(title: str, log: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Observer]:
    """An observer that shows a run on the terminal and hands it to the loggers.

    Arguments:
        title: of the run, for people and for the loggers.
        log: their names, comma-separated.
        folder: of the run; files of the loggers go there.
        config: its settings.
    """
    with ExitStack() as stack:
        loggers = opened_loggers(stack, title, log, folder, config)
        yield several(stack.enter_context(Dashboard(title)), *loggers)


def opened_loggers(
    stack: ExitStack, title: str, log: str, folder: Path, config: Mapping[str, Any]
) -> list[Logger]:
    """The loggers of a run, to be closed with the stack."""
    return [stack.enter_context(LOGGERS[n](folder, title, config)) for n in logger_names(log)]


@final
class Dashboard:
    """One run while it goes on: where it is, how long it will take, and its accuracy matrix.

    For terminals only. At the end the matrix makes room and the bar stays.

    Arguments:
        title: of the run.
        console: where to; standard error by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._measurements = Measurements()
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[where]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._bar = self._bars.add_task(title, total=1.0, where="")
        self._live = Live(self._bars, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live.is_started:
            self._live.update(self._bars)
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of the run."""
        seeds = ",".join(map(str, progress.seeds))
        where = f"seed {seeds} task {progress.task}/{progress.tasks}"
        where += f" epoch {progress.epoch}/{progress.epochs}"
        if progress.accuracy is not None:
            where += f" accuracy {progress.accuracy:.1f}"
        self._bars.update(self._bar, completed=progress.done, where=where)
        new = list(self._measurements.new(progress))
        if new and self._live.is_started:
            self._live.update(Group(self._matrix(), self._bars))

    def _matrix(self) -> Table:
        """Accuracy after each task on each task, as far as the terminal is wide and high."""
        matrix = self._measurements.mean
        learned = int(np.isfinite(matrix).any(axis=1).sum())
        columns = min(len(matrix), max(1, (self._console.width - 14) // _CELL))
        rows = max(1, self._console.height - 6)
        title = "accuracy, %: rows after a task, columns on it"
        table = Table(title=title, box=None, padding=0, title_justify="left", title_style="dim")
        table.add_column("", justify="right", width=8)
        table.add_column("", width=1)
        for task in range(columns):
            table.add_column(f"{task + 1} ", justify="right", width=_CELL, header_style="dim")
        for t in range(max(0, learned - rows), learned):
            table.add_row(Text(f"task {t + 1}", "dim"), "", *map(_cell, matrix[t, :columns]))
        return table


def _cell(value: float) -> Text:
    if not np.isfinite(value):
        return Text(" " * _CELL)
    paper, ink = _COLOURS[min(len(_COLOURS) - 1, int(value / 100 * len(_COLOURS)))]
    return Text(f"{value:3.0f} ", f"{ink} on {paper}")
