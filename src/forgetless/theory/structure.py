"""Structure of the tangent kernel: explained variance, and change over training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.errors import require
from forgetless.theory.svd import check_matrix


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
