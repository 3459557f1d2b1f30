"""Several jobs at a time on this machine, each in a process of its own."""

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch

from forgetless.launch.engines.jobs import Event, Job, Outcome, Watch, execute_job
from forgetless.support import signals, validation
from forgetless.support.provenance import mistake_in
from forgetless.support.validation import (
    ForgetlessError,
    ForgetlessWarning,
    MemoryShortageError,
    UserCodeError,
    WorkerError,
    first_line,
    require,
)
from forgetless.training.fit import resolve_device
from forgetless.training.settings import Progress

RETRIES = 2  # of a job whose process has died
_POLL_EVERY = 0.25  # seconds; messages of workers arrive at once
_GRACE = 30.0  # seconds in which stopped workers may save
_SPAWN = get_context("spawn")  # CUDA and threads do not survive a fork

# How a job ended: the kind of error and its sentence, STOPPED, or None if it was finished.
JobVerdict = tuple[str, str] | None
STOPPED: JobVerdict = ("Stopped", "it was told to stop")
Message = Progress | str  # how far a job is, or a warning


@final
class Processes:
    """Executes several jobs at a time on this machine.

    Workers share torch's threads equally, and the GPUs if there are several and the device has no
    number.

    Arguments:
        workers: number of processes.
    """

    divides = True

    def __init__(self, workers: int) -> None:
        require(workers >= 1, "--jobs", workers, "a number of jobs at a time, at least 1")
        self.workers = workers

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        workers = self._start(jobs)
        attempts = Attempts(jobs, watch, len(workers))
        try:
            while attempts.waiting or any(worker.job for worker in workers):
                for worker in workers:
                    if worker.job is None and attempts.waiting:
                        job = attempts.next()
                        worker.begin(job)
                        attempts.begun(job, worker.name)
                connection.wait([w.pipe for w in workers if w.job and w.pipe], _POLL_EVERY)
                for worker in workers:
                    current = worker.job
                    if current is None:
                        continue
                    for progress in worker.messages():
                        attempts.progress(current, worker.name, progress)
                    if worker.job is None:
                        outcome = attempts.over(current, worker.name, worker.verdict)
                        if outcome is not None:
                            yield outcome
        finally:
            _stop(workers)

    def _start(self, jobs: Sequence[Job]) -> list["Worker"]:
        count = min(self.workers, len(jobs))
        threads = max(1, torch.get_num_threads() // max(1, count))
        gpus = _gpus(jobs)
        return [Worker(n, threads, gpus[n % len(gpus)] if gpus else None) for n in range(count)]


def _gpus(jobs: Sequence[Job]) -> list[str]:
    """The devices to share among workers: several, and no job asks for one by its number."""
    anywhere = all(job.order.config.device in ("auto", "cuda") for job in jobs)
    if not anywhere or not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]


def _stop(workers: Sequence["Worker"]) -> None:
    """End all workers; those that have a job save first, unless that takes too long."""
    try:
        for worker in workers:
            worker.terminate()
        until = time.monotonic() + _GRACE
        while any(worker.job for worker in workers) and time.monotonic() < until:
            for worker in workers:
                list(worker.messages())  # a worker that waits to be read does not save
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.close()


