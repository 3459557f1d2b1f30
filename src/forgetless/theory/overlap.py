"""The NTK overlap matrix O^{s→k} and the angles between the subspaces of two tasks."""

import torch
from torch import Tensor

from forgetless.support.errors import require
from forgetless.theory.factors import Factors, check_factors, project_rows
from forgetless.theory.learner import Learned


def overlap(source: Factors, target: Factors, basis: Tensor | None = None) -> Tensor:
    """O^{s→k} = V_s T_{k−1} V_kᵀ, (r_s, r_k), with T_{k−1} = I − Bᵀ B.

    The theorem (CF for SGD) with T = I, the corollaries (CF for GEM-NT) and (forgetting for
    PCA-OGD) with what those methods keep. The paper's V has orthonormal columns, here rows.

    Arguments:
        source, target: the SVDs of φ_s and φ_k.
        basis: B_{k−1}, (K, p), orthonormal rows, such as `Learned.bases[k]`; None is T = I.
    """
    check_factors("source", source)
    check_factors("target", target)
    p = source.v.shape[1]
    require(target.v.shape[1] == p, "target", tuple(target.v.shape), f"with {p} parameters")
    rows = target.v
    if basis is not None:
        fits = basis.dim() == 2 and basis.shape[1] == p
        require(fits, "basis", tuple(basis.shape), f"orthonormal rows (K, {p})")
        rows = project_rows(rows, basis.to(rows))
    product: Tensor = source.v @ rows.T
    return product


def learned_overlap(learned: Learned, source: int, target: int) -> Tensor:
    """O^{s→t} as the learner's method has it when task t starts, (r_s, r_t)."""
    learned.check_pair(source, target)
    return overlap(learned.factors[source], learned.factors[target], learned.bases[target])


def overlap_spectrum(matrix: Tensor) -> Tensor:
    """The singular values of an overlap matrix, decreasing, (min(r_s, r_k),).

    For SGD they are the cosines Θ^{s→k} of the principal angles (corollary "bounding CF with angle
    between source and target subspace"). What the paper calls the eigenvalues of O.
    """
    if matrix.numel() == 0:
        return matrix.new_zeros(0)
    values: Tensor = torch.linalg.svdvals(matrix)
    return values


def principal_angles(source: Factors, target: Factors) -> Tensor:
    """The principal angles between two tasks' subspaces in radians, increasing, (min(r_s, r_k),).

    cos θ_i are the singular values of V_s V_kᵀ, sin θ_i those of V_k (I − V_sᵀ V_s); small angles
    come from the sine, whose digits the cosine has lost (Björck and Golub 1973).
    """
    check_factors("source", source)
    check_factors("target", target)
    if source.rank < target.rank:
        source, target = target, source
    cosines = overlap_spectrum(overlap(source, target)).clamp_max(1.0)
    sines = overlap_spectrum(project_rows(target.v, source.v)).flip(0).clamp_max(1.0)
    return torch.where(sines.square() < 0.5, sines.asin(), cosines.acos())
