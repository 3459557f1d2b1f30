"""SVDs of features to their numerical rank, and the NTK overlap of two tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from forgetless.linalg import TINY, float64, orthonormalize, project_out
from forgetless.support.errors import require
from forgetless.support.options import SHARE

# What a projection T leaves out: B, (K, p), orthonormal rows with T = I − Bᵀ B; or T itself, as a
# function of rows (n, p), where B would be too large.
Protected = Tensor | Callable[[Tensor], Tensor]

# Singular values at or below this share of the largest count as zero. Float64 Gram matrices resolve
# singular values to about 1e-8 of the largest, so this is safe for them as well.
RTOL = 1e-6
# The same for features computed in float32.
FLOAT32_RTOL = 3e-4
# An orthogonal projection that is stored in float32 is one to this share of a vector's length.
_STRAIGHT = 1e-4


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
        """The number of nonzero singular values."""
        return len(self.s)

    def sigma(self, index: int) -> float:
        """σ_{index+1}: the singular value at an index from 0, and 0 beyond the rank."""
        return float(self.s[index]) if index < self.rank else 0.0

    def dense(self) -> Tensor:
        """U Σ V, (n, p)."""
        product: Tensor = (self.u * self.s) @ self.v
        return product


def factors(features: Tensor, *, rtol: float = RTOL, scale: float | None = None) -> Factors:
    """The SVD φ(X) = U Σ V of features, in float64, to their numerical rank.

    Theorem (CF for SGD). Duplicated samples and other rank deficiency only make r smaller.

    Arguments:
        features: φ, (n, p).
        rtol: singular values at or below rtol · scale count as zero.
        scale: the largest singular value if None.
    """
    check_matrix("features", features)
    SHARE.check("rtol", rtol)
    u, s, v = torch.linalg.svd(float64(features).detach(), full_matrices=False)
    reference = float(s[0]) if scale is None else scale
    rank = int((s > rtol * reference).sum())
    return Factors(u[:, :rank], s[:rank], v[:rank])


def extend_basis(basis: Tensor, vectors: Tensor, rtol: float) -> Tensor:
    """The basis, extended by orthonormal rows to the span of the vectors.

    Vectors are normalised first. Directions in which the projected unit vectors have a singular
    value at or below rtol are dropped.

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
    _, s, v = torch.linalg.svd(project_out(unit, basis, passes=2), full_matrices=False)
    return torch.cat([basis, orthonormalize(v[s > rtol], against=basis)])


def projected(rows: Tensor, protected: Protected) -> Tensor:
    """Rows · T, (n, p), without what is protected."""
    if isinstance(protected, Tensor):
        return project_out(rows, protected.to(rows), passes=2)
    return protected(rows).to(rows)


def check_projection(name: str, rows: Tensor, protected: Protected) -> None:
    """Require T, on these rows, to be an orthogonal projection: T² = T = Tᵀ."""
    once = projected(rows, protected)
    require(once.shape == rows.shape, name, tuple(once.shape), f"of shape {tuple(rows.shape)}")
    length = float(vector_norm(rows))
    twice = float(vector_norm(projected(once, protected) - once))
    product = rows @ once.T
    odd = float(vector_norm(product - product.T)) / max(length, TINY)
    accepted = "an orthogonal projection, T² = T = Tᵀ"
    for error in (twice, odd):
        require(error <= _STRAIGHT * length, name, f"off by {error / length:.1e}", accepted)


def overlap(source: Factors, target: Factors, basis: Protected | None = None) -> Tensor:
    """The NTK overlap matrix O^{s→k} = V_s T_{k−1} V_kᵀ, (r_s, r_k), with T_{k−1} = I − Bᵀ B.

    Theorem (CF for SGD) with T = I, corollaries (CF for GEM-NT) and (forgetting for PCA-OGD) with
    the directions that those methods protect. The paper's V has orthonormal columns, here rows.

    Arguments:
        source, target: the SVDs of φ_s and φ_k.
        basis: B_{k−1}, (K, p), orthonormal rows, such as `Learned.bases[k]`; or T_{k−1},
            a function of rows (n, p); None is T = I.
    """
    _check_pair(source, target)
    p = source.v.shape[1]
    require(target.v.shape[1] == p, "target", tuple(target.v.shape), f"with {p} parameters")
    rows = target.v
    if basis is not None:
        if isinstance(basis, Tensor):
            fits = basis.dim() == 2 and basis.shape[1] == p
            require(fits, "basis", tuple(basis.shape), f"orthonormal rows (K, {p})")
        rows = projected(rows, basis)
    product: Tensor = source.v @ rows.T
    return product


def overlap_spectrum(matrix: Tensor) -> Tensor:
    """The singular values of an overlap matrix, decreasing, (min(r_s, r_k),).

    The paper calls them the eigenvalues of O. For SGD they are the cosines Θ^{s→k} of the principal
    angles (corollary "bounding CF with angle between source and target subspace").
    """
    if matrix.numel() == 0:
        return matrix.new_zeros(0)
    values: Tensor = torch.linalg.svdvals(matrix)
    return values


def principal_angles(source: Factors, target: Factors) -> Tensor:
    """The principal angles between two tasks' subspaces in radians, increasing, (min(r_s, r_k),).

    cos θ_i are the singular values of V_s V_kᵀ, sin θ_i those of V_k (I − V_sᵀ V_s). Small angles
    are computed from the sine, which is more accurate (Björck and Golub 1973).
    """
    _check_pair(source, target)
    if source.rank < target.rank:
        source, target = target, source
    cosines = overlap_spectrum(overlap(source, target)).clamp_max(1.0)
    sines = overlap_spectrum(project_out(target.v, source.v, passes=2)).flip(0).clamp_max(1.0)
    return torch.where(sines.square() < 0.5, sines.asin(), cosines.acos())


def _check_pair(source: Any, target: Any) -> None:
    for name, value in (("source", source), ("target", target)):
        kind = type(value).__name__
        require(isinstance(value, Factors), name, kind, "the SVD of features, from `factors`")


def check_matrix(name: str, matrix: Any) -> None:
    """Require a matrix (n, p) that is not empty and has only finite entries."""
    accepted = "a matrix (n, p) with n and p at least 1"
    require(isinstance(matrix, Tensor), name, type(matrix).__name__, accepted)
    require(matrix.dim() == 2 and matrix.numel() > 0, name, tuple(matrix.shape), accepted)
    check_finite(name, matrix)


def check_finite(name: str, tensor: Tensor) -> None:
    """Require finite entries."""
    bad = int((~torch.isfinite(tensor)).sum())
    require(bad == 0, name, f"with {bad} NaN or infinite entries", "finite")
