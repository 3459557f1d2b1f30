"""The largest eigenvalues of a Gram matrix: LAPACK, block Krylov, or Chebyshev filters."""

from collections.abc import Sequence
from math import inf, isfinite, log, log10, sqrt
from numbers import Integral

import numpy as np
import torch
from scipy.linalg import eigh
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.validation import DataError, require

_GRAM_ROUNDING = 2e-13  # share of the largest eigenvalue that is rounding in float64
_BLOCK = 24  # vectors in a product; multiples of 24 are fast
_SMALL = 1000  # samples below which LAPACK is fast enough
_EXTRA = 24  # least number of vectors in addition to the wanted ones
_ROUNDS = 12  # of filtering
_RANGE = 24.0  # largest ratio of a filter's gains, in powers of ten


def principal_weights(
    gram: Tensor, components: int | float, *, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float]:
    """The top directions of features φ as weighted sums of samples, from the Gram matrix alone.

    Arguments:
        gram: φ φᵀ, (n, n).
        components: how many (an int), or the share of the variance that they explain together.
        centred: subtract the mean feature first.
        dtype: of the features.

    Returns:
        singular values (k,) and W = Σ⁻¹ Uᵀ (k, n) in float64, and Σ_i ‖φ_i‖² (after centring).
    """
    return principal_weights_of_each([gram], components, centred=centred, dtype=dtype)[0]


def principal_weights_of_each(
    grams: Sequence[Tensor], components: int | float, *, centred: bool, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, float]]:
    """`principal_weights` of several Gram matrices, all at once on a GPU."""
    by_share = not isinstance(components, Integral)
    fits = 0 < components < 1 if by_share else components >= 1
    accepted = "a count of at least 1 or a share in (0, 1)"
    require(fits and not isinstance(components, bool), "components", components, accepted)
    # Before centring: equal samples leave nothing but rounding.
    noise = [_noise(gram) for gram in grams]
    if centred:
        grams = [_centred(gram) for gram in grams]
    count = None if by_share else int(components)
    found = []
    pairs = _leading_eigenpairs_of_each(grams, count, dtype)
    for gram, rounding, (values, vectors) in zip(grams, noise, pairs, strict=True):
        total = float(float64(gram.diagonal()).sum())
        kept = int((values > rounding).sum())
        if by_share:
            explained = values.cumsum(0) / total
            kept = min(kept, int((explained < components).sum()) + 1)
        weights = (vectors[:, :kept] / values[:kept].sqrt()).T
        if centred:
            weights = weights - weights.mean(1, keepdim=True)
        found.append((values[:kept].sqrt(), weights, total))
    return found


def _noise(gram: Tensor) -> float:
    """The largest eigenvalue that rounding of a Gram matrix's entries can make.

    Entries have errors of about ε ‖φ_i‖ ‖φ_j‖, the matrix one of 2 ε max ‖φ_i‖ √(Σ ‖φ_j‖²). Some
    products are less accurate: five times that.
    """
    diagonal = float64(gram.diagonal())
    most, total = diagonal.max().item(), diagonal.sum().item()
    if not isfinite(total):
        raise DataError("the features of the samples are NaN or infinite")
    return 10 * torch.finfo(gram.dtype).eps * sqrt(max(0.0, most * total))


def _centred(gram: Tensor) -> Tensor:
    """The Gram matrix of centred features."""
    exact = float64(gram)
    return (exact - exact.mean(0) - exact.mean(1, keepdim=True) + exact.mean()).to(gram)


