"""The progress of a command: bars and an accuracy matrix on a terminal, else lines; loggers."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from forgetless.launch.engines import Event, Job
from forgetless.report.loggers import LOGGERS, logger_names
from forgetless.trace.notebook import viridis
from forgetless.training.settings import Measurements, Observer, several

_CELL = 4  # characters


def say(text: str, console: Console | None = None) -> None:
    """Print a line for people; on standard output by default."""
    (console or Console()).print(text, soft_wrap=True, markup=False, highlight=False)


def say_report(page: Path, sentences: Sequence[str] = ()) -> None:
    """Print the headlines of a page, and where it is."""
    for line in (*sentences, f"The report is {page}"):
        say(line)


@final
class Board:
    """A watcher of jobs that shows them, and passes their progress to loggers.

    On a terminal it is a row for each worker, a bar for all jobs if there are several, and for a
    single worker the accuracy matrix of its run. Elsewhere it is a line for each event; a single
    worker is silent there.

    Arguments:
        workers: how many jobs run at a time.
        log: names of loggers, comma-separated.
        console: where to; standard error by default.
        lines: print the lines where there is no terminal, and leave a row for each run that is over
            on one; without, somebody else prints what is to stay.
    """

    def __init__(
        self,
        workers: int = 1,
        log: str = "",
        console: Console | None = None,
        *,
        lines: bool = True,
    ) -> None:
        self._lines = lines
        self._console = console or Console(stderr=True)
        self._workers = workers
        self._log = logger_names(log)
        self._loggers: dict[Path, tuple[ExitStack, Observer]] = {}  # by the folder of the run
        self._unfinished = Counter[Path]()  # jobs of each run
        self._measurements = Measurements()
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[where]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
        )
        self._live = Live(self._bars, console=self._console, refresh_per_second=4)
        self._all = self._bars.add_task("all", total=1.0, where="", visible=False)
        self._rows: dict[str, TaskID] = {}
        self._shares: dict[Job, float] = {}  # how much of each job is done
        self._begun: dict[Job, float] = {}
        self._over = 0
        self._started = time.monotonic()
        self._resumed = 0.0  # work that was done already in jobs that were resumed

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live.is_started:
            self._live.update(self._bars)
            self._live.stop()
        with ExitStack() as stack:
            for opened, _ in self._loggers.values():
                stack.push(opened)

    def show_stage(self, what: str, share: float | None = None, *, new: bool = True) -> None:
        """Show a stage of the command that is not a job.

        Arguments:
            what: the stage, for people.
            share: how much of all stages is done, if that is known.
            new: whether it has just begun.
        """
        if share == 0:
            self._started = time.monotonic()
        self._bars.update(self._all, completed=share, visible=True, where=what)
        if new and not self._console.is_terminal:
            say(what + self._time(share or 0.0, 0.0), self._console)

    def __call__(self, event: Event) -> None:
        """Show an event of a job."""
        job, folder = event.job, event.job.order.folder
        if event.kind == "queued":
            if self._over == len(self._shares):  # all before it are over: another round
                self._restart()
            self._shares[job] = 0.0
            self._unfinished[folder] += 1
            return
        if event.kind == "begun":
            self._begun.setdefault(job, time.monotonic())
            self._measurements = Measurements()
            self._open_loggers(job)
        elif event.progress is not None:
            self._advance(job, event.progress.done)
            self._loggers[folder][1](event.progress)
        elif event.kind in ("finished", "failed"):
            self._over += 1
            self._unfinished[folder] -= 1
            self._advance(job, 1.0)
            if not self._unfinished[folder] and folder in self._loggers:
                self._loggers.pop(folder)[0].close()
        self._show(event)
        tells = self._lines and self._workers > 1 and not self._console.is_terminal
        if event.kind != "progress" and tells:
            say(self._line(event), self._console)

    def _restart(self) -> None:
        self._shares.clear()
        self._begun.clear()
        self._over, self._resumed, self._started = 0, 0.0, time.monotonic()

    def _open_loggers(self, job: Job) -> None:
        order = job.order
        if order.folder not in self._loggers:
            stack, config = ExitStack(), order.config.as_dict()
            makers = [LOGGERS[name] for name in self._log]
            opened = [
                stack.enter_context(m(order.folder, order.name, config, "task")) for m in makers
            ]
            self._loggers[order.folder] = stack, several(*opened)

    def _advance(self, job: Job, done: float) -> None:
        stages = job.order.config.tasks * job.order.config.epochs
        if self._shares[job] == 0.0 and done > 1.5 / max(1, stages):
            self._resumed += done * job.size
        self._shares[job] = max(done, self._shares[job])

    def _share(self) -> float:
        done = sum(share * job.size for job, share in self._shares.items())
        return done / sum(job.size for job in self._shares)

    def _show(self, event: Event) -> None:
        where = f"{self._over} of {len(self._shares)} jobs{self._time_of_jobs()}"
        several_jobs = len(self._shares) > 1
        self._bars.update(self._all, completed=self._share(), where=where, visible=several_jobs)
        row = event.worker or event.job.name
        if row not in self._rows:
            name = event.job.name if event.worker else ""
            self._rows[row] = self._bars.add_task(row, total=1.0, where=name)
        keeps_row = self._lines and not event.worker
        if not keeps_row and event.kind in ("retried", "finished", "failed"):
            self._bars.remove_task(self._rows.pop(row))
            return
        fields: dict[str, Any] = {}
        if event.progress is not None:
            p = event.progress
            where = event.job.name if event.worker else f"seed {','.join(map(str, p.seeds))}"
            where += f" task {p.task}/{p.tasks} epoch {p.epoch}/{p.epochs}"
            if p.accuracy is not None:
                where += f" accuracy {p.accuracy:.1f}"
            fields = {"where": where}
        self._bars.update(self._rows[row], completed=self._shares[event.job], **fields)
        if self._workers == 1 and self._live.is_started:
            new = event.progress is not None and list(self._measurements.new(event.progress))
            if new:
                self._live.update(Group(self._matrix(), self._bars))
            elif event.kind in ("finished", "failed"):
                self._live.update(self._bars)

    def _line(self, event: Event) -> str:
        name, where = event.job.name, f" on {event.worker}" if event.worker else ""
        if event.kind == "begun":
            return f"{name} begins{where}"
        if event.kind == "retried":
            return f"{name}{where}: {event.message}"
        if event.kind == "failed":
            return f"{name} failed: {event.message}"
        seconds = time.monotonic() - self._begun.get(event.job, self._started)
        count = f"{self._over} of {len(self._shares)} jobs done"
        return f"{name} finished{where} in {seconds:.0f} s; {count}{self._time_of_jobs()}"

    def _time_of_jobs(self) -> str:
        if self._over == len(self._shares):
            return f", {time.monotonic() - self._started:.0f} s in all"
        return self._time(self._share(), self._resumed / sum(job.size for job in self._shares))

    def _time(self, share: float, resumed: float) -> str:
        """The seconds spent and left, at the pace of what this command did itself."""
        if not 0 < share < 1 or share <= resumed:
            return ""
        spent = time.monotonic() - self._started
        left = spent * (1 - share) / (share - resumed)
        return f", {spent:.0f} s so far, about {left:.0f} s left"

    def _matrix(self) -> Table:
        """Accuracy after each task on each task, as far as the terminal has room."""
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
    paper, ink = viridis(value / 100)
    return Text(f"{value:3.0f} ", f"{ink} on {paper}")
