"""Ctrl-C and SIGTERM: at once where nothing can be lost, otherwise when all is saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final


@final
class Stopped(KeyboardInterrupt):
    """A signal asked the process to end, and it is about to.

    Arguments:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


# Signals come to the process, so what is known of them belongs to the process.
_pending: int | None = None
_deferred = False


def pending() -> int | None:
    """The signal that asked the process to end, if one did."""
    return _pending


@contextmanager
def watched(*numbers: int) -> Iterator[None]:
    """In the block these signals raise `Stopped`, or wait where they are deferred.

    Where others handle a signal, or in a thread that cannot, it is left alone.
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
    """In the block a first signal only sets `pending`, for who looks there between two steps."""
    with _set(True):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block signals are not deferred; one that waits already ends it before it begins."""
    with _set(False):
        raise_pending()
        yield


def raise_pending() -> None:
    """Raise `Stopped` if a signal has come."""
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
