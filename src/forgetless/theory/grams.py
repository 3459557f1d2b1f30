"""The theory from Gram matrices alone, where n is small and p is not.

A grid holds the blocks K_st = φ_s φ_tᵀ, (n_s, n_t), for all pairs of T tasks.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.errors import require
from forgetless.support.validation import whole
from forgetless.theory.factors import RTOL, check_matrix, check_rtol

Grid = Sequence[Sequence[Tensor]]


class KernelFeatures(Protocol):
    """Features that know their inner products, such as `forgetless.tangent.TangentFeatures`."""

    def gram(self) -> Tensor:
        """φ φᵀ, (n, n)."""

    def cross_gram(self, other: Self, /) -> Tensor:
        """φ φ'ᵀ, (n, n')."""

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """Φ v: (p, k) → (n, k)."""


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

    With Q Λ Qᵀ the eigendecomposition of the joint Gram matrix, Z = Q Λ^½, so Z_s Z_tᵀ = K_st. It
    is an isometry: whatever takes dense features φ gives the same for Z, r ≤ Σ n_t columns wide.

    Arguments:
        grams: K_st = φ_s φ_tᵀ, T × T blocks.
        rtol: directions with √eigenvalue at or below rtol · √(largest eigenvalue) are left out.
    """
    joint, sizes = _joint(grams)
    roots, vectors = _roots(joint, rtol)
    return list((vectors * roots).split(sizes))


def gram_overlap(
    grams: Grid, source: int, target: int, memory: Tensor | None = None, *, rtol: float = RTOL
) -> Tensor:
    """O^{s→k} = W_sᵀ (K_sk − K_sm K_mm⁺ K_mk) W_k with W = U Σ⁻¹, without V or φ, (r_s, r_k).

    K_tt = U Σ² Uᵀ gives V = Wᵀ φ, and the remembered directions A φ, m of them, project by
    φᵀ Aᵀ (A K Aᵀ)⁺ A φ: K_mm = A K Aᵀ and so on, with K the joint Gram matrix. Equal to `overlap`
    up to the signs of singular vectors.

    Arguments:
        grams: K_st, T × T blocks.
        source, target: s and k, from 0.
        memory: A, (m, N) with N the samples of all tasks together: each direction as a combination
            of samples' features, from `sample_memory`, `component_memory` or `gradient_memory`.
        rtol: relative cutoff of singular values, squared for eigenvalues.
    """
    joint, sizes = _joint(grams)
    starts = _starts(sizes)
    for name, task in (("source", source), ("target", target)):
        require(0 <= task < len(sizes), name, task, f"a task from 0 to {len(sizes) - 1}")
    s = slice(starts[source], starts[source] + sizes[source])
    k = slice(starts[target], starts[target] + sizes[target])
    cross = joint[s, k]
    if memory is not None:
        fits = memory.dim() == 2 and memory.shape[1] == len(joint)
        require(fits, "memory", tuple(memory.shape), f"of shape (m, {len(joint)})")
        products = float64(memory).to(joint) @ joint  # A K, (m, N)
        within = products @ float64(memory).to(joint).T
        # Each direction counts by its direction, not by its length.
        lengths = within.diagonal().clamp_min(0).sqrt()
        scale = torch.where(lengths > 0, 1 / lengths, 0)
        products, within = products * scale.unsqueeze(1), within * scale * scale.unsqueeze(1)
        if bool(lengths.any()):
            roots, vectors = _roots(within, rtol)
            whitened = (vectors / roots).T @ products  # orthonormal directions' inner products
            cross = cross - whitened[:, s].T @ whitened[:, k]
    (source_roots, u), (target_roots, v) = _roots(joint[s, s], rtol), _roots(joint[k, k], rtol)
    return (u / source_roots).T @ cross @ (v / target_roots)


def operator_overlap(
    source: KernelFeatures,
    target: KernelFeatures,
    basis: Tensor | None = None,
    *,
    rtol: float = RTOL,
) -> Tensor:
    """O^{s→k} = W_sᵀ (φ_s φ_kᵀ − φ_s Bᵀ B φ_kᵀ) W_k with W = U Σ⁻¹, without V, (r_s, r_k).

    Equal to `overlap` up to the signs of singular vectors.

    Arguments:
        source, target: φ_s and φ_k, as operators.
        basis: B_{k−1}, (K, p), orthonormal rows, or rows of zeros; None is T = I.
        rtol: relative cutoff of singular values. Of features in float32, 1e-4 keeps what `B φᵀ`
            rounds below 1e-3 of a cosine.
    """
    cross = source.cross_gram(target)
    if basis is not None and len(basis):
        cross = cross - float64(source @ basis.T) @ float64(target @ basis.T).T
    (source_roots, u), (target_roots, v) = (_roots(phi.gram(), rtol) for phi in (source, target))
    return (u / source_roots).T @ cross @ (v / target_roots)