def top_eigenpairs(
    gram: Tensor, count: int | None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a Gram matrix and their eigenvectors, by LAPACK in float64.

    Arguments, returns: as for `leading_eigenpairs`.
    """
    n, gram = len(gram), float64(gram)
    if gram.is_cuda:
        values, vectors = torch.linalg.eigh(gram)
    else:
        # LAPACK's subset solver; torch has only the full one.
        first = 0 if count is None else max(n - count, 0)
        w, u = eigh(gram.numpy(), subset_by_index=(first, n - 1), check_finite=False)
        values, vectors = torch.from_numpy(w), torch.from_numpy(np.ascontiguousarray(u))
    return _without_noise(values.flip(0)[:count], vectors.flip(1)[:, :count], dtype)


def _without_noise(values: Tensor, vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decreasing eigenvalues (k,) and vectors (n, k), without those made by rounding to dtype."""
    noise = max(_GRAM_ROUNDING, torch.finfo(dtype).eps)  # 1e-7 for features in float32
    keep = int((values > noise * values[:1].clamp_min(0)).sum())
    return values[:keep], vectors[:, :keep]


def leading_eigenpairs(
    gram: Tensor, count: int | None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a Gram matrix and their eigenvectors, by the fastest solver.

    For few eigenpairs of a large matrix, block Lanczos with full reorthogonalisation: in the span Q
    of B, K B, K² B, … the projected matrix Qᵀ K Q is small. Its eigenpairs are accepted once the
    residuals ‖K u − λ u‖ are what an error of ε in the features makes, ε √(λ λ₁). A GPU, which does
    few large products faster than many small ones, uses Chebyshev-filtered subspace iteration
    instead. In all other cases, and without convergence, LAPACK.

    Arguments:
        gram: K, (n, n), symmetric positive semi-definite. Products with it are computed in its own
            precision, everything else in float64.
        count: how many at most, without those that are noise; None means all.
        dtype: of the features, which decides ε and what is noise.

    Returns:
        eigenvalues (k,), decreasing, and eigenvectors (n, k), on the device of `gram`.
    """
    if count is not None and _are_few(count, len(gram)):
        solve = chebyshev_eigenpairs if gram.is_cuda else _krylov_eigenpairs
        found = solve(gram, count, _tolerance(dtype))
        if found is not None:
            return _without_noise(*found, dtype)
    return top_eigenpairs(gram, count, dtype=dtype)


def _leading_eigenpairs_of_each(
    grams: Sequence[Tensor], count: int | None, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """`leading_eigenpairs` of several matrices, all at once on a GPU."""
    sizes = {len(gram) for gram in grams}
    at_once = len(grams) > 1 and len(sizes) == 1 and grams[0].is_cuda
    if at_once and count is not None and _are_few(count, max(sizes)):
        found = chebyshev_eigenpairs(torch.stack(list(grams)), count, _tolerance(dtype))
        if found is not None:
            return [_without_noise(*pairs, dtype) for pairs in zip(*found, strict=True)]
    return [leading_eigenpairs(gram, count, dtype=dtype) for gram in grams]


def _are_few(count: int, size: int) -> bool:
    """Whether an iterative solver is faster than LAPACK.

    Its space has up to a quarter of n dimensions, and is first checked at three times the count.
    """
    return size >= max(_SMALL, 13 * count)


def _tolerance(dtype: torch.dtype) -> float:
    """Largest residual relative to √(λ λ₁), for features of that precision."""
    return max(1e-10, torch.finfo(dtype).eps)


def _krylov_eigenpairs(gram: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    n = len(gram)
    limit = n // 4 // _BLOCK * _BLOCK
    block = _orthonormal(_random_rows(gram))[0]
    basis = block.new_empty(limit, n)  # Q, rows
    projected = block.new_zeros(limit, limit)  # Q K Qᵀ
    check: float = 3 * count
    last: tuple[int, float] | None = None
    for start in range(0, limit, _BLOCK):
        stop = start + _BLOCK
        basis[start:stop] = block
        image, coefficients = _without(_times(block, gram), basis[:stop])
        projected[start:stop, :stop] = coefficients
        projected[:stop, start:stop] = coefficients.T
        block, norms = _orthonormal(image)
        if stop < check:
            continue
        values, vectors = torch.linalg.eigh(projected[:stop, :stop])
        values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
        # K u − λ u lies in the next block: u's part in the last block, times R of the step out.
        residuals = (norms @ vectors[start:]).norm(dim=0)
        excess = float((residuals / (tolerance * (values[0] * values).sqrt())).max())
        if excess <= 1:
            vectors = basis[:stop].T @ vectors
            # Once the space is invariant, new directions are rounding, not orthogonal to it.
            off = (vectors.T @ vectors - torch.eye(count).to(vectors)).abs().max()
            complete = float(off) <= 1e-10 and not _missed_one(gram, values, vectors)
            return (values, vectors) if complete else None
        check, last = _next_check(stop, excess, last), (stop, excess)
    return None


def _next_check(size: int, excess: float, last: tuple[int, float] | None) -> float:
    """The size at which the residuals will be small enough, extrapolated from two checks."""
    if last is None or not excess < last[1] < inf:
        return size + 2 * _BLOCK
    rate = log(last[1] / excess) / (size - last[0])
    return min(size + log(excess) / rate, size + 6 * _BLOCK)


def _times(rows: Tensor, gram: Tensor) -> Tensor:
    """Q K in the precision of K, computed as K Qᵀ, which is faster."""
    return float64((gram @ rows.to(gram).T).T.contiguous())


def _without(rows: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (b, n) less their part in the basis (k, n), and that part's coefficients (b, k)."""
    inside = rows @ basis.T
    rest = rows - inside @ basis
    # A short remainder is orthogonal to the basis only after a second pass.
    if bool((rest.norm(dim=1) < 0.1 * inside.norm(dim=1)).any()):
        more = rest @ basis.T
        return rest - more @ basis, inside + more
    return rest, inside


def _missed_one(gram: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether a few power iterations orthogonal to the eigenvectors show a larger eigenvalue.

    A block of b vectors finds at most b eigenvectors of one eigenvalue.
    """
    rows = _random_rows(gram)
    for _ in range(3):
        rows = rows - (rows @ vectors) @ vectors.T
        rows = _orthonormal(rows)[0]
        image = _times(rows, gram)
        seen = torch.linalg.eigvalsh(image @ rows.T)[-1]
        rows = image
    return bool(seen > values[-1] * (1 + 1e-6))


def _random_rows(gram: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(gram))
    rows = torch.randn(_BLOCK, len(gram), dtype=torch.float64, generator=generator)
    return rows.to(float64(gram[:0]))


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Q with orthonormal rows and R with rowsᵀ = Qᵀ R."""
    q, r = torch.linalg.qr(rows.T)
    return q.T.contiguous(), r


def chebyshev_eigenpairs(
    gram: Tensor, count: int, tolerance: float
) -> tuple[Tensor, Tensor] | None:
    """Subspace iteration with half as many vectors again, by Chebyshev polynomials of K.

    On [0, λ_b], λ_b the smallest Ritz value, the polynomial is at most one; above, it grows fast.
    All matrices take the same rounds until the last has converged; those that converge earlier keep
    their result.

    Arguments:
        gram: K, (*, n, n), symmetric positive semi-definite.
        count: how many.
        tolerance: of a residual ‖K u − λ u‖, relative to √(λ λ₁).

    Returns:
        eigenvalues (*, count), decreasing, and eigenvectors (*, n, count) in float64; None without
        convergence.
    """
    exact, n = float64(gram), gram.shape[-1]
    generator = torch.Generator(exact.device).manual_seed(n)
    shape = n, count + max(_EXTRA, count // 2)
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
        # A matrix that has converged only has to stay finite.
        block = _chebyshev(exact, basis, image, torch.where(done, largest, smallest / 2), degree)
    return None


def orthonormal_columns(block: Tensor) -> Tensor:
    """An orthonormal basis of the columns (*, n, k), by matrix products, which a GPU does faster.

    Cholesky QR three times, the first time shifted so that nearly singular matrices can be factored
    (Fukaya et al. 2020). Householder QR if that fails.
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
    """T_degree(K / half − 1) applied to a block of vectors, given its image K · block."""
    half = half[..., None, None]
    before, now = block, image / half - block
    twice = gram * (2 / half)  # 2 (K / half − 1)
    twice.diagonal(dim1=-2, dim2=-1).sub_(2)
    for _ in range(degree - 1):
        before, now = now, twice @ now - before
    return now
