"""Ctrl-C and SIGTERM: handled at once where nothing can be lost, otherwise after saving."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final


@final
class Stopped(KeyboardInterrupt):
    """The process is ending because of a signal.

    Arguments:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


# Signals arrive at the process, so their state belongs to the process.
_pending: int | None = None
_deferred = False


def pending() -> int | None:
    """The signal that asked the process to end, if any."""
    return _pending


@contextmanager
def watched(*numbers: int) -> Iterator[None]:
    """In the block these signals raise `Stopped`, or wait if they are deferred.

    Signals with other handlers are left alone, as are all of them outside the main thread.
    """
    global _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: tuple[Any, ...] = (signal.default_int_handler, signal.SIG_DFL)
    ours = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) in usual}
    for number in ours:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, before in ours.items():
            signal.signal(number, before)
        if ours:
            _pending = None


@contextmanager
def deferred() -> Iterator[None]:
    """In the block a first signal only sets `pending`, to be checked between two steps."""
    with _set(True):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block signals are not deferred; one that is pending prevents it."""
    with _set(False):
        raise_pending()
        yield


def raise_pending() -> None:
    """Raise `Stopped` if a signal is pending."""
    if _pending is not None:
        raise Stopped(_pending)


@contextmanager
def _set(value: bool) -> Iterator[None]:
    global _deferred
    before, _deferred = _deferred, value
    try:
        yield
    finally:
        _deferred = before


def _handle(number: int, frame: FrameType | None) -> None:
    global _pending
    first, _pending = _pending is None, number
    if not (_deferred and first):
        raise Stopped(number)