@final
class Worker:
    """A process for one job at a time, and its successor when it dies.

    Arguments:
        number: which one it is, from 0.
        threads: how many its process may compute with.
        gpu: the one device that it may see, or None for all.
    """

    def __init__(self, number: int, threads: int, gpu: str | None) -> None:
        self.name = f"worker {number + 1}"
        self.job: Job | None = None
        self.verdict: JobVerdict = None  # of the latest job
        self.pipe: Connection[Any, Any] | None = None
        self._limits = threads, gpu
        self._process: BaseProcess | None = None

    def begin(self, job: Job) -> None:
        """Start a job, in a new process if there is none that lives."""
        if self._process is None:
            self.pipe, other_end = _SPAWN.Pipe()
            self._process = _SPAWN.Process(target=_serve, args=(other_end, *self._limits))
            with _without_interrupts():
                self._process.start()
            other_end.close()  # only the process has it now: its end is the end of the pipe
        self.job = job
        with contextlib.suppress(OSError):  # it died just now, which `messages` will notice
            self.pipe.send(job)  # type: ignore[union-attr]

    def messages(self) -> Iterator[Progress]:
        """How far the job is; warnings become warnings, and its end sets `job` and `verdict`."""
        try:
            while self.job is not None and self.pipe is not None and self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Progress):
                    yield message
                elif isinstance(message, str):
                    warnings.warn(f"{self.job.name}: {message}", ForgetlessWarning, stacklevel=2)
                elif isinstance(message, Exception):
                    self.job = None
                    raise message  # a mistake in the program
                else:
                    (self.verdict,), self.job = message, None
        except (EOFError, OSError):  # the process has died
            self.verdict = STOPPED
            self.close()

    def terminate(self) -> None:
        """Make the process save and give its job up."""
        if self.job is not None and self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None and self.pipe is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()
        self._process = self.pipe = self.job = None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back during the block, and for good in processes started in it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: "Connection[Any, Any]", threads: int, gpu: str | None) -> None:
    """The life of a worker process: execute the jobs that come, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all processes get it; the parent decides
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(message: Message) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(message)

    with contextlib.suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            try:
                pipe.send((attempt(job, say),))
            except Exception as error:
                pipe.send(RuntimeError("".join(traceback.format_exception(error))))
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # others share the device


def _end_with_parent() -> None:
    """End this process once its parent has ended in any way; a job under way is saved."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def attempt(job: Job, say: Callable[[Message], None]) -> JobVerdict:
    """Execute a job in this process; warnings are said, and errors that are expected a verdict."""
    with warnings.catch_warnings(), signals.watched(signal.SIGTERM):
        warnings.simplefilter("always", ForgetlessWarning)
        plain = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, ForgetlessWarning):
                say(str(message))
            else:
                plain(message, category, *where, **more)

        warnings.showwarning = show
        try:
            execute_job(job, say)
        except KeyboardInterrupt:
            return STOPPED
        except ForgetlessError as error:
            return type(error).__name__, str(error)
        except (Exception, SystemExit) as error:
            mistake = mistake_in(error)
            if mistake is None:
                raise
            text = "".join(traceback.format_exception(error))
            return UserCodeError.__name__, f"{mistake}\n{text}"
    return None


def error_of(verdict: JobVerdict) -> ForgetlessError | None:
    """The error that a verdict describes."""
    if verdict is None:
        return None
    kind = getattr(validation, verdict[0], None)
    known = isinstance(kind, type) and issubclass(kind, ForgetlessError)
    return kind(verdict[1]) if kind is not None and known else ForgetlessError(verdict[1])


@final
class Attempts:
    """The jobs that wait for a worker, and how often each was tried.

    Arguments:
        jobs: in the order in which they begin.
        watch: called with every event.
        workers: how many jobs run at a time.
    """

    def __init__(self, jobs: Sequence[Job], watch: Watch, workers: int) -> None:
        self._waiting = deque(jobs)
        self._watch = watch
        self._workers = workers
        self._tried = Counter[Job]()
        self._heard: set[Job] = set()

    @property
    def waiting(self) -> bool:
        """Whether there are jobs without a worker."""
        return bool(self._waiting)

    def next(self) -> Job:
        """The next job to begin."""
        job = self._waiting.popleft()
        self._tried[job] += 1
        return job

    def begun(self, job: Job, worker: str) -> None:
        """Note that a worker has taken a job."""
        self._watch(Event("begun", job, worker))

    def progress(self, job: Job, worker: str, progress: Progress) -> None:
        """Note how far a job is."""
        self._heard.add(job)
        self._watch(Event("progress", job, worker, progress))

    def over(self, job: Job, worker: str, verdict: JobVerdict) -> Outcome | None:
        """The outcome of a job; None if it is retried."""
        tried = self._tried[job]
        if verdict == STOPPED and tried <= RETRIES:
            message = f"its process died; attempt {tried + 1} resumes from its latest checkpoint"
            self._watch(Event("retried", job, worker, message=message))
            # An attempt that has reported progress has replaced what the folder held before.
            replaces = job.resume is False and job not in self._heard
            self._waiting.appendleft(replace(job, resume=False if replaces else None))
            return None
        error = error_of(verdict)
        if verdict == STOPPED:
            error = WorkerError(
                f"{job.name} was given up: its process died {tried} times, perhaps because it "
                "needs more memory than there is; the same command resumes from what was saved"
            )
        elif isinstance(error, MemoryShortageError) and self._workers > 1:
            message = f"{error}; {self._workers} jobs share it, and fewer --jobs leave more to each"
            error = MemoryShortageError(message)
        kind: Any = "failed" if error else "finished"
        self._watch(Event(kind, job, worker, message=first_line(error) if error else ""))
        return Outcome(job, error)
