"""The theory from Gram matrices alone, for n much smaller than p.

A grid holds the blocks K_st = φ_s φ_tᵀ, (n_s, n_t), for all pairs of T tasks.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from forgetless.linalg import TINY, float64
from forgetless.support.errors import require
from forgetless.support.options import SHARE
from forgetless.theory.svd import RTOL, Protected, check_matrix, projected

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
