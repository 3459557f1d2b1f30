"""An engine executes jobs; the simplest one in this process."""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol, final

import torch

from forgetless.launch.engines.execution import execute_job
from forgetless.launch.engines.jobs import Event, Job, Outcome, Watch
from forgetless.support.errors import ForgetlessError
from forgetless.training.fit import resolve_device
from forgetless.training.settings import Progress


class Engine(Protocol):
    """Executes jobs.

    Attributes:
        workers: jobs at a time.
        divides: whether a run becomes one job per group of seeds.
    """

    @property
    def workers(self) -> int: ...

    @property
    def divides(self) -> bool: ...

    def device(self, name: str) -> torch.device:
        """The device of that name where jobs are executed."""
        ...

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        """Execute jobs, roughly in their order, and yield each when it is over.

        A job whose worker dies is retried a few times. Closing the generator stops all jobs; those
        under way save a checkpoint first.
        """
        ...


@final
class InProcess:
    """Executes jobs in this process, one after another."""

    workers = 1
    divides = False  # the seeds of a run follow one another anyway

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        for job in jobs:
            watch(Event("begun", job))
            error = None
            try:
                execute_job(job, partial(_tell, watch, job))
            except ForgetlessError as problem:
                error = problem
            watch(Event("failed" if error else "finished", job, message=str(error or "")))
            yield Outcome(job, error)


def _tell(watch: Watch, job: Job, progress: Progress) -> None:
    watch(Event("progress", job, progress=progress))
