"""Overlap of two tasks and structure of the kernel, from features or from Gram matrices alone.

A grid holds the blocks K_st = φ_s φ_tᵀ, (n_s, n_t), for all pairs of T tasks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from forgetless.linalg import TINY, float64, orthonormalize, project_out
from forgetless.support.validation import SHARE, require

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

    Example:
        >>> right, up = torch.eye(2, dtype=torch.float64)
        >>> diagonal = factors((right + up).unsqueeze(0))
        >>> overlap_spectrum(overlap(factors(right.unsqueeze(0)), diagonal)) ** 2  # cos² 45°
        tensor([0.5000], dtype=torch.float64)
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


Grid = Sequence[Sequence[Tensor]]


class KernelFeatures(Protocol):
    """Features with their inner products, such as `forgetless.tangent.TangentFeatures`."""

    def gram(self) -> Tensor:
        """φ φᵀ, (n, n)."""

    def dense(self) -> Tensor:
        """φ as a matrix (n, p)."""

    def cross_gram(self, other: Self, /) -> Tensor:
        """φ φ'ᵀ, (n, n')."""

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """φ v: (p, k) → (n, k)."""


def gram_grid(features: Sequence[KernelFeatures]) -> list[list[Tensor]]:
    """The grid of the blocks K_st = φ_s φ_tᵀ; those below the diagonal are transposes."""
    require(len(features) > 0, "features", "none", "those of one task or more")
    grid: list[list[Tensor]] = []
    for s, phi in enumerate(features):
        left = [grid[t][s].T for t in range(s)]
        grid.append([*left, phi.gram(), *(phi.cross_gram(other) for other in features[s + 1 :])])
    return grid


def coordinates(grams: Grid, *, rtol: float = RTOL) -> list[Tensor]:
    """Features Z_t, (n_t, r), in an orthonormal basis of all tasks' joint row space.

    With Q Λ Qᵀ the eigendecomposition of the joint Gram matrix, Z = Q Λ^½, so Z_s Z_tᵀ = K_st: an
    isometry, so all functions of features φ give the same for Z, which has r ≤ Σ n_t columns.

    Arguments:
        grams: K_st = φ_s φ_tᵀ, T × T blocks.
        rtol: directions with √eigenvalue at or below rtol · √(largest eigenvalue) are left out.
    """
    joint, sizes = _joint(grams)
    roots, vectors = _roots(joint, rtol)
    return list((vectors * roots).split(sizes))


def gram_overlap(source: Tensor, cross: Tensor, target: Tensor, *, rtol: float = RTOL) -> Tensor:
    """O^{s→k} = W_sᵀ C W_k with W = U Σ⁻¹ and φ φᵀ = U Σ² Uᵀ, without V or φ, (r_s, r_k).

    Equal to `overlap` up to the signs of singular vectors.

    Arguments:
        source, target: φ_s φ_sᵀ and φ_k φ_kᵀ.
        cross: C = φ_s T_{k−1} φ_kᵀ, (n_s, n_k).
        rtol: relative cutoff of singular values.
    """
    (source_roots, u), (target_roots, v) = (_roots(float64(k), rtol) for k in (source, target))
    return (u / source_roots).T @ float64(cross) @ (v / target_roots)


def operator_overlap(
    source: KernelFeatures,
    target: KernelFeatures,
    basis: Protected | None = None,
    *,
    rtol: float = RTOL,
) -> Tensor:
    """`gram_overlap` of features, with φ_s T_{k−1} φ_kᵀ = φ_s φ_kᵀ − φ_s Bᵀ B φ_kᵀ, (r_s, r_k).

    Arguments:
        source, target: φ_s and φ_k, as operators.
        basis: B_{k−1}, (K, p), orthonormal rows, or rows of zeros; or T_{k−1}, a function of rows
            (n, p), for which φ_k is computed as a matrix; None is T = I.
        rtol: relative cutoff of singular values. For features in float32, 1e-4 keeps the rounding
            of `B φᵀ` below 1e-3 of a cosine.
    """
    cross = source.cross_gram(target)
    if isinstance(basis, Tensor):
        if len(basis):
            cross = cross - float64(source @ basis.T) @ float64(target @ basis.T).T
    elif basis is not None:
        cross = float64(source @ projected(target.dense(), basis).T)
    return gram_overlap(source.gram(), cross, target.gram(), rtol=rtol)


def unprotected_share(features: KernelFeatures, basis: Protected | None) -> float:
    """‖φ T‖² / ‖φ‖² in the Frobenius norm: what steps within the range of T may still change.

    Arguments:
        features: φ, as an operator.
        basis: as for `operator_overlap`.
    """
    if basis is None:
        return 1.0
    whole = float(float64(features.gram()).trace())
    require(whole > 0, "features", "all zero", "features that are not zero")
    if isinstance(basis, Tensor):
        left = whole - float(float64(features @ basis.T).square().sum()) if len(basis) else whole
    else:
        left = float(float64(projected(features.dense(), basis)).square().sum())
    return min(1.0, max(0.0, left / whole))


def _joint(grams: Grid) -> tuple[Tensor, list[int]]:
    """The joint Gram matrix (N, N) in float64, checked, and the tasks' numbers of samples."""
    require(len(grams) > 0, "grams", "empty", "a T × T grid of blocks")
    shape = [len(row) for row in grams]
    require(set(shape) == {len(grams)}, "grams", f"rows of {shape} blocks", "a T × T grid")
    sizes = [len(grams[t][t]) for t in range(len(grams))]
    for s, row in enumerate(grams):
        for t, block in enumerate(row):
            name = f"grams[{s}][{t}]"
            check_matrix(name, block)
            expected = (sizes[s], sizes[t])
            require(block.shape == expected, name, tuple(block.shape), f"of shape {expected}")
    joint = torch.cat([torch.cat([float64(b).detach() for b in row], dim=1) for row in grams])
    asymmetry = float((joint - joint.T).abs().max() / joint.abs().max().clamp_min(TINY))
    require(asymmetry < 1e-4, "grams", f"off by {asymmetry:.1e}", "symmetric: K_ts = K_stᵀ")
    return (joint + joint.T) / 2, sizes


