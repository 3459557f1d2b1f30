"""Singular value decompositions of features, read to their numerical rank."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from forgetless.linalg import float64, orthonormalize
from forgetless.support.errors import require
from forgetless.support.validation import SHARE

# A singular value at or below this share of the largest counts as zero. Gram matrices in float64
# resolve singular values to about 1e-8 of the largest, so this is safe for those as well.
RTOL = 1e-6


@final
@dataclass(frozen=True)
class Factors:
    """The SVD φ = U Σ V of features of rank r, with the *rows* of V orthonormal.

    Attributes:
        u: U, (n, r), orthonormal columns.
        s: the diagonal of Σ, (r,), decreasing and positive.
        v: V, (r, p), orthonormal rows; the paper's Vᵀ.
    """

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """How many singular values are not zero."""
        return len(self.s)

    def sigma(self, index: int) -> float:
        """σ_{index+1}: the singular value at an index from 0, and 0 beyond the rank."""
        return float(self.s[index]) if index < self.rank else 0.0

    def dense(self) -> Tensor:
        """U Σ V, (n, p)."""
        product: Tensor = (self.u * self.s) @ self.v
        return product


def factors(features: Tensor, *, rtol: float = RTOL, scale: float | None = None) -> Factors:
    """The SVD of features, in float64, without the directions that are rounding.

    φ(X) = U Σ V, as in the theorem (CF for SGD). Duplicated samples and other rank deficiency only
    make r smaller.

    Arguments:
        features: φ, (n, p).
        rtol: singular values at or below rtol · scale count as zero.
        scale: what that is relative to; the largest singular value if None.
    """
    check_matrix("features", features)
    check_rtol(rtol)
    u, s, v = torch.linalg.svd(float64(features).detach(), full_matrices=False)
    reference = float(s[0]) if scale is None else scale
    rank = int((s > rtol * reference).sum())
    return Factors(u[:, :rank], s[:rank], v[:rank])


def project_rows(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows T with T = I − Bᵀ B: what is left of each row beside the basis.

    Arguments:
        rows: (n, p).
        basis: B, (K, p), orthonormal rows; K = 0 is T = I.
    """
    if len(basis) == 0:
        return rows
    for _ in range(2):  # the second time for what rounding left of the first
        rows = rows - (rows @ basis.T) @ basis
    return rows


def extend_basis(basis: Tensor, vectors: Tensor, rtol: float) -> Tensor:
    """The basis with orthonormal rows added for what the vectors span beside it.

    A vector counts by its direction, not by its length. What is left of unit vectors beside the
    basis, and beside each other, counts as nothing at or below rtol.

    Arguments:
        basis: (K, p), orthonormal rows.
        vectors: (m, p), any rank.

    Returns:
        (K + r, p) with r ≤ m.
    """
    lengths = vector_norm(vectors, dim=1, keepdim=True)
    unit = vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny)
    if len(unit) == 0:
        return basis
    _, s, v = torch.linalg.svd(project_rows(unit, basis), full_matrices=False)
    return torch.cat([basis, orthonormalize(v[s > rtol], against=basis)])


def check_factors(name: str, value: Any) -> None:
    """Require an SVD that `factors` made."""
    kind = type(value).__name__
    require(isinstance(value, Factors), name, kind, "the SVD of features, from `factors`")


def check_matrix(name: str, matrix: Any) -> None:
    """Require a matrix (n, p) that is not empty and has only finite entries."""
    accepted = "a matrix (n, p) with n and p at least 1"
    require(isinstance(matrix, Tensor), name, type(matrix).__name__, accepted)
    require(matrix.dim() == 2 and matrix.numel() > 0, name, tuple(matrix.shape), accepted)
    check_finite(name, matrix)


def check_finite(name: str, tensor: Tensor) -> None:
    """Require that there is no NaN and no infinity."""
    bad = int((~torch.isfinite(tensor)).sum())
    require(bad == 0, name, f"with {bad} NaN or infinite entries", "finite")


def check_rtol(rtol: float) -> None:
    """Require a relative cutoff that leaves something."""
    SHARE.check("rtol", rtol)
