"""The engine that is always there: jobs in this process, one after another."""

from collections.abc import Generator, Sequence
from functools import partial
from typing import final

import torch

from forgetless.launch.engines.job import Event, Job, Outcome, Watch
from forgetless.launch.engines.work import carry_out
from forgetless.support.errors import ForgetlessError
from forgetless.training.fit import resolve_device
from forgetless.training.settings import Progress


@final
class InProcess:
    """Jobs in this process, one after another."""

    workers = 1
    divides = False  # the seeds of a run follow one another anyway

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def carry_out(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        for job in jobs:
            watch(Event("begun", job))
            try:
                carry_out(job, partial(_tell, watch, job))
            except ForgetlessError as error:
                watch(Event("failed", job, words=str(error)))
                yield Outcome(job, error)
            else:
                watch(Event("finished", job))
                yield Outcome(job)


def _tell(watch: Watch, job: Job, progress: Progress) -> None:
    watch(Event("progress", job, progress=progress))
