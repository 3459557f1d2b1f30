"""g − Vᵀ V g of stored rows V: the fastest way for where they are."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

# Rows of a block that is read twice in a row, and should come from the cache the second time.
_HEIGHT = 4
_CACHED = 1 << 24
# Rows that are elsewhere, or of another type, are copied in blocks of this many bytes.
_COPIED = 1 << 26
# Bytes of rows below which a second thread costs more than it helps.
_WORTHWHILE = 1 << 21
_ALIGNMENT = 128  # bytes of a line of a GPU's cache: rows across its borders take a third longer


def project_out_rows(g: Tensor, rows: Tensor) -> Tensor:
    """g̃ = g − Σ_b V_bᵀ V_b g over blocks of orthonormal rows, each block read once.

    Rows that a cache cannot hold are read twice, for V g and for Vᵀ times that. A GPU has a kernel
    that reads them once, where the chip can hold its share of a row.

    Arguments:
        g: (S, p).
        rows: V, (S, K, p), of any floating-point type, on any device.
    """
    if rows.shape[1] == 0:
        return g
    kernel = _kernel() if _suit_a_kernel(g, rows) else None
    projected = None if kernel is None else kernel(g.contiguous(), rows)
    if projected is not None:
        return projected
    each = [_project_out(one, basis) for one, basis in zip(g, rows, strict=True)]
    return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)


def _suit_a_kernel(g: Tensor, rows: Tensor) -> bool:
    return (
        g.dtype == torch.float32
        and g.device == rows.device
        and _has_kernels(rows)
        and rows.stride(2) == 1
        and not (torch.is_grad_enabled() and g.requires_grad)
    )


def _has_kernels(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in (torch.float32, torch.bfloat16)


@cache
def _kernel() -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """The kernel that the installed Triton can compile; None for two products."""
    try:
        from forgetless.subspace.kernels.onepass import project_out_in_one_pass
    except ImportError:  # no Triton, or one without its experimental language
        return None
    return project_out_in_one_pass


def _project_out(g: Tensor, basis: Tensor) -> Tensor:
    """One seed's g̃, (p,). PyTorch's products with a vector have one thread: several share rows."""
    threads = torch.get_num_threads() if g.device.type == "cpu" else 1
    if basis.nbytes < _WORTHWHILE or (torch.is_grad_enabled() and g.requires_grad):
        return g - _inside(g, basis)
    compiled = _compiled() if threads > 1 else None  # one thread gains too little
    projected = None if compiled is None else compiled(g, basis, threads)
    if projected is not None:
        return projected
    mine, *others = basis.chunk(threads)
    waiting = [_pool(threads, os.getpid()).submit(_without_gradient, g, part) for part in others]
    total = _inside(g, mine)
    for part in waiting:
        total += part.result()
    return g - total


@cache
def _compiled() -> Callable[[Tensor, Tensor, int], Tensor | None] | None:
    """The loops that Numba compiles; None without it, or where it can store nothing."""
    try:
        from forgetless.subspace.kernels.compiled import project_out_compiled
    except (ImportError, RuntimeError):
        return None
    return project_out_compiled


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


def aligned(like: Tensor, count: int) -> Tensor:
    """Zero rows (S, count, p) of the type of `like`, (S, ·, p), each at a multiple of 128 bytes."""
    step = _ALIGNMENT // like.element_size()
    seeds, size = like.shape[0], like.shape[-1]
    return like.new_zeros(seeds, count, -(-size // step) * step)[..., :size]


def laid_out(rows: Tensor) -> Tensor:
    """The same rows (S, K, p), aligned if a GPU's kernels will read them."""
    lined_up = rows.stride(1) * rows.element_size() % _ALIGNMENT == 0
    if lined_up or rows.shape[1] == 0 or not _has_kernels(rows):
        return rows
    return aligned(rows, rows.shape[1]).copy_(rows)
