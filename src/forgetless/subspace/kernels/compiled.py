"""The walk over stored rows as a compiled loop for the CPU, where Numba is installed.

PyTorch's product of a matrix and a vector has one thread, starts anew for every block and reads at
two thirds of a core's bandwidth. Here each thread walks over its share in one call.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Loop = Callable[[Array, Array, Array, Array], None]
# Bytes of a row above which the processor's cache does not hold those that the threads work on.
_CACHED = 1 << 22
# Columns that are read from all such rows together: their part of g stays in the cache.
_WIDTH = 1 << 18
# Sums may be taken in any order, eight or sixteen at a time; NaN and infinity keep their meaning.
_REORDERED = {"reassoc", "contract", "nsz"}
_ONE_AT_A_TIME = Lock()  # not all of Numba's ways to make threads can be used by several


def can_be_compiled(g: Tensor, rows: Tensor) -> bool:
    """Whether Numba is there and the loops can read these."""
    return (
        _is_installed()
        and _first_process() == os.getpid()
        and g.device.type == rows.device.type == "cpu"
        and g.dtype == rows.dtype
        and g.dtype in (torch.float32, torch.float64)
        and rows.is_contiguous()
        and not (g.requires_grad or rows.requires_grad)
    )


@cache
def _is_installed() -> bool:
    return find_spec("numba") is not None


@cache
def _first_process() -> int:
    """Whose threads these are: they do not survive a fork, and Numba ends a fork that uses them."""
    return os.getpid()


def project_out_compiled(g: Tensor, rows: Tensor, threads: int) -> Tensor:
    """g̃ = g − Vᵀ V g: (p,), (K, p) → (p,), by several threads."""
    vector, (count, size) = g.contiguous(), rows.shape
    projected = torch.empty_like(vector)
    one_pass, two_passes = _loops()
    if size * rows.element_size() <= _CACHED:
        walk, scratch = one_pass, g.new_zeros(threads, size)
    else:
        walk, scratch = two_passes, g.new_zeros(threads, count)
    before = torch.get_num_threads()
    with _ONE_AT_A_TIME:
        walk(vector.numpy(), rows.numpy(), scratch.numpy(), projected.numpy())
    if torch.get_num_threads() != before:  # Numba sets OpenMP's number of threads for all
        torch.set_num_threads(before)
    return projected


@cache
def _loops() -> tuple[Loop, Loop]:
    """Over rows that stay in the cache until they are subtracted, and over others."""
    numba: Any = import_module("numba")
    njit, each = numba.njit, numba.prange
    how = {"nogil": True, "fastmath": _REORDERED, "error_model": "numpy"}
    add_products, subtract = njit(**how)(_add_products), njit(**how)(_subtract)

    def one_pass(g: Array, rows: Array, scratch: Array, projected: Array) -> None:
        """Threads share the rows, each read once: `scratch` takes what each thread finds."""
        count, size, threads = len(rows), g.size, len(scratch)
        for t in each(threads):
            found, share = np.zeros(count, g.dtype), scratch[t]
            last = count * (t + 1) // threads
            for i in range(count * t // threads, last, 4):
                add_products(rows, i, min(i + 4, last), g, 0, size, found)
                subtract(rows, i, min(i + 4, last), found, share, 0)
        for t in each(threads):
            for j in range(size * t // threads, size * (t + 1) // threads):
                projected[j] = g[j]
                for share in range(threads):
                    projected[j] += scratch[share, j]

    def two_passes(g: Array, rows: Array, scratch: Array, projected: Array) -> None:
        """Threads share the columns, each read twice: `scratch` takes the parts of V g."""
        count, size, threads = len(rows), g.size, len(scratch)
        for t in each(threads):
            last = size * (t + 1) // threads
            for j in range(size * t // threads, last, _WIDTH):
                add_products(rows, 0, count, g, j, min(j + _WIDTH, last), scratch[t])
        found = scratch.sum(0)
        for t in each(threads):
            last = size * (t + 1) // threads
            for j in range(size * t // threads, last, _WIDTH):
                part = projected[j : min(j + _WIDTH, last)]
                part[:] = g[j : j + part.size]
                subtract(rows, 0, count, found, part, j)

    together = njit(parallel=True, **how)
    return together(one_pass), together(two_passes)


def _add_products(
    rows: Array, first: int, last: int, g: Array, start: int, stop: int, found: Array
) -> None:
    """Add to `found` (K,) what some columns of some rows have in common with g, four at a time."""
    x = g[start:stop]
    even = last - (last - first) % 4
    for i in range(first, even, 4):
        u, v = rows[i][start:stop], rows[i + 1][start:stop]
        w, y = rows[i + 2][start:stop], rows[i + 3][start:stop]
        a = b = c = d = g.dtype.type(0)
        for j in range(x.size):
            a += u[j] * x[j]
            b += v[j] * x[j]
            c += w[j] * x[j]
            d += y[j] * x[j]
        found[i] += a
        found[i + 1] += b
        found[i + 2] += c
        found[i + 3] += d
    for i in range(even, last):
        u, a = rows[i][start:stop], g.dtype.type(0)
        for j in range(x.size):
            a += u[j] * x[j]
        found[i] += a


def _subtract(rows: Array, first: int, last: int, found: Array, out: Array, start: int) -> None:
    """`out` ← `out` − Vᵀ `found` in the columns from `start` on, four rows at a time."""
    stop = start + out.size
    even = last - (last - first) % 4
    for i in range(first, even, 4):
        u, v = rows[i][start:stop], rows[i + 1][start:stop]
        w, y = rows[i + 2][start:stop], rows[i + 3][start:stop]
        a, b, c, d = found[i], found[i + 1], found[i + 2], found[i + 3]
        for j in range(out.size):
            out[j] -= a * u[j] + b * v[j] + c * w[j] + d * y[j]
    for i in range(even, last):
        u, a = rows[i][start:stop], found[i]
        for j in range(out.size):
            out[j] -= a * u[j]
