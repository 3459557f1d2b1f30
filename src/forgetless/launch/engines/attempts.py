"""How often a job was tried, and what becomes of one whose worker has died."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from forgetless.launch.engines.job import Event, Job, Kind, Outcome, Watch
from forgetless.launch.engines.worker import STOPPED, Verdict, error_of
from forgetless.support.errors import MemoryShortageError, WorkerError
from forgetless.training.settings import Progress

# How often a job is begun again after the process that was at it has died.
RETRIES = 2


@final
class Attempts:
    """The jobs that wait, and those that are tried again.

    Arguments:
        jobs: in the order in which they begin.
        watch: told of what happens.
        workers: how many jobs go on at a time.
    """

    def __init__(self, jobs: Sequence[Job], watch: Watch, workers: int) -> None:
        self._waiting = deque(jobs)
        self._watch = watch
        self._workers = workers
        self._tried = Counter[Job]()
        self._heard: set[Job] = set()

    @property
    def waiting(self) -> bool:
        """Whether there are jobs that nobody is at."""
        return bool(self._waiting)

    def next(self) -> Job:
        """The next job to begin."""
        job = self._waiting.popleft()
        self._tried[job] += 1
        return job

    def begun(self, job: Job, worker: str) -> None:
        """A worker has taken a job."""
        self._watch(Event("begun", job, worker))

    def progress(self, job: Job, worker: str, progress: Progress) -> None:
        """A worker says how far it is."""
        self._heard.add(job)
        self._watch(Event("progress", job, worker, progress))

    def over(self, job: Job, worker: str, verdict: Verdict) -> Outcome | None:
        """What became of a job; None if it is begun again."""
        tried = self._tried[job]
        if verdict == STOPPED and tried <= RETRIES:
            words = f"its process died; attempt {tried + 1} goes on from what it had saved"
            self._watch(Event("retried", job, worker, words=words))
            # What there was before is replaced already if the job has come to say anything.
            self._waiting.appendleft(replace(job, fresh=job.fresh and job not in self._heard))
            return None
        error = error_of(verdict)
        if verdict == STOPPED:
            error = WorkerError(
                f"{job.name} was given up: the process that trained it died {tried} times, as one "
                "does that takes more memory than there is; the same command goes on from what "
                "was saved"
            )
        elif isinstance(error, MemoryShortageError) and self._workers > 1:
            words = f"{error}; {self._workers} jobs share it, and fewer --jobs leave more to each"
            error = MemoryShortageError(words)
        kind: Kind = "finished" if error is None else "failed"
        self._watch(Event(kind, job, worker, words=str(error or "")))
        return Outcome(job, error)
