"""The walk over stored rows as loops that Numba compiles for the CPU, where it is installed.

PyTorch's product of a matrix and a vector has one thread, starts anew for every block and reads at
two thirds of a core's bandwidth. Here each thread walks over its share in one call. The compiled
loops are stored on disk, so that only the first process waits for the compiler.
"""

import os
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numba import config, njit, prange, set_num_threads
from torch import Tensor

from forgetless.support.progress import advance

Array = np.ndarray[Any, np.dtype[Any]]
# Bytes of a row above which the processor's cache does not hold those that the threads work on.
_CACHED = 1 << 22
# Columns that are read from all such rows together: their part of g stays in the cache.
_WIDTH = 1 << 18
# Sums may be taken in any order, eight or sixteen at a time; NaN and infinity keep their meaning.
_OPTIONS = {
    "nogil": True,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "cache": True,
}
_ONE_AT_A_TIME = Lock()  # not all of Numba's threading layers can be used by several threads
_PROCESS = os.getpid()  # Numba's threads do not survive a fork, and using them ends the child


def project_out_compiled(g: Tensor, rows: Tensor, threads: int) -> Tensor | None:
    """g̃ = g − Vᵀ V g by several threads; None for tensors that the loops cannot read.

    Arguments:
        g: (p,).
        rows: V, (K, p).
        threads: how many.
    """
    readable = (
        os.getpid() == _PROCESS
        and g.device.type == rows.device.type == "cpu"
        and g.dtype == rows.dtype
        and g.dtype in (torch.float32, torch.float64)
        and rows.is_contiguous()
        and not (g.requires_grad or rows.requires_grad)
    )
    if not readable:
        return None
    vector, (count, size) = g.contiguous(), rows.shape
    projected = torch.empty_like(vector)
    once = size * rows.element_size() <= _CACHED
    walk, scratch = (_one_pass, size) if once else (_two_passes, count)
    arrays = (t.numpy() for t in (vector, rows, g.new_zeros(threads, scratch), projected))
    before = torch.get_num_threads()
    if not walk.signatures and not _is_stored(walk):
        advance("compiling the projection, once on this machine", 0, 1)
    with _ONE_AT_A_TIME:
        set_num_threads(min(threads, config.NUMBA_NUM_THREADS))  # idle ones would be waited for
        walk(*arrays)
    if torch.get_num_threads() != before:  # Numba sets OpenMP's number of threads for all
        torch.set_num_threads(before)
    return projected


def _is_stored(loops: Any) -> bool:
    """Whether an earlier process has stored these loops on disk."""
    folder = Path(loops.stats.cache_path)
    return any(folder.glob(f"{Path(__file__).stem}.{loops.py_func.__name__}-*.nbi"))


@njit(**_OPTIONS)
def _add_products(
    rows: Array, first: int, last: int, g: Array, start: int, stop: int, found: Array
) -> None:
    """found_i ← found_i + ⟨v_i, g⟩ over some columns, for some rows, four at a time."""
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


@njit(**_OPTIONS)
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


@njit(parallel=True, **_OPTIONS)
def _one_pass(g: Array, rows: Array, scratch: Array, projected: Array) -> None:
    """Threads share the rows, each read once: `scratch` takes each thread's −Vᵀ V g."""
    count, size, threads = len(rows), g.size, len(scratch)
    for t in prange(threads):
        found, share = np.zeros(count, g.dtype), scratch[t]
        last = count * (t + 1) // threads
        for i in range(count * t // threads, last, 4):
            _add_products(rows, i, min(i + 4, last), g, 0, size, found)
            _subtract(rows, i, min(i + 4, last), found, share, 0)
    for t in prange(threads):
        for j in range(size * t // threads, size * (t + 1) // threads):
            projected[j] = g[j]
            for share in range(threads):
                projected[j] += scratch[share, j]


@njit(parallel=True, **_OPTIONS)
def _two_passes(g: Array, rows: Array, scratch: Array, projected: Array) -> None:
    """Threads share the columns, each read twice: `scratch` takes each thread's part of V g."""
    count, size, threads = len(rows), g.size, len(scratch)
    for t in prange(threads):
        last = size * (t + 1) // threads
        for j in range(size * t // threads, last, _WIDTH):
            _add_products(rows, 0, count, g, j, min(j + _WIDTH, last), scratch[t])
    found = scratch.sum(0)
    for t in prange(threads):
        last = size * (t + 1) // threads
        for j in range(size * t // threads, last, _WIDTH):
            part = projected[j : min(j + _WIDTH, last)]
            part[:] = g[j : j + part.size]
            _subtract(rows, 0, count, found, part, j)
