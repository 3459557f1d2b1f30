"""The linearised learner: a model with fixed tangent features that learns one task after another.

f_k(x) = f_{k−1}(x) + φ(x) (ω_k − ω_{k−1}), with φ = ∇_ω f_0 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from forgetless.linalg import float64
from forgetless.support.errors import TrainingError, require
from forgetless.support.options import SHARE, real, whole
from forgetless.theory.projections import EarlierTask, Projection
from forgetless.theory.svd import (
    RTOL,
    Factors,
    Protected,
    check_finite,
    check_matrix,
    check_projection,
    factors,
    overlap,
    projected,
)


@final
@dataclass(frozen=True, eq=False)
class LinearTask:
    """One task of the linearised learner.

    Attributes:
        features: φ_k, (n, p), the gradients of the true-class outputs, in any orthonormal
            coordinates, such as those of `coordinates`.
        targets: y_k, (n,), for those outputs.
        outputs: f_0(X_k), (n,), at the point of linearisation.
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
@dataclass(frozen=True)
class Descent:
    """Projected gradient descent to convergence, w ← w − η T ∇L(w): corollary (convergence).

    L(w) = ½ ‖φ w − ỹ‖² + ½ λ ‖w‖², w the change since the previous task, from w = 0. T is fixed
    during the task and w never leaves its range, so T ∇L(w) = φ̃ᵀ (φ̃ w − ỹ) + λ w.

    Arguments:
        share: the step is η = share / ‖φ̃ φ̃ᵀ + λ I‖, below the corollary's bound for share < 1.
        tolerance: stop when ‖T ∇L‖ ≤ tolerance · ‖φ̃‖ ‖ỹ‖. The error of w is at most that over the
            smallest eigenvalue of φ̃ φ̃ᵀ + λ I.
        accelerated: Nesterov's momentum, restarted when it points uphill; the same limit in about
            the square root of the steps.
        max_steps: raise a TrainingError after so many steps.
    """

    share: float = 0.99
    tolerance: float = 1e-13
    accelerated: bool = True
    max_steps: int = 500_000

    def __post_init__(self) -> None:
        SHARE.check("share", self.share)
        SHARE.check("tolerance", self.tolerance)
        whole(1).check("max_steps", self.max_steps)

    def solve(
        self, features: Tensor, residual: Tensor, basis: Protected, weight_decay: float, rtol: float
    ) -> Tensor:
        """ω_k − ω_{k−1}, (p,), by descent on one task.

        Arguments:
            features: φ_k, (n, p).
            residual: ỹ_k, (n,).
            basis: B_{k−1}, (K, p), with T_{k−1} = I − Bᵀ B; or T_{k−1} itself.
            weight_decay: λ.
            rtol: all features count as protected if ‖φ̃‖ ≤ rtol · ‖φ‖.
        """
        inside = projected(features, basis)
        top = matrix_norm(inside, 2)
        w = previous = features.new_zeros(features.shape[1])
        if top <= rtol * matrix_norm(features, 2) or not bool(residual.any()):
            return w
        step = self.share / (top.square() + weight_decay)
        enough = self.tolerance * top * vector_norm(residual)
        transposed = inside.T.contiguous()
        age = 0  # steps since the momentum was restarted
        length = torch.inf
        for _ in range(self.max_steps):
            ahead = w + age / (age + 3) * (w - previous) if self.accelerated else w
            gradient = transposed @ (inside @ ahead - residual) + weight_decay * ahead
            length = vector_norm(gradient)
            if length <= enough:
                return _change(ahead, basis)
            new = ahead - step * gradient
            age = age + 1 if gradient @ (new - w) <= 0 else 0
            previous, w = w, new
        raise TrainingError(
            f"gradient descent has not converged in {self.max_steps} steps: the projected gradient "
            f"is {float(length):.2e}, {float(enough):.2e} would do; use weight decay, a larger "
            "tolerance or the closed form"
        )


@final
@dataclass(frozen=True, eq=False)
class Learned:
    """The linearised learner after all tasks.

    Attributes:
        method: chooses the protected directions; or T_{k−1} for each task k.
        weight_decay: λ.
        rtol: relative cutoff of all ranks.
        factors: the SVD of each φ_k.
        bases: B_{k−1} for each task k, (K, p) each, with T_{k−1} = I − Bᵀ B; empty for the first
            task. Or T_{k−1} itself, a function of rows (n, p), if `learn` was given that.
        residuals: ỹ_k = y_k − f_{k−1}(X_k), (n_k,) each.
        steps: ω_k − ω_{k−1}, (T, p).
    """

    method: Projection | Sequence[Protected]
    weight_decay: float
    rtol: float
    factors: tuple[Factors, ...]
    bases: tuple[Protected, ...]
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

    def overlap(self, source: int, target: int) -> Tensor:
        """O^{s→t} with the directions protected when task t starts, (r_s, r_t)."""
        self.check_pair(source, target)
        return overlap(self.factors[source], self.factors[target], self.bases[target])

    def check_pair(self, source: int, target: int) -> None:
        """Require 0 ≤ source < target < T."""
        accepted = f"two tasks from 0 to {len(self.steps) - 1}, the source before the target"
        valid = 0 <= source < target < len(self.steps)
        require(valid, "source and target", (source, target), accepted)

    def check_features(self, features: Tensor) -> None:
        """Require features (n, p) with as many parameters as the tasks."""
        check_matrix("features", features)
        p = self.steps.shape[1]
        require(features.shape[1] == p, "features", tuple(features.shape), f"of shape (n, {p})")


