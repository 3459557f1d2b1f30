"""CUDA graphs: GPU work that is recorded once and replayed without Python."""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar, final

import torch

T = TypeVar("T")

_WARM_UP = 2  # runs from Python first: kernels are compiled, tensors allocated


@contextmanager
def capture_graph(
    graph: torch.cuda.CUDAGraph, device: torch.device, shares: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Record the kernels launched in the block as the graph.

    Like `torch.cuda.graph`, but without clearing the allocator's cache, which costs more than
    recording a small network's steps. Other threads may use the GPU meanwhile.

    Arguments:
        graph: an empty graph.
        device: where the work is done.
        shares: a graph that never runs at the same time, whose memory this one uses too. Without
            it a graph's memory is never used by another one, not even after it is deleted.
    """
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), _no_collection():
        pool = None if shares is None else shares.pool()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in the block: a graph that it deletes would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """A stream besides the default one, on which nothing can be recorded."""
    return torch.cuda.Stream(device)


def run_concurrently(works: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results of independent functions; in a recording each runs on its own stream.

    There a GPU runs small kernels of all of them at the same time. Launched from Python they run
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
class GraphedFunction:
    """A function that a GPU replays as a CUDA graph once it has run a few times.

    Launching many small kernels from Python takes longer than running them. On other devices, and
    where the function cannot be recorded, it runs from Python every time.

    Arguments:
        work: launches kernels and has no other effect. Its tensors must stay where they are as
            long as the key is the same.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._key: Hashable = None
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_recordable = True

    def __call__(self, key: Hashable, device: torch.device) -> None:
        """Run the function or replay it.

        Arguments:
            key: differs if a tensor has moved since the last call.
            device: where the work is done.
        """
        if key != self._key:
            self._key, self._seen, self._graph = key, 0, None
        if self._graph is not None and not torch.cuda.is_current_stream_capturing():
            self._graph.replay()
            return
        self._work()
        self._seen += 1
        if self._seen == _WARM_UP and self._is_recordable and device.type == "cuda":
            self._record(device)

    def _record(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():  # the user records a graph that includes this
            self._seen = 0
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(device), capture_graph(graph, device):
                self._work()
        except RuntimeError:
            self._is_recordable = False
        else:
            self._graph = graph