def sample_memory(grams: Grid, kept: Sequence[Tensor]) -> Tensor:
    """What OGD remembers, for `gram_overlap`: one row a sample, (m, N).

    Arguments:
        grams: K_st, T × T blocks.
        kept: the indices of the remembered samples of task 0, task 1 and so on.
    """
    joint, sizes = _joint(grams)
    rows = _rows(sizes, kept)
    return torch.eye(len(joint)).to(joint)[rows]


def component_memory(
    grams: Grid, before: int, components: int | None = None, *, rtol: float = RTOL
) -> Tensor:
    """What PCA-OGD remembers of the tasks before one, for `gram_overlap`: Σ⁻¹ Uᵀ, (m, N).

    Arguments:
        grams: K_st, T × T blocks.
        before: k, the task that starts: the top directions of tasks 0 … k − 1 are remembered.
        components: d, how many of each; None is all.
    """
    joint, sizes = _joint(grams)
    require(0 < before <= len(sizes), "before", before, f"from 1 to {len(sizes)}")
    d = components
    valid = d is None or whole(1).fits(d)
    require(valid, "components", d, f"{whole(1).words}, or None for all")
    parts = []
    for start, n in list(zip(_starts(sizes), sizes, strict=True))[:before]:
        roots, u = _roots(joint[start : start + n, start : start + n], rtol)
        part = joint.new_zeros(min(len(roots), d or len(roots)), len(joint))
        part[:, start : start + n] = (u / roots).T[:d]
        parts.append(part)
    return torch.cat(parts)


def gradient_memory(grams: Grid, kept: Sequence[Tensor], residuals: Sequence[Tensor]) -> Tensor:
    """What GEM-NT projects out, for `gram_overlap`: g_j = 1/m Σ φ_j(x)ᵀ (f(x) − y), (tasks, N).

    Arguments:
        grams: K_st, T × T blocks.
        kept: the indices of the remembered samples of task 0, task 1 and so on.
        residuals: f_{k−1}(X_j) − y_j on all of each of these tasks' samples, (n_j,).
    """
    joint, sizes = _joint(grams)
    rows = _rows(sizes, kept).split([len(k) for k in kept])
    require(len(residuals) == len(kept), "residuals", len(residuals), f"{len(kept)} vectors")
    memory = joint.new_zeros(len(kept), len(joint))
    for j, (row, index) in enumerate(zip(rows, kept, strict=True)):
        fits = residuals[j].shape == (sizes[j],)
        shape = tuple(residuals[j].shape)
        require(fits, f"residuals[{j}]", shape, f"of shape ({sizes[j]},)")
        memory[j, row] = float64(residuals[j]).to(joint)[index] / len(index)
    return memory


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
    asymmetry = float((joint - joint.T).abs().max() / joint.abs().max().clamp_min(1e-300))
    require(asymmetry < 1e-4, "grams", f"off by {asymmetry:.1e}", "symmetric: K_ts = K_stᵀ")
    return (joint + joint.T) / 2, sizes


def _roots(gram: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Σ (r,), decreasing, and U (n, r) of a Gram matrix U Σ² Uᵀ, to its numerical rank."""
    check_rtol(rtol)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    top = values[0].clamp_min(0)
    semidefinite = bool(values[-1] >= -1e-4 * top)
    smallest = f"with an eigenvalue {float(values[-1]):.1e}"
    require(semidefinite, "grams", smallest, "positive semi-definite: blocks φ_s φ_tᵀ")
    rank = int((values > rtol**2 * top).sum())
    return values[:rank].sqrt(), vectors[:, :rank]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:t]) for t in range(len(sizes))]


def _rows(sizes: Sequence[int], kept: Sequence[Tensor]) -> Tensor:
    """The rows of the joint Gram matrix that belong to remembered samples."""
    require(0 < len(kept) <= len(sizes), "kept", len(kept), f"for 1 to {len(sizes)} tasks")
    for j, index in enumerate(kept):
        valid = index.dim() == 1 and len(index) > 0
        valid = valid and bool(((index >= 0) & (index < sizes[j])).all())
        accepted = f"one or more indices from 0 to {sizes[j] - 1}"
        require(valid, f"kept[{j}]", index.tolist(), accepted)
    return torch.cat([k + start for k, start in zip(kept, _starts(sizes), strict=False)])
