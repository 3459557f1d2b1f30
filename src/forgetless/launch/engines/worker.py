"""What a worker process does, and what it says to the process that started it."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch

from forgetless.launch.engines.job import Job
from forgetless.launch.engines.work import carry_out
from forgetless.support import errors, signals
from forgetless.support.errors import ForgetlessError, ForgetlessWarning
from forgetless.training.settings import Progress

# What a job ended with: the kind of error and its sentence, STOPPED, or None if all went well.
Verdict = tuple[str, str] | None
STOPPED: Verdict = ("Stopped", "it was told to stop")
# How far the job is, or a warning in words.
Message = Progress | str

# A process has one worker, and its signals and its parent belong to the process too.
_says: Callable[[Message], None] | None = None
_busy = threading.Event()
_alone = threading.Event()


def prepare(pipe: "Connection[Any, Any]", threads: int, gpu: str | None) -> None:
    """Make a new process ready to work.

    Arguments:
        pipe: where to say how far it is.
        threads: how many it may compute with.
        gpu: the one device that it may see; None leaves it all of them.
    """
    global _says
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes to all: who waits for us decides
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)

    def say(message: Message) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(message)

    _says = say
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def work(job: Job) -> Verdict:
    """Carry out a job for the process that asked."""
    _busy.set()
    try:
        return attempt(job, _says or (lambda message: None))
    finally:
        _busy.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # others share the device
        if _alone.is_set():
            os._exit(1)


def attempt(job: Job, say: Callable[[Message], None]) -> Verdict:
    """Carry out a job; what goes wrong in a way that we know is a verdict."""
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
            carry_out(job, say)
        except KeyboardInterrupt:
            return STOPPED
        except ForgetlessError as error:
            return type(error).__name__, str(error)
    return None


def error_of(verdict: Verdict) -> ForgetlessError | None:
    """The error that a verdict tells of."""
    if verdict is None:
        return None
    kind = getattr(errors, verdict[0], None)
    known = isinstance(kind, type) and issubclass(kind, ForgetlessError)
    return kind(verdict[1]) if kind is not None and known else ForgetlessError(verdict[1])


def _leave_with_parent() -> None:
    """End when the process that started this one has ended, however it did."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        _alone.set()
        if _busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # saves, then ends
        else:
            os._exit(1)
