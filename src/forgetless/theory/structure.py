"""Structure of the tangent kernel: explained variance, change over training, drop and overlap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.errors import require
from forgetless.theory.factors import check_finite, check_matrix
from forgetless.theory.overlap import overlap_spectrum


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
    """The explained variance with so many components each, (len(counts),); see above.

    Arguments:
        gram: φ φᵀ, (n, n).
        counts: numbers of components, 1 to n.
    """
    curve = explained_variance(gram, centred=centred)
    valid = all(1 <= count <= len(curve) for count in counts)
    require(valid, "counts", list(counts), f"from 1 to the {len(curve)} samples")
    return curve[torch.tensor([count - 1 for count in counts], dtype=torch.long)]


def kernel_change(before: Tensor, after: Tensor) -> float:
    """‖K' − K‖ / ‖K‖ in the Frobenius norm: how much the tangent kernel moved while training.

    0 is the constant kernel that the theory assumes (appendix "NTK changes").

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


@final
@dataclass(frozen=True, eq=False)
class OverlapDrop:
    """One method's point in the figure "drop in performance … the maximum eigenvalue".

    Attributes:
        method: its name.
        overlap: the largest singular value of O^{s→t}, (S,), one for each seed.
        drop: accuracy on s after learning s minus that after learning t, (S,).
    """

    method: str
    overlap: NDArray[np.float64]
    drop: NDArray[np.float64]


def drop_against_overlap(
    overlaps: Mapping[str, Sequence[Tensor]],
    accuracies: Mapping[str, ArrayLike],
    *,
    source: int = 0,
    target: int | None = None,
) -> list[OverlapDrop]:
    """Largest singular value of O^{s→t} and drop in accuracy of each method, least overlap first.

    Arguments:
        overlaps: for each method the overlap matrices O^{s→t} of its S seeds.
        accuracies: for each method (S, T, T) or, for one seed, (T, T): [after task, on task].
        source, target: s < t, from 0; the first and the last task unless told.
    """
    names = sorted(overlaps)
    require(names == sorted(accuracies), "accuracies", sorted(accuracies), f"of {names}")
    points = []
    for name in names:
        matrix = np.asarray(accuracies[name], float)
        matrix = matrix[None] if matrix.ndim == 2 else matrix
        square = matrix.ndim == 3 and matrix.shape[1] == matrix.shape[2]
        require(square, f"accuracies[{name!r}]", matrix.shape, "of shape (S, T, T)")
        tasks = matrix.shape[1]
        last = tasks - 1 if target is None else target
        accepted = f"two tasks from 0 to {tasks - 1}, the source before the target"
        require(0 <= source < last < tasks, "source and target", (source, last), accepted)
        seeds = len(overlaps[name])
        require(
            seeds == len(matrix) and seeds > 0,
            f"overlaps[{name!r}]",
            f"{seeds} matrices",
            f"one for each of the {len(matrix)} seeds",
        )
        drop = matrix[:, source, source] - matrix[:, last, source]
        measured = bool(np.isfinite(drop).all())
        require(measured, f"accuracies[{name!r}]", "NaN", "measured at the source and the target")
        points.append(OverlapDrop(name, _largest(name, overlaps[name]), drop))
    return sorted(points, key=lambda point: float(point.overlap.mean()))


def _largest(name: str, overlaps: Sequence[Tensor]) -> NDArray[np.float64]:
    largest = []
    for matrix in overlaps:
        check_finite(f"overlaps[{name!r}]", matrix)
        require(matrix.dim() == 2, f"overlaps[{name!r}]", tuple(matrix.shape), "matrices")
        spectrum = overlap_spectrum(float64(matrix).detach())
        largest.append(float(spectrum[0]) if len(spectrum) else 0.0)
    return np.array(largest)


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
