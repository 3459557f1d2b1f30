"""The linearised learner, a model with fixed tangent features, and what methods project in it.

f_k(x) = f_{k−1}(x) + φ(x) (ω_k − ω_{k−1}), with φ = ∇_ω f_0 throughout.

A method projects by T_{k−1} = I − Bᵀ B, with B the orthonormal rows that it returns before task k
starts. The paper writes I − G Gᵀ with the gradients themselves as the columns of G, which is a
projection only if they are orthonormal; here they are orthonormalised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from forgetless.linalg import float64
from forgetless.support.validation import SHARE, ConfigError, TrainingError, real, require, whole
from forgetless.theory.overlap import (
    RTOL,
    Factors,
    Protected,
    check_finite,
    check_matrix,
    check_projection,
    extend_basis,
    factors,
    overlap,
    projected,
)

# The number of samples of each task, index tensors task by task, or None for all samples.
Memory = int | Sequence[Tensor] | None


@final
@dataclass(frozen=True)
class EarlierTask:
    """An earlier task, at the weights with which the next one starts.

    Attributes:
        factors: the SVD of its features φ_j.
        features: φ_j, (n_j, p).
        targets: y_j, (n_j,).
        outputs: f_{k−1}(X_j), (n_j,).
    """

    factors: Factors
    features: Tensor
    targets: Tensor
    outputs: Tensor


class Projection(Protocol):
    """A method as the theory sees it: the directions it does not move along."""

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        """B_{k−1}, (K, p), from B_{k−2} and the tasks before task k, of which the last is new."""


@final
@dataclass(frozen=True)
class NoProjection:
    """T = I: plain SGD (theorem "CF for SGD")."""

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        return basis


@final
@dataclass(frozen=True, eq=False)
class SampleProjection:
    """OGD: orthogonal to the features φ_j(x) of stored samples of each earlier task.

    Arguments:
        memory: number of samples of each task, drawn without replacement; or one tensor of indices
            for each task; None for all. More than a task has is an error.
        seed: of the draw.
    """

    memory: Memory = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_memory(self.memory, self.seed)

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        new = seen[-1].features
        kept = remembered(self.memory, self.seed, len(seen) - 1, len(new)).to(new.device)
        return extend_basis(basis, new[kept], rtol)


@final
@dataclass(frozen=True)
class ComponentProjection:
    """PCA-OGD: orthogonal to the top d right singular vectors of each earlier φ_j (P_{τ,:d}).

    Arguments:
        components: d, at least 1 and at most the samples of a task, or the rank if that is
            smaller; None for all.
        centred: use the principal directions of φ_j − mean instead, as the released code does. The
            corollary (forgetting for PCA-OGD) still holds, its bound by σ_{d+1} does not.
    """

    components: int | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        d = self.components
        valid = d is None or whole(1).fits(d)
        require(valid, "components", d, f"{whole(1).words}, or None for all")

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        n, task = len(seen[-1].features), len(seen) - 1
        accepted = f"at most the {n} samples of task {task} (counted from 0)"
        require((self.components or 1) <= n, "components", self.components, accepted)
        decomposed = seen[-1].factors
        if self.centred:
            features = seen[-1].features
            centred = features - features.mean(0)
            decomposed = factors(centred, rtol=rtol, scale=decomposed.sigma(0))
        return extend_basis(basis, decomposed.v[: self.components], rtol)


@final
@dataclass(frozen=True, eq=False)
class GradientProjection:
    """GEM-NT: orthogonal to the earlier tasks' mean loss gradients (corollary "CF for GEM-NT").

    g_j = 1/m Σ φ_j(x)ᵀ (f_{k−1}(x) − y) over the m stored samples x of task j, for the squared loss
    ½ (f − y)² without weight decay, at the weights with which task k starts: the corollary needs a
    T_{k−1} that is constant during the task. A gradient that is rounding, such as of a task just
    learned to zero loss, constrains nothing.

    Arguments:
        memory, seed: the samples, as for `SampleProjection`.
    """

    memory: Memory = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_memory(self.memory, self.seed)

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        gradients = []
        for task, past in enumerate(seen):
            kept = remembered(self.memory, self.seed, task, len(past.features))
            kept = kept.to(past.features.device)
            phi, residual = past.features[kept], (past.outputs - past.targets)[kept]
            gradient = residual @ phi / len(kept)
            # Its length if no terms cancelled.
            terms = past.outputs[kept].abs() + past.targets[kept].abs()
            uncancelled = terms @ vector_norm(phi, dim=1) / len(kept)
            if vector_norm(gradient) > rtol * uncancelled:
                gradients.append(gradient)
        if not gradients:
            return basis[:0]
        return extend_basis(basis[:0], torch.stack(gradients), rtol)


def remembered(memory: Memory, seed: int, task: int, n: int) -> Tensor:
    """The indices of a task's stored samples, (m,).

    Arguments:
        memory: as for `SampleProjection`.
        seed: of the draw, which depends on seed, task, m and n alone.
        task: from 0.
        n: the task's number of samples.
    """
    if memory is None:
        return torch.arange(n)
    if isinstance(memory, int):
        accepted = f"at most the {n} samples of task {task} (counted from 0)"
        require(memory <= n, "memory", memory, accepted)
        return torch.from_numpy(np.random.default_rng([seed, task]).permutation(n)[:memory])
    require(task < len(memory), "memory", f"{len(memory)} index tensors", "one for each task")
    kept = torch.as_tensor(memory[task])
    whole = kept.dim() == 1 and kept.numel() > 0 and not kept.is_floating_point()
    whole = whole and kept.dtype != torch.bool and bool(((kept >= 0) & (kept < n)).all())
    require(whole, f"memory[{task}]", kept.tolist(), f"one or more indices from 0 to {n - 1}")
    return kept.long()


def check_memory(memory: Memory, seed: int) -> None:
    """Require a memory of at least one sample and a valid seed."""
    whole(0).check("seed", seed)
    if isinstance(memory, bool | str | Tensor) or not isinstance(memory, int | Sequence | None):
        raise ConfigError(f"memory must be a whole number, index tensors or None, not {memory!r}")
    if isinstance(memory, int):
        require(memory >= 1, "memory", memory, f"{whole(1).words}, or None for all samples")


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


class Solver(Protocol):
    """How one task is learned."""

    def solve(
        self, features: Tensor, residual: Tensor, basis: Protected, weight_decay: float, rtol: float
    ) -> Tensor:
        """ω_k − ω_{k−1}, (p,), from the arguments of `Descent.solve`."""


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
    solver: Solver | None = None,
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
        solver: None for the closed form, or gradient descent, such as `Descent`.
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
