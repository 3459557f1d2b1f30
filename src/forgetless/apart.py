"""The same for every seed, on a GPU at once: while one waits for a result, the others go on."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


def for_each(
    function: Callable[[Item], Found], items: Sequence[Item], device: torch.device
) -> list[Found]:
    """What the function makes of each item: [f(x) for x in items].

    On a GPU, where a small solver spends its time waiting for the host and the host for it, each
    has a thread and a stream of its own.
    """
    if device.type != "cuda" or len(items) < 2:
        return [function(item) for item in items]
    _load_solvers(device)
    begun = torch.cuda.current_stream(device).record_event()
    with_gradients = torch.is_grad_enabled()

    def run(number: int, item: Item) -> Found:
        stream = _stream(device, number)
        # Whatever was freed before is used again only after what is going on now.
        stream.wait_event(begun)
        with torch.cuda.stream(stream), torch.set_grad_enabled(with_gradients):
            found = function(item)
        stream.synchronize()
        return found

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(run, range(len(items)), items))


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same one every time: memory that was freed on a stream is used again on that one."""
    return torch.cuda.Stream(device)


@cache
def _load_solvers(device: torch.device) -> None:
    """PyTorch loads its solvers at their first call, which two threads must not make at once."""
    torch.linalg.cholesky_ex(torch.eye(2, device=device))
