"""The linearised learner: a model with fixed tangent features that learns one task after another.

f_k(x) = f_{k−1}(x) + φ(x) (ω_k − ω_{k−1}), with φ = ∇_ω f_0 for good.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.errors import require
from forgetless.support.validation import real
from forgetless.theory.descent import Descent
from forgetless.theory.factors import (
    RTOL,
    Factors,
    check_finite,
    check_matrix,
    check_rtol,
    factors,
    project_rows,
)
from forgetless.theory.projections import Projection, Seen


@final
@dataclass(frozen=True, eq=False)
class LinearTask:
    """One task of the linearised learner.

    Attributes:
        features: φ_k, (n, p): the gradient of every sample's true-class output. In any orthonormal
            coordinates, such as those of `coordinates`.
        targets: y_k, (n,): what that output should be.
        outputs: f_0(X_k), (n,): what it is at the point of linearisation.
    """

    features: Tensor
    targets: Tensor
    outputs: Tensor

    def __post_init__(self) -> None:
        check_matrix("features", self.features)
        n = len(self.features)
        for name, vector in (("targets", self.targets), ("outputs", self.outputs)):
            require(vector.shape == (n,), name, tuple(vector.shape), f"of shape ({n},)")
            check_finite(name, vector)


@final
@dataclass(frozen=True, eq=False)
class Learned:
    """What the linearised learner did, task by task.

    Attributes:
        method: which directions it kept still.
        weight_decay: λ.
        rtol: the relative cutoff of all ranks.
        factors: the SVD of each φ_k.
        bases: B_{k−1} for each task k, (K, p) each, with T_{k−1} = I − Bᵀ B; that of the first
            task is empty.
        residuals: ỹ_k = y_k − f_{k−1}(X_k), (n_k,) each.
        steps: ω_k − ω_{k−1}, (T, p).
    """

    method: Projection
    weight_decay: float
    rtol: float
    factors: tuple[Factors, ...]
    bases: tuple[Tensor, ...]
    residuals: tuple[Tensor, ...]
    steps: Tensor

    @property
    def weights(self) -> Tensor:
        """ω_k − ω_0 for k = 0 … T, (T + 1, p)."""
        return torch.cat([torch.zeros_like(self.steps[:1]), self.steps.cumsum(0)])

    def predict(self, features: Tensor, outputs: Tensor) -> Tensor:
        """f_k(x) = f_{k−1}(x) + φ(x) (ω_k − ω_{k−1}) for k = 0 … T, (T + 1, n).

        Arguments:
            features: φ(X), (n, p), of any samples.
            outputs: f_0(X), (n,).
        """
        self.check_features(features)
        accepted = f"of shape ({len(features)},)"
        require(outputs.shape == (len(features),), "outputs", tuple(outputs.shape), accepted)
        changes = float64(features) @ self.steps.T  # (n, T)
        return torch.cat([float64(outputs).unsqueeze(1), changes], dim=1).cumsum(1).T

    def drift(self, source: int, target: int, features: Tensor | None = None) -> Tensor:
        """δ^{s→t}(X) = φ(X) (ω_t − ω_s), by the lemma (CF under NTK regime), (n,).

        Arguments:
            source, target: s < t, tasks counted from 0.
            features: φ(X), (n, p); those of task s if None.
        """
        self.check_pair(source, target)
        if features is None:
            features = self.factors[source].dense()
        self.check_features(features)
        return float64(features) @ self.steps[source + 1 : target + 1].sum(0)

    def check_pair(self, source: int, target: int) -> None:
        """Require 0 ≤ source < target < T."""
        accepted = f"two tasks from 0 to {len(self.steps) - 1}, the source before the target"
        valid = 0 <= source < target < len(self.steps)
        require(valid, "source and target", (source, target), accepted)

    def check_features(self, features: Tensor) -> None:
        """Require features (n, p) with the p of the tasks."""
        check_matrix("features", features)
        p = self.steps.shape[1]
        require(features.shape[1] == p, "features", tuple(features.shape), f"of shape (n, {p})")


def learn(
    tasks: Sequence[LinearTask],
    method: Projection,
    *,
    weight_decay: float = 0.0,
    solver: Descent | None = None,
    rtol: float = RTOL,
) -> Learned:
    """Learn tasks one after another, by the corollary (convergence), in float64.

    ω_k − ω_{k−1} = φ̃_kᵀ (φ̃_k φ̃_kᵀ + λ I)⁻¹ ỹ_k with φ̃_k = φ_k T_{k−1}, ỹ_k = y_k − f_{k−1}(X_k):
    the minimum of ½ ‖φ̃ w − ỹ‖² + ½ λ ‖w‖². (The paper's proof has no ½ before the first term,
    from which λ/2 would follow in place of λ.) Weight decay pulls towards ω_{k−1}, not towards 0.
    λ = 0 is the solution of least norm, with the pseudo-inverse.

    Arguments:
        tasks: T of them, all with the same p.
        method: the directions that stay fixed: `NoProjection`, `SampleProjection`,
            `ComponentProjection` or `GradientProjection`.
        weight_decay: λ ≥ 0.
        solver: None for the closed form, or gradient descent.
        rtol: singular values at or below rtol times the largest one of φ_k count as zero, in φ_k
            and in φ̃_k. For features that were computed in float32, 3e-4 is about their noise.
    """
    check_rtol(rtol)
    require(len(tasks) > 0, "tasks", "none", "one task or more")
    real(0).check("weight_decay", weight_decay)
    sizes = [task.features.shape[1] for task in tasks]
    require(len(set(sizes)) == 1, "tasks", f"with p = {sizes}", "of one number of parameters p")

    seen: list[Seen] = []
    bases, residuals, steps = [], [], []
    weights = float64(tasks[0].features.new_zeros(sizes[0]))
    basis = weights.new_empty(0, sizes[0])
    for k, task in enumerate(tasks):
        decomposed = factors(task.features, rtol=rtol)
        phi = decomposed.dense()
        if k:
            basis = method.extend(basis, seen, rtol)
        targets = float64(task.targets).detach()
        before = float64(task.outputs).detach() + phi @ weights  # f_{k−1}(X_k)
        residual = targets - before
        if solver is None:
            step = _closed_form(decomposed, residual, basis, weight_decay, rtol)
        else:
            step = solver.solve(phi, residual, basis, weight_decay, rtol)
        weights = weights + step
        seen.append(Seen(decomposed, phi, targets, before))
        seen = [Seen(s.factors, s.features, s.targets, s.outputs + s.features @ step) for s in seen]
        bases.append(basis)
        residuals.append(residual)
        steps.append(step)
    return Learned(
        method,
        weight_decay,
        rtol,
        tuple(s.factors for s in seen),
        tuple(bases),
        tuple(residuals),
        torch.stack(steps),
    )


def projected_factors(task: Factors, basis: Tensor, rtol: float = RTOL) -> Factors:
    """The SVD of φ̃ = φ T, T = I − Bᵀ B, to the rank it has at the scale of φ.

    The cutoff is relative to ‖φ‖, not to ‖φ̃‖: where all of φ is protected, what is left is
    rounding and not to be divided by.

    Arguments:
        task: the SVD of φ, of n samples.
        basis: B, (K, p), orthonormal rows.
    """
    if len(basis) == 0 or task.rank == 0:
        return task
    projected = (task.u * task.s) @ project_rows(task.v, basis)
    return factors(projected, rtol=rtol, scale=task.sigma(0))


def _closed_form(
    task: Factors, residual: Tensor, basis: Tensor, weight_decay: float, rtol: float
) -> Tensor:
    """φ̃ᵀ (φ̃ φ̃ᵀ + λ I)⁻¹ ỹ = Ṽᵀ Σ̃ (Σ̃² + λ)⁻¹ Ũᵀ ỹ from the SVD of φ̃, (p,)."""
    projected = projected_factors(task, basis, rtol)
    gains = projected.s / (projected.s.square() + weight_decay)
    step = (gains * (residual @ projected.u)) @ projected.v
    return project_rows(step.unsqueeze(0), basis).squeeze(0)
