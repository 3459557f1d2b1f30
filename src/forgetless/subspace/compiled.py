"""The walk over stored rows as a compiled loop for the CPU, where Numba is installed.

PyTorch's product of a matrix and a vector has one thread, starts anew for every block and reads at
two thirds of a core's bandwidth. Here each thread walks over its share of the rows in one call.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
# Bytes of a row above which the processor's cache does not hold those that the threads work on.
_CACHED = 1 << 22
# Sums may be taken in any order, eight or sixteen at a time; NaN and infinity keep their meaning.
_REORDERED = {"reassoc", "contract", "nsz"}


def can_be_compiled(g: Tensor, rows: Tensor) -> bool:
    """Whether Numba is there, and the loop can read these and is the faster way."""
    return (
        find_spec("numba") is not None
        and g.device.type == rows.device.type == "cpu"
        and g.dtype == rows.dtype
        and g.dtype in (torch.float32, torch.float64)
        and rows.is_contiguous()
        and rows.shape[1] * rows.element_size() <= _CACHED
        and not (g.requires_grad or rows.requires_grad)
    )


def project_out_compiled(g: Tensor, rows: Tensor, threads: int) -> Tensor:
    """g̃ = g − Vᵀ V g: (p,), (K, p) → (p,), by several threads."""
    vector, shares = g.contiguous(), g.new_empty(threads, len(g))
    projected = torch.empty_like(vector)
    _loop()(vector.numpy(), rows.numpy(), shares.numpy(), projected.numpy())
    return projected


@cache
def _loop() -> Callable[[Array, Array, Array, Array], None]:
    numba: Any = import_module("numba")
    njit, each = numba.njit, numba.prange
    how = {"nogil": True, "fastmath": _REORDERED, "error_model": "numpy"}
    products, subtract = njit(**how)(_products), njit(**how)(_subtract)

    def project_out(g: Array, rows: Array, shares: Array, projected: Array) -> None:
        """Threads share the rows: `shares` (threads, p) takes what each of them finds."""
        count, threads = len(rows), len(shares)
        for t in each(threads):
            shares[t] = 0
            found = np.zeros(count, g.dtype)
            for i in range(count * t // threads, count * (t + 1) // threads, 4):
                last = min(i + 4, count * (t + 1) // threads)
                products(rows[i:last], g, found[i:last])
                subtract(rows[i:last], found[i:last], shares[t])
        for t in each(threads):
            for j in range(g.size * t // threads, g.size * (t + 1) // threads):
                projected[j] = g[j]
                for share in range(threads):
                    projected[j] += shares[share, j]

    loop: Callable[[Array, Array, Array, Array], None] = njit(parallel=True, **how)(project_out)
    return loop


def _products(rows: Array, g: Array, found: Array) -> None:
    """`found` ← `found` + V g, four rows at a time."""
    even = len(rows) - len(rows) % 4
    for i in range(0, even, 4):
        v, w, x, y = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        a = b = c = d = g.dtype.type(0)
        for j in range(g.size):
            a += v[j] * g[j]
            b += w[j] * g[j]
            c += x[j] * g[j]
            d += y[j] * g[j]
        found[i] += a
        found[i + 1] += b
        found[i + 2] += c
        found[i + 3] += d
    for i in range(even, len(rows)):
        v, a = rows[i], g.dtype.type(0)
        for j in range(g.size):
            a += v[j] * g[j]
        found[i] += a


def _subtract(rows: Array, found: Array, out: Array) -> None:
    """`out` ← `out` − Vᵀ `found`, four rows at a time."""
    even = len(rows) - len(rows) % 4
    for i in range(0, even, 4):
        v, w, x, y = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        a, b, c, d = found[i], found[i + 1], found[i + 2], found[i + 3]
        for j in range(out.size):
            out[j] -= a * v[j] + b * w[j] + c * x[j] + d * y[j]
    for i in range(even, len(rows)):
        v, a = rows[i], found[i]
        for j in range(out.size):
            out[j] -= a * v[j]
