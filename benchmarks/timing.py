"""How benchmarks measure: seconds of repeated calls, and the rate of a large product."""

import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each repeat."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product: the best of six."""
    a = torch.rand(2048, 2048, dtype=dtype)
    return 2 * 2048**3 / min(seconds(lambda: a @ a, 6))
