"""The largest eigenvalues of a Gram matrix, by a block Krylov method where that is faster."""

import torch
from torch import Tensor

from forgetless.linalg import float64, top_eigenpairs

_BLOCK = 24  # vectors that are multiplied at once; products with multiples of 24 are fast
_SMALL = 1000  # samples below which LAPACK is fast enough


def leading_eigenpairs(
    gram: Tensor,
    count: int | None,
    tolerance: float = 1e-10,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """As `linalg.top_eigenpairs`, and faster for few eigenpairs of a large matrix.

    Block Lanczos with full reorthogonalisation: in the space Q of B, K B, K² B, … the projected
    matrix Qᵀ K Q is small, and its eigenpairs are those of K once the residuals ‖K u − λ u‖ are
    rounding. If the space would have to be too large, LAPACK solves the whole.

    Arguments:
        gram: K, (n, n), symmetric positive semi-definite.
        count: how many at most; None means all.
        tolerance: of the residuals, relative to the eigenvalue.
        dtype: of the features, which decides which small eigenvalues are noise.

    Returns:
        eigenvalues (k,), decreasing, and eigenvectors (n, k).
    """
    n = len(gram)
    if count is None or n < _SMALL or 10 * count > n:
        return top_eigenpairs(gram, count, dtype=dtype)
    gram = float64(gram)
    found = _krylov(gram, count, tolerance)
    if found is None or _missed_one(gram, *found):
        return top_eigenpairs(gram, count, dtype=dtype)
    return found


def _krylov(gram: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    n = len(gram)
    limit = n // 4 // _BLOCK * _BLOCK
    basis = gram.new_empty(limit, n)  # Q, rows
    projected = gram.new_zeros(limit, limit)  # Q K Qᵀ
    block = _orthonormal(_random_rows(gram))[0]
    check = 2 * count
    for start in range(0, limit, _BLOCK):
        stop = start + _BLOCK
        basis[start:stop] = block
        image = block @ gram
        coefficients = gram.new_zeros(_BLOCK, stop)
        for _ in range(2):  # twice is enough
            part = image @ basis[:stop].T
            image = image - part @ basis[:stop]
            coefficients += part
        projected[start:stop, :stop] = coefficients
        projected[:stop, start:stop] = coefficients.T
        block, norms = _orthonormal(image)
        if stop < check:
            continue
        check = stop + 2 * _BLOCK
        values, vectors = torch.linalg.eigh(projected[:stop, :stop])
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        # K u − λ u lies in the next block: what u has of the last one, times what led out of it.
        residuals = (norms @ vectors[start:]).norm(dim=0)
        if bool((residuals <= tolerance * values).all()):
            vectors = basis[:stop].T @ vectors
            # A space that has run out of directions goes on with rounding, not orthogonal to it.
            off = (vectors.T @ vectors - torch.eye(count).to(gram)).abs().max()
            return (values, vectors) if float(off) <= 1e-10 else None
    return None


def _missed_one(gram: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether a few steps of the power method outside the found space see a larger eigenvalue.

    A block of b vectors holds at most b eigenvectors of one eigenvalue.
    """
    rows = _random_rows(gram)
    for _ in range(3):
        rows = rows - (rows @ vectors) @ vectors.T
        rows = _orthonormal(rows)[0]
        image = rows @ gram
        seen = torch.linalg.eigvalsh(image @ rows.T)[-1]
        rows = image
    return bool(seen > values[-1] * (1 + 1e-6))


def _random_rows(gram: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(gram))
    rows = torch.randn(_BLOCK, len(gram), dtype=gram.dtype, generator=generator)
    return rows.to(gram.device)


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Q with orthonormal rows and R with rowsᵀ = Qᵀ R."""
    q, r = torch.linalg.qr(rows.T)
    return q.T.contiguous(), r
