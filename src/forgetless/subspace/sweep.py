"""Projection by one walk over stored rows, block by block."""

from collections.abc import Iterator

import torch
from torch import Tensor

from forgetless.subspace.rows import project_out_in_one_pass, project_out_in_two_passes

# A block of rows that is read twice in a row should come from the cache the second time.
_CACHED = 3 << 20
# Rows that come from elsewhere are copied in blocks of this many bytes.
_COPIED = 1 << 26


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
    out = g.clone()
    for one, basis in zip(out, rows, strict=True):
        for block in _blocks(basis, one):
            one.addmv_(block.T, block @ one, alpha=-1)
    return out


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
    row = basis.shape[1] * like.element_size()
    here = basis.device == like.device
    size = _CACHED if here else _COPIED
    if here and basis.dtype == like.dtype and (row > size or like.is_cuda):
        yield basis
        return
    for block in basis.split(max(1, size // max(1, row))):
        yield block.to(like, non_blocking=True)
