"""All jobs of a command while they go on: which is where, how far, and how long it will take."""

import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from forgetless.launch.engines import Event, Job


@final
class Board:
    """One view of jobs that go on at a time.

    On a terminal a bar for all of them and a row for each worker; elsewhere a line whenever a job
    begins, ends, or begins again.

    Arguments:
        console: where to; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[where]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._all = self._bars.add_task("all", total=1.0, where="")
        self._rows: dict[str, TaskID] = {}
        self._share: dict[Job, float] = {}  # of each job, how much of it is done
        self._begun: dict[Job, float] = {}
        self._over = 0
        self._started = time.monotonic()
        self._found = 0.0  # what was done already when jobs went on from checkpoints

    def start(self) -> None:
        """Begin to show."""
        self._bars.start()

    def stop(self) -> None:
        """Leave what was shown last."""
        self._bars.stop()

    def say(self, words: str) -> None:
        """Say something that is not about a job."""
        if self._console.is_terminal:
            self._bars.update(self._all, where=words)
        else:
            say(words, self._console)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __call__(self, event: Event) -> None:
        """Show what happened to a job."""
        job = event.job
        if event.kind == "queued":
            if self._over == len(self._share):  # all before it are over: another round
                self._restart()
            self._share[job] = 0.0
            return
        if event.kind == "begun":
            self._begun.setdefault(job, time.monotonic())
        elif event.progress is not None:
            self._advance(job, event.progress.done)
        elif event.kind in ("finished", "failed"):
            self._over += 1
            self._advance(job, 1.0)
        self._show(event)
        if event.kind != "progress" and not self._console.is_terminal:
            say(self._line(event), self._console)

    def _restart(self) -> None:
        self._share.clear()
        self._begun.clear()
        self._over, self._found, self._started = 0, 0.0, time.monotonic()

    def _advance(self, job: Job, done: float) -> None:
        if self._share[job] == 0.0 and done > 1.5 / max(1, _stages(job)):
            self._found += done * job.size  # of a job that goes on, what this command did not do
        self._share[job] = max(done, self._share[job])

    def _done(self) -> float:
        return sum(share * job.size for job, share in self._share.items())

    def _total(self) -> float:
        return sum(job.size for job in self._share)

    def _show(self, event: Event) -> None:
        where = f"{self._over} of {len(self._share)} jobs{self._left_words()}"
        self._bars.update(self._all, completed=self._done() / self._total(), where=where)
        worker, place = event.worker, event.job.name
        if not worker:
            return
        if event.kind in ("retried", "finished", "failed"):
            if worker in self._rows:
                self._bars.remove_task(self._rows.pop(worker))
            return
        if worker not in self._rows:
            self._rows[worker] = self._bars.add_task(worker, total=1.0, where="")
        if event.progress is not None:
            p = event.progress
            place += f" task {p.task}/{p.tasks} epoch {p.epoch}/{p.epochs}"
        self._bars.update(self._rows[worker], completed=self._share[event.job], where=place)

    def _line(self, event: Event) -> str:
        name, where = event.job.name, f" on {event.worker}" if event.worker else ""
        if event.kind == "begun":
            return f"{name} begins{where}"
        if event.kind == "retried":
            return f"{name}{where}: {event.words}"
        if event.kind == "failed":
            return f"{name} failed: {event.words}"
        seconds = time.monotonic() - self._begun.get(event.job, self._started)
        count = f"{self._over} of {len(self._share)} jobs done"
        return f"{name} finished{where} in {seconds:.0f} s; {count}{self._left_words()}"

    def _left_words(self) -> str:
        spent = time.monotonic() - self._started
        done, total = self._done() - self._found, self._total()
        if not 0 < self._done() < total or done <= 0:
            return f", {spent:.0f} s in all" if self._over == len(self._share) else ""
        left = spent * (total - self._done()) / done
        return f", {spent:.0f} s so far, about {left:.0f} s left"


def _stages(job: Job) -> int:
    return job.order.config.tasks * job.order.config.epochs


def say(words: str, console: Console | None = None) -> None:
    """A line for people; on standard output by default."""
    (console or Console()).print(words, soft_wrap=True, markup=False, highlight=False)
