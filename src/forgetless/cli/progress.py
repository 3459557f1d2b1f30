"""A progress bar on standard error, for terminals only."""

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from forgetless.training import Progress


@final
class RunBar:
    """One bar for one run: where it is, how accurate it is so far, how long it will take."""

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[where]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task(title, total=1.0, where="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of the run."""
        seeds = ",".join(map(str, progress.seeds))
        where = f"seed {seeds} task {progress.task}/{progress.tasks}"
        where += f" epoch {progress.epoch}/{progress.epochs}"
        if progress.accuracy is not None:
            where += f" accuracy {progress.accuracy:.1f}"
        self._bars.update(self._bar, completed=progress.done, where=where)