def _roots(gram: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Σ (r,), decreasing, and U (n, r) of a Gram matrix U Σ² Uᵀ, to its numerical rank."""
    SHARE.check("rtol", rtol)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    top = values[0].clamp_min(0)
    semidefinite = bool(values[-1] >= -1e-4 * top)
    smallest = f"with an eigenvalue {float(values[-1]):.1e}"
    require(semidefinite, "grams", smallest, "positive semi-definite: blocks φ_s φ_tᵀ")
    rank = int((values > rtol**2 * top).sum())
    return values[:rank].sqrt(), vectors[:, :rank]


def explained_variance(gram: Tensor, *, centred: bool = False) -> Tensor:
    """The share of the features' variance that the top 1, 2, …, n components explain, (n,).

    Σ_{i≤d} σ_i² / Σ_i σ_i² with σ the singular values of φ, from φ φᵀ = U Σ² Uᵀ. The paper's table
    "percentage of variance explained" is 100 times this at some d.

    Arguments:
        gram: φ φᵀ, (n, n).
        centred: subtract the mean feature first, as PCA does; the theory does not.
    """
    _check_square("gram", gram)
    gram = float64(gram).detach()
    if centred:
        gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    values = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)
    total = float(values.sum())
    require(total > 0, "gram", f"with a variance of {total}", "of features that vary")
    curve: Tensor = values.cumsum(0) / total
    return curve


def explained_at(gram: Tensor, counts: Sequence[int], *, centred: bool = False) -> Tensor:
    """The explained variance at some numbers of components, (len(counts),).

    Arguments:
        gram: φ φᵀ, (n, n).
        counts: numbers of components, 1 to n.
    """
    curve = explained_variance(gram, centred=centred)
    valid = all(1 <= count <= len(curve) for count in counts)
    require(valid, "counts", list(counts), f"from 1 to the {len(curve)} samples")
    return curve[torch.tensor([count - 1 for count in counts], dtype=torch.long)]


def kernel_change(before: Tensor, after: Tensor) -> float:
    """‖K' − K‖ / ‖K‖ in the Frobenius norm: the relative change of the tangent kernel in training.

    The theory assumes a constant kernel, 0 (appendix "NTK changes").

    Arguments:
        before, after: φ φᵀ on the same samples, (n, n) each.
    """
    before, after = _pair(before, after)
    return float((after - before).norm() / before.norm())


def kernel_alignment(before: Tensor, after: Tensor) -> float:
    """⟨K, K'⟩ / (‖K‖ ‖K'‖), the cosine of two kernels: 1 if only the scale differs.

    Arguments:
        before, after: φ φᵀ on the same samples, (n, n) each.
    """
    before, after = _pair(before, after)
    return float((before * after).sum() / (before.norm() * after.norm()))


def _pair(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    for name, gram in (("before", before), ("after", after)):
        _check_square(name, gram)
        require(bool(gram.any()), name, "all zero", "a kernel that is not zero")
    shapes = tuple(after.shape), f"of shape {tuple(before.shape)}, as before"
    require(before.shape == after.shape, "after", *shapes)
    return float64(before).detach(), float64(after).detach()


def _check_square(name: str, gram: Any) -> None:
    accepted = "a kernel φ φᵀ (n, n), which features give by `gram()`"
    require(isinstance(gram, Tensor), name, type(gram).__name__, accepted)
    check_matrix(name, gram)
    require(gram.shape[0] == gram.shape[1], name, tuple(gram.shape), "a square matrix (n, n)")
