"""Work that a GPU does again and again without Python: recorded once as a CUDA graph."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar, final

import torch

T = TypeVar("T")

_SEEN = 2  # times that work is done from Python first: kernels are compiled, tensors are there


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, device: torch.device, beside: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """What is launched becomes part of the graph.

    As `torch.cuda.graph`, without its clearing of the allocator's cache, which costs more than the
    recording of a small network's steps. Other threads may go on using the GPU.

    Arguments:
        graph: an empty one.
        device: where the work is done.
        beside: a graph that never runs at the same time, whose memory this one uses as well. Memory
            of a graph goes to no other otherwise, not even once it is gone.
    """
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        pool = None if beside is None else beside.pool()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@cache
def _side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """One for capturing, which cannot be done on the stream that everyone uses, and more."""
    return torch.cuda.Stream(device)


def side_by_side(works: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """Do what does not depend on each other; in a recording each on a stream of its own.

    There a GPU does small kernels of all of them at the same time. Launched from Python they come
    one after another anyway.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [work() for work in works]
    here = torch.cuda.current_stream(device)
    done = []
    for number, work in enumerate(works, start=1):
        stream = _side_stream(device, number)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            done.append(work())
    for number in range(1, len(works) + 1):
        here.wait_stream(_side_stream(device, number))
    return done


@final
class Repeated:
    """Work that a GPU repeats by itself once it has been the same a few times.

    Of many small kernels Python's part takes longer than the GPU's. On other devices, and where
    the work cannot be recorded, it is done from Python every time.

    Arguments:
        work: launches kernels and does nothing else that counts. Its tensors must stay where they
            are as long as the key is the same.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._key: Hashable = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_recordable = True

    def __call__(self, key: Hashable, device: torch.device) -> None:
        """Do it.

        Arguments:
            key: another one when a tensor is in another place than the last time.
            device: where the work is done.
        """
        if key != self._key:
            self._key, self._seen, self._graph = key, 0, None
        if self._graph is not None and not torch.cuda.is_current_stream_capturing():
            self._graph.replay()
            return
        self._work()
        self._seen += 1
        if self._seen == _SEEN and self._is_recordable and device.type == "cuda":
            self._record(device)

    def _record(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():  # it is part of a recording of the user's
            self._seen = 0
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(device), capturing(graph, device):
                self._work()
        except RuntimeError:
            self._is_recordable = False
        else:
            self._graph = graph
