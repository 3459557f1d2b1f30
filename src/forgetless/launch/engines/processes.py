"""Several jobs at a time on this machine, each in a process of its own."""

import os
import time
from collections.abc import Generator, Sequence
from multiprocessing import connection
from typing import final

import torch

from forgetless.launch.engines.attempts import Attempts
from forgetless.launch.engines.job import Job, Outcome, Watch
from forgetless.launch.engines.slot import Slot
from forgetless.support.errors import require
from forgetless.training.fit import resolve_device

_LOOK_EVERY = 0.25  # seconds, at the least; what workers say is heard at once
_GRACE = 30.0  # seconds that workers have to save when they are told to stop


@final
class Processes:
    """Several jobs at a time on this machine.

    The threads that torch would compute with are divided among them, and so are the GPUs if there
    are several and the device is said without a number.

    Arguments:
        workers: how many processes.
    """

    divides = True

    def __init__(self, workers: int) -> None:
        require(workers >= 1, "--jobs", workers, "a number of jobs at a time, at least 1")
        self.workers = workers

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def carry_out(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        slots = self._slots(jobs)
        attempts = Attempts(jobs, watch, len(slots))
        try:
            while attempts.waiting or any(slot.job for slot in slots):
                for slot in slots:
                    if slot.job is None and attempts.waiting:
                        job = attempts.next()
                        slot.begin(job)
                        attempts.begun(job, slot.name)
                connection.wait([slot.pipe for slot in slots if slot.job], _LOOK_EVERY)
                for slot in slots:
                    outcome = _looked_at(slot, attempts)
                    if outcome is not None:
                        yield outcome
        finally:
            _stop(slots)

    def _slots(self, jobs: Sequence[Job]) -> list[Slot]:
        count = min(self.workers, len(jobs))
        threads = max(1, torch.get_num_threads() // max(1, count))
        gpus = _gpus(jobs)
        return [Slot(n, threads, gpus[n % len(gpus)] if gpus else None) for n in range(count)]


def _looked_at(slot: Slot, attempts: Attempts) -> Outcome | None:
    """Pass on what a worker has said, and what became of its job if that is over."""
    job, over = slot.job, slot.over  # asked first: what is heard then is all there is
    if job is None:
        return None
    for progress in slot.heard():
        attempts.progress(job, slot.name, progress)
    return attempts.over(job, slot.name, slot.end()) if over else None


def _gpus(jobs: Sequence[Job]) -> list[str]:
    """The devices to divide among workers: several, and no job asks for one by its number."""
    anywhere = all(job.order.config.device in ("auto", "cuda") for job in jobs)
    if not anywhere or not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]


def _stop(slots: Sequence[Slot]) -> None:
    """End all workers; those that are at a job save first, if that does not take too long."""
    try:
        for slot in slots:
            slot.tell_to_stop()
        until = time.monotonic() + _GRACE
        while any(slot.job and not slot.over for slot in slots) and time.monotonic() < until:
            for slot in slots:
                list(slot.heard())  # who waits to be heard does not save
            time.sleep(0.02)
    finally:
        for slot in slots:
            slot.close()
