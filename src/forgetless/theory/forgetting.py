"""Exact forgetting of the linearised learner, by later task and by direction, and its bounds."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from forgetless.theory.learner import ComponentProjection, Learned, NoProjection, projected_factors
from forgetless.theory.overlap import RTOL, Factors, Protected, factors, overlap, projected


@final
@dataclass(frozen=True, eq=False)
class Contribution:
    """One later task's term U_s Σ_s O^{s→k} M_k ỹ_k of the forgetting expression.

    Attributes:
        task: k, from 0.
        overlap: O^{s→k}, (r_s, r_k).
        rotation: M_k, (r_k, n_k).
        residual: ỹ_k, (n_k,).
        coefficients: Σ_s O^{s→k} M_k ỹ_k, (r_s,): the drift along each left singular vector.
        drift: U_s Σ_s O^{s→k} M_k ỹ_k, (n_s,).
    """

    task: int
    overlap: Tensor
    rotation: Tensor
    residual: Tensor
    coefficients: Tensor
    drift: Tensor

    @property
    def rotated_residual(self) -> Tensor:
        """M_k ỹ_k, the residual along each principal component of task k, (r_k,)."""
        return self.rotation @ self.residual


@final
@dataclass(frozen=True, eq=False)
class Forgetting:
    """Δ^{s→t} and its parts, by the theorem (CF for SGD) and the corollaries for projections.

    Attributes:
        source, target: s < t, from 0.
        factors: U_s, Σ_s, V_s of the features φ(X) on which forgetting is measured.
        contributions: one for each later task k = s + 1 … t.
    """

    source: int
    target: int
    factors: Factors
    contributions: tuple[Contribution, ...]

    @property
    def drift(self) -> Tensor:
        """δ^{s→t} = Σ_k U_s Σ_s O^{s→k} M_k ỹ_k, (n_s,)."""
        return torch.stack([c.drift for c in self.contributions]).sum(0)

    @property
    def total(self) -> float:
        """Δ^{s→t} = ‖δ^{s→t}‖²."""
        return float(self.drift.square().sum())

    @property
    def coefficients(self) -> Tensor:
        """Σ_s O^{s→k} M_k ỹ_k, one row per later task, (t − s, r_s)."""
        return torch.stack([c.coefficients for c in self.contributions])

    @property
    def by_direction(self) -> Tensor:
        """The share of each right singular vector of the source in Δ, (r_s,); sums to Δ.

        The columns of U_s are orthonormal, so Δ = Σ_i (Σ_k [Σ_s O^{s→k} M_k ỹ_k]_i)².
        """
        return self.coefficients.sum(0).square()

    @property
    def shares(self) -> Tensor:
        """The share of each later task and direction in Δ, (t − s, r_s); sums to Δ.

        c_ki Σ_l c_li with c the coefficients: negative where task k undid other tasks' drift.
        """
        c = self.coefficients
        return c * c.sum(0)

    @property
    def by_task(self) -> Tensor:
        """The share of each later task in Δ, ⟨v_k, δ⟩, (t − s,); sums to Δ, may be negative."""
        return self.shares.sum(1)


def rotation(
    task: Factors, basis: Protected, *, weight_decay: float = 0.0, rtol: float = RTOL
) -> Tensor:
    """M_k = Σ_k U_kᵀ [φ̃_k φ̃_kᵀ + λ I]⁻¹, (r_k, n_k); with T = I it is Σ_k [Σ_k² + λ I]⁻¹ U_kᵀ.

    Theorem (CF for SGD), corollaries (CF for GEM-NT) and (forgetting for PCA-OGD). λ = 0 takes the
    pseudo-inverse. The weights follow: ω_k − ω_{k−1} = T_{k−1} V_kᵀ M_k ỹ_k.

    Arguments:
        task: the SVD of φ_k.
        basis: B_{k−1}, (K, p), with T_{k−1} = I − Bᵀ B; or T_{k−1} itself.
        weight_decay: λ.
    """
    narrowed = projected_factors(task, basis, rtol)
    left = task.s.unsqueeze(1) * task.u.T  # Σ_k U_kᵀ, (r_k, n_k)
    gains = 1 / (narrowed.s.square() + weight_decay)
    inside = left @ narrowed.u  # (r_k, r̃_k)
    m = (inside * gains) @ narrowed.u.T
    # The part of Σ_k U_kᵀ outside the projected kernel is fully protected: only λ divides it.
    if weight_decay > 0 and narrowed.rank < task.rank:
        m = m + (left - inside @ narrowed.u.T) / weight_decay
    return m


def decompose(
    learned: Learned, source: int, target: int, features: Tensor | None = None
) -> Forgetting:
    """Δ^{s→t} = ‖Σ_{k=s+1}^{t} U_s Σ_s O^{s→k} M_k ỹ_k‖² and its parts.

    Theorem (CF for SGD), corollaries (CF for GEM-NT) and (forgetting for PCA-OGD); the same
    expression holds for OGD and for any other orthogonal projections T_{k−1}: nothing but
    T² = T = Tᵀ is used.

    Arguments:
        learned: from `learn`.
        source, target: s < t, from 0.
        features: φ(X), (n, p), of the samples to measure on, such as a test set; task s's own
            training samples if None.
    """
    learned.check_pair(source, target)
    of_source = learned.factors[source]
    if features is not None:
        learned.check_features(features)
        of_source = factors(features, rtol=learned.rtol)
    contributions = []
    for k in range(source + 1, target + 1):
        basis, residual = learned.bases[k], learned.residuals[k]
        o = overlap(of_source, learned.factors[k], basis)
        decay = learned.weight_decay
        m = rotation(learned.factors[k], basis, weight_decay=decay, rtol=learned.rtol)
        coefficients = of_source.s * (o @ (m @ residual))
        drift = of_source.u @ coefficients
        contributions.append(Contribution(k, o, m, residual, coefficients, drift))
    return Forgetting(source, target, of_source, tuple(contributions))


@final
@dataclass(frozen=True)
class Bounds:
    """Four upper bounds of Δ^{s→t}; the first holds for t = s + 1 only.

    With v_k the term of a later task k and a_k a bound of ‖v_k‖,

    - `printed` is Σ_k a_k², from ‖Σ v_k‖² ≤ Σ ‖v_k‖², which is false for two or more terms: two
      equal ones give 4 ‖v‖² on the left and 2 ‖v‖² on the right.
    - `valid` is (Σ_k a_k)², by the triangle inequality: at most t − s times `printed`, and equal to
      it for one later task.
    - `tight` is (Σ_k ‖Σ_s O^{s→k}‖ ‖M_k ỹ_k‖)², which does not separate Σ_s and O.

    - `unprotected` is (Σ_k ‖φ_s T_{k−1}‖ ‖ω_k − ω_{k−1}‖)², by what the steps of task k may still
      change and how far they go: φ_s (ω_k − ω_{k−1}) = φ_s T_{k−1} (ω_k − ω_{k−1}).

    Always Δ ≤ tight ≤ valid, and Δ ≤ unprotected.
    """

    printed: float
    valid: float
    tight: float
    unprotected: float


def bounds(learned: Learned, source: int, target: int) -> Bounds:
    """Bounds of Δ^{s→t} on the samples that task s was trained on.

    The a_k of the paper:

    - SGD, corollary (bounding CF with angle between source and target subspace):
      a_k = σ_{s,1} ‖O^{s→k}‖ ‖M_k ỹ_k‖.
    - GEM-NT, the equation after the corollary (CF for GEM-NT):
      a_k = σ_{s,1} ‖V_s T_{k−1}‖ ‖V_k T_{k−1}‖ ‖M_k ỹ_k‖. The same for OGD and for methods of your
      own, for which none is printed.
    - PCA-OGD, the equation after the corollary (forgetting for PCA-OGD): σ_{s,d+1} instead of
      σ_{s,1}. This part is right: s ≤ k − 1, so T_{k−1} removes the top d right singular vectors
      of φ_s for every later k, and φ_s T_{k−1} = U_{>d} Σ_{>d} V_{>d} T_{k−1}.

    That needs the stored directions to be those of φ_s itself. With centred PCA they are not: φ_s
    keeps its mean, usually its largest part, and σ_{s,d+1} bounds nothing. Then `valid` has
    ‖φ_s T_{k−1}‖ instead of σ_{s,d+1} ‖V_s T_{k−1}‖, and `printed` stays as printed. Samples other
    than the stored ones have the same problem, so there is no argument for them.

    Arguments:
        learned: from `learn`.
        source, target: s < t, from 0.
    """
    parts = decompose(learned, source, target)
    method, of_source = learned.method, parts.factors
    sigma = of_source.sigma(0)
    if isinstance(method, ComponentProjection):
        d = of_source.rank if method.components is None else method.components
        sigma = of_source.sigma(d)
    printed, valid, tight, unprotected = 0.0, 0.0, 0.0, 0.0
    for term in parts.contributions:
        length = float(vector_norm(term.rotated_residual))
        basis = learned.bases[term.task]
        rows = projected(of_source.v, basis)
        free = _norm(of_source.s.unsqueeze(1) * rows)  # ‖φ_s T_{k−1}‖
        if isinstance(method, NoProjection):
            as_printed = holds = sigma * _norm(term.overlap)
        else:
            of_target = _norm(projected(learned.factors[term.task].v, basis))
            as_printed = holds = sigma * _norm(rows) * of_target
            if isinstance(method, ComponentProjection) and method.centred:
                holds = free * of_target
        printed += (as_printed * length) ** 2
        valid += holds * length
        tight += _norm(of_source.s.unsqueeze(1) * term.overlap) * length
        unprotected += free * float(vector_norm(learned.steps[term.task]))
    return Bounds(printed, valid**2, tight**2, unprotected**2)


def _norm(matrix: Tensor) -> float:
    """The spectral norm, 0 for an empty matrix."""
    return float(matrix_norm(matrix, 2)) if matrix.numel() else 0.0