def learn(
    tasks: Sequence[LinearTask],
    method: Projection | Sequence[Protected],
    *,
    weight_decay: float = 0.0,
    solver: Descent | None = None,
    rtol: float = RTOL,
) -> Learned:
    """Learn tasks one after another, by the corollary (convergence), in float64.

    ω_k − ω_{k−1} = φ̃_kᵀ (φ̃_k φ̃_kᵀ + λ I)⁻¹ ỹ_k with φ̃_k = φ_k T_{k−1}, ỹ_k = y_k − f_{k−1}(X_k):
    the minimum of ½ ‖φ̃ w − ỹ‖² + ½ λ ‖w‖². (The paper's proof has no ½ before the first term,
    which would give λ/2 instead of λ.) Weight decay pulls towards ω_{k−1}, not towards 0. λ = 0
    gives the solution of least norm, by the pseudo-inverse.

    Arguments:
        tasks: T tasks with the same p.
        method: the protected directions: `NoProjection`, `SampleProjection`,
            `ComponentProjection`, `GradientProjection`, or a `Projection` of your own.
            Or T_{k−1} for each task k, any orthogonal projections: as functions of rows (n, p), or
            as orthonormal rows B_{k−1}.
        weight_decay: λ ≥ 0.
        solver: None for the closed form, or gradient descent.
        rtol: singular values at or below rtol times the largest one of φ_k count as zero, in φ_k
            and in φ̃_k. Features computed in float32 have noise of about 3e-4.
    """
    SHARE.check("rtol", rtol)
    require(len(tasks) > 0, "tasks", "none", "one task or more")
    real(0).check("weight_decay", weight_decay)
    sizes = [task.features.shape[1] for task in tasks]
    require(len(set(sizes)) == 1, "tasks", f"with p = {sizes}", "of one number of parameters p")

    if isinstance(method, Sequence):
        accepted = f"one for each of {len(tasks)} tasks"
        require(len(method) == len(tasks), "method", f"{len(method)} projections", accepted)
    seen: list[EarlierTask] = []
    bases, residuals, steps = [], [], []
    weights = float64(tasks[0].features.new_zeros(sizes[0]))
    rows = weights.new_empty(0, sizes[0])
    basis: Protected = rows
    for k, task in enumerate(tasks):
        decomposed = factors(task.features, rtol=rtol)
        phi = decomposed.dense()
        if isinstance(method, Sequence):
            basis = method[k]
            check_projection(f"method[{k}]", phi, basis)
        elif k:
            basis = rows = method.extend(rows, seen, rtol)
        targets = float64(task.targets).detach()
        before = float64(task.outputs).detach() + phi @ weights  # f_{k−1}(X_k)
        residual = targets - before
        if solver is None:
            step = _closed_form(decomposed, residual, basis, weight_decay, rtol)
        else:
            step = solver.solve(phi, residual, basis, weight_decay, rtol)
        weights = weights + step
        seen.append(EarlierTask(decomposed, phi, targets, before))
        seen = [replace(s, outputs=s.outputs + s.features @ step) for s in seen]
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


def projected_factors(task: Factors, basis: Protected, rtol: float = RTOL) -> Factors:
    """The SVD of φ̃ = φ T, T = I − Bᵀ B, to its numerical rank at the scale of φ.

    The cutoff is relative to ‖φ‖, not to ‖φ̃‖: if all of φ is protected, φ̃ is rounding.

    Arguments:
        task: the SVD of φ, of n samples.
        basis: B, (K, p), orthonormal rows; or T itself.
    """
    if task.rank == 0 or (isinstance(basis, Tensor) and len(basis) == 0):
        return task
    inside = (task.u * task.s) @ projected(task.v, basis)
    return factors(inside, rtol=rtol, scale=task.sigma(0))


def _closed_form(
    task: Factors, residual: Tensor, basis: Protected, weight_decay: float, rtol: float
) -> Tensor:
    """φ̃ᵀ (φ̃ φ̃ᵀ + λ I)⁻¹ ỹ = Ṽᵀ Σ̃ (Σ̃² + λ)⁻¹ Ũᵀ ỹ from the SVD of φ̃, (p,)."""
    inside = projected_factors(task, basis, rtol)
    gains = inside.s / (inside.s.square() + weight_decay)
    return _change((gains * (residual @ inside.u)) @ inside.v, basis)


def _change(step: Tensor, basis: Protected) -> Tensor:
    """T · step, (p,), without what rounding left of the rest."""
    return projected(step.unsqueeze(0), basis)[0]
