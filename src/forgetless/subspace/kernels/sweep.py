"""Projection by one walk over stored rows, block by block."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from forgetless.subspace.kernels.compiled import can_be_compiled, project_out_compiled
from forgetless.subspace.kernels.rows import project_out_in_one_pass, project_out_in_two_passes

# Rows of a block that is read twice in a row, and should come from the cache the second time.
_HEIGHT = 4
_CACHED = 1 << 24
# Rows that come from elsewhere, or in another type, are copied in blocks of this many bytes.
_COPIED = 1 << 26
# Bytes of rows below which a second thread costs more than it helps.
_WORTHWHILE = 1 << 21


def project_out_rows(g: Tensor, rows: Tensor) -> Tensor:
    """g̃ = g − Σ_b V_bᵀ V_b g over blocks of orthonormal rows, each block read once.

    Rows that a cache cannot hold are read twice: for V g, and for Vᵀ times that. On a GPU kernels
    do it, in one pass if the chip can hold its share of a row.

    Arguments:
        g: (S, p).
        rows: V, (S, K, p), of any floating-point type, on any device.
    """
    if rows.shape[1] == 0:
        return g
    for kernel in (project_out_in_one_pass, project_out_in_two_passes):
        projected = kernel(g, rows)
        if projected is not None:
            return projected
    each = [_project_out(one, basis) for one, basis in zip(g, rows, strict=True)]
    return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)


def _project_out(g: Tensor, basis: Tensor) -> Tensor:
    """One seed's g̃, (p,). PyTorch's products with a vector have one thread: several share rows."""
    threads = torch.get_num_threads() if g.device.type == "cpu" else 1
    if basis.nbytes < _WORTHWHILE or (torch.is_grad_enabled() and g.requires_grad):
        return g - _inside(g, basis)
    if can_be_compiled(g, basis):
        return project_out_compiled(g, basis, threads)
    mine, *others = basis.chunk(threads)
    waiting = [_pool(threads, os.getpid()).submit(_without_gradient, g, part) for part in others]
    total = _inside(g, mine)
    for part in waiting:
        total += part.result()
    return g - total


def _inside(g: Tensor, basis: Tensor) -> Tensor:
    """Vᵀ V g, (p,), with one thread."""
    out = torch.zeros_like(g)
    for block in _blocks(basis, g):
        out.addmv_(block.T, block @ g)
    return out


def _without_gradient(g: Tensor, basis: Tensor) -> Tensor:
    with torch.no_grad():
        return _inside(g, basis)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(max(1, threads - 1), "forgetless")


def coefficients(g: Tensor, rows: Tensor) -> Tensor:
    """V g: (S, p), (S, K, p) → (S, K)."""
    found = [
        torch.cat([block @ one for block in _blocks(basis, one)])
        for one, basis in zip(g, rows, strict=True)
    ]
    return torch.stack(found)


def combination(weights: Tensor, rows: Tensor) -> Tensor:
    """Vᵀ c: (S, K), (S, K, p) → (S, p)."""
    out = weights.new_zeros(rows.shape[0], rows.shape[2])
    for one, of_one, basis in zip(out, weights, rows, strict=True):
        start = 0
        for block in _blocks(basis, one):
            one.add_(of_one[start : start + len(block)] @ block)
            start += len(block)
    return out


def _blocks(basis: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The rows (K, p) a few at a time, on the device and in the type of `like`."""
    row = max(1, basis.shape[1] * like.element_size())
    here = basis.device == like.device and not like.is_cuda
    height = _HEIGHT if here and _HEIGHT * row <= _CACHED else max(1, _COPIED // row)
    if basis.device == like.device and basis.dtype == like.dtype and height != _HEIGHT:
        height = max(1, len(basis))  # nothing to copy, and no cache to stay in
    for block in basis.split(height):
        # A copy to the CPU would be read before it is there.
        yield block.to(like, non_blocking=like.is_cuda)
