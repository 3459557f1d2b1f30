"""The largest eigenvalues of Gram matrices on a GPU, where few large products are the fastest."""

from math import log10

import torch
from torch import Tensor

from forgetless.linalg import float64

_MORE = 24  # vectors at least beyond those that are wanted
_ROUNDS = 12  # of filtering, before it is given up
_RANGE = 24.0  # decimal powers by which a filter may tell eigenvectors apart


def filtered(gram: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Subspace iteration with half as many vectors again, a Chebyshev polynomial of K at a time.

    On [0, λ_b], λ_b the smallest Ritz value, the polynomial is at most one; above, it grows fast.
    All problems go through the same rounds, until the last of them is solved; what was found is
    put aside.

    Arguments:
        gram: K, (*, n, n), symmetric positive semi-definite.
        count: how many.
        tolerance: of a residual ‖K u − λ u‖, relative to √(λ λ₁).

    Returns:
        eigenvalues (*, count), decreasing, and eigenvectors (*, n, count) in float64; None if they
        were not found.
    """
    exact, n = float64(gram), gram.shape[-1]
    generator = torch.Generator(exact.device).manual_seed(n)
    shape = n, count + max(_MORE, count // 2)
    block = torch.randn(shape, generator=generator, dtype=exact.dtype, device=exact.device)
    block = exact @ (exact @ block)
    best: tuple[Tensor, Tensor] | None = None
    done = torch.zeros(gram.shape[:-2], dtype=torch.bool, device=exact.device)
    for _ in range(_ROUNDS):
        basis = orthonormal_columns(block / block.norm(dim=-2, keepdim=True))
        image = exact @ basis
        values, turn = torch.linalg.eigh(basis.mT @ image)
        values, turn = values.flip(-1), turn.flip(-1)
        basis, image = basis @ turn, image @ turn
        residuals = (image - basis * values.unsqueeze(-2)).norm(dim=-2)[..., :count]
        allowed = tolerance * (values[..., :1] * values[..., :count]).sqrt()
        here = values[..., :count], basis[..., :count].contiguous()
        best = here if best is None else (
            torch.where(done.unsqueeze(-1), best[0], here[0]),
            torch.where(done[..., None, None], best[1], here[1]),
        )  # fmt: skip
        done = done | (residuals <= allowed).all(-1)
        if bool(done.all()):
            return best
        largest, smallest = values[..., 0], values[..., -1]
        spreads = torch.where(smallest > 0, largest / smallest, torch.inf)
        spread = float(spreads.where(~done, 1).max())
        if not spread < torch.inf:
            return None
        degree = max(2, min(10, int(_RANGE / log10(4 * spread))))
        # Of one that is done nothing is wanted but that it stays finite.
        block = _chebyshev(exact, basis, image, torch.where(done, largest, smallest / 2), degree)
    return None


def orthonormal_columns(block: Tensor) -> Tensor:
    """An orthonormal basis of the columns (*, n, k), by products alone: QR takes a GPU longer.

    Cholesky QR three times, the first time shifted so that a matrix as good as singular can be
    factored (Fukaya et al. 2020). Where that fails, Householder's.
    """
    n, k = block.shape[-2:]
    basis, failures = block, []
    for round_ in range(3):
        gram = basis.mT @ basis
        if round_ == 0:
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            shift = 11 * (n * k + k * (k + 1)) * torch.finfo(gram.dtype).eps
            diagonal.add_(shift * diagonal.sum(-1, keepdim=True))
        factor, failed = torch.linalg.cholesky_ex(gram)
        basis = torch.linalg.solve_triangular(factor, basis.mT, upper=False).mT
        failures.append(failed)
    return torch.linalg.qr(block)[0] if bool(torch.stack(failures).any()) else basis


def _chebyshev(gram: Tensor, block: Tensor, image: Tensor, half: Tensor, degree: int) -> Tensor:
    """T_degree(K / half − 1) applied to a block of vectors, whose image K · block is known."""
    half = half[..., None, None]
    before, now = block, image / half - block
    twice = gram * (2 / half)  # 2 (K / half − 1)
    twice.diagonal(dim1=-2, dim2=-1).sub_(2)
    for _ in range(degree - 1):
        before, now = now, twice @ now - before
    return now
