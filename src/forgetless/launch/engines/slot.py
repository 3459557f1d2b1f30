"""One worker process of this machine, and another in its place when it dies."""

import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import final

from forgetless.launch.engines import worker
from forgetless.launch.engines.job import Job
from forgetless.support.errors import ForgetlessWarning
from forgetless.training.settings import Progress

_SPAWN = get_context("spawn")  # what CUDA and threads have here does not survive a fork


@final
class Slot:
    """A place for one job at a time.

    It is a pool of one process, so that one that dies takes no other with it.

    Arguments:
        number: which one it is, from 0.
        threads: how many its process may compute with.
        gpu: the one device that it may see, or None.
    """

    def __init__(self, number: int, threads: int, gpu: str | None) -> None:
        self.name = f"worker {number + 1}"
        self.job: Job | None = None
        self._how = threads, gpu
        self._future: Future[worker.Verdict] | None = None
        self._process: BaseProcess | None = None
        self._pool = self._opened()

    @property
    def over(self) -> bool:
        """Whether the job that it was given is over, one way or another."""
        return self._future is not None and self._future.done()

    def begin(self, job: Job) -> None:
        """Have a job carried out."""
        self.job = job
        others = set(active_children())
        with _without_interrupts():
            try:
                self._future = self._pool.submit(worker.work, job)
            except BrokenProcessPool:  # it died while it had nothing to do
                self._renew()
                self._future = self._pool.submit(worker.work, job)
        new = set(active_children()) - others
        if new:
            (self._process,) = new
            self._other_end.close()  # so that its end is the end of the pipe

    def end(self) -> worker.Verdict:
        """What became of the job; STOPPED if its process died, and a new one takes its place."""
        assert self._future is not None  # noqa: S101
        future, self._future, self.job = self._future, None, None
        try:
            return future.result()
        except BrokenProcessPool:
            self._renew()
            return worker.STOPPED

    def heard(self) -> Iterator[Progress]:
        """How far the job is, as far as it was said; warnings are passed on as warnings."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Progress):
                    yield message
                elif self.job is not None:
                    warnings.warn(f"{self.job.name}: {message}", ForgetlessWarning, stacklevel=2)
        except (EOFError, OSError):
            return

    def tell_to_stop(self) -> None:
        """Have the process save where it is and give its job up."""
        if self._future is not None and not self._future.done() and self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """End the process: at once if it still has a job."""
        if self._future is not None and not self._future.done() and self._process is not None:
            self._process.kill()
        self._pool.shutdown(cancel_futures=True)
        self.pipe.close()

    def _opened(self) -> ProcessPoolExecutor:
        self.pipe, self._other_end = _SPAWN.Pipe(duplex=False)
        return ProcessPoolExecutor(
            1,
            mp_context=_SPAWN,
            initializer=worker.prepare,
            initargs=(self._other_end, *self._how),
        )

    def _renew(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.pipe.close()
        self._process, self._pool = None, self._opened()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits until the block is left, and never comes to a process that is started in it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
