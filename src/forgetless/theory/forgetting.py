"""Forgetting taken apart: which later task, along which direction of the source, moved what."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from forgetless.theory.factors import RTOL, Factors, factors
from forgetless.theory.learner import Learned, projected_factors
from forgetless.theory.overlap import overlap


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
        contributions: one of each later task k = s + 1 … t.
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
        """Σ_s O^{s→k} M_k ỹ_k, one row a later task, (t − s, r_s)."""
        return torch.stack([c.coefficients for c in self.contributions])

    @property
    def by_direction(self) -> Tensor:
        """What each right singular vector of the source carries of Δ, (r_s,); sums to Δ.

        The columns of U_s are orthonormal, so Δ = Σ_i (Σ_k [Σ_s O^{s→k} M_k ỹ_k]_i)².
        """
        return self.coefficients.sum(0).square()

    @property
    def shares(self) -> Tensor:
        """What each later task did along each direction, (t − s, r_s); sums to Δ.

        c_ki Σ_l c_li with c the coefficients: negative where task k undid what others had done.
        """
        c = self.coefficients
        return c * c.sum(0)

    @property
    def by_task(self) -> Tensor:
        """What each later task has to do with Δ, ⟨v_k, δ⟩, (t − s,); sums to Δ, may be negative."""
        return self.shares.sum(1)


def rotation(
    task: Factors, basis: Tensor, *, weight_decay: float = 0.0, rtol: float = RTOL
) -> Tensor:
    """M_k = Σ_k U_kᵀ [φ̃_k φ̃_kᵀ + λ I]⁻¹, (r_k, n_k); with T = I it is Σ_k [Σ_k² + λ I]⁻¹ U_kᵀ.

    Of the corollaries (CF for GEM-NT) and (forgetting for PCA-OGD), and of the theorem (CF for
    SGD). λ = 0 takes the pseudo-inverse. Then V_k T_{k−1} and M_k ỹ_k give the weights back:
    ω_k − ω_{k−1} = T_{k−1} V_kᵀ M_k ỹ_k.

    Arguments:
        task: the SVD of φ_k.
        basis: B_{k−1}, (K, p), with T_{k−1} = I − Bᵀ B.
        weight_decay: λ.
    """
    projected = projected_factors(task, basis, rtol)
    left = task.s.unsqueeze(1) * task.u.T  # Σ_k U_kᵀ, (r_k, n_k)
    gains = 1 / (projected.s.square() + weight_decay)
    inside = left @ projected.u  # (r_k, r̃_k)
    m = (inside * gains) @ projected.u.T
    # What of Σ_k U_kᵀ the projected kernel does not reach: all of it was protected, λ divides it.
    if weight_decay > 0 and projected.rank < task.rank:
        m = m + (left - inside @ projected.u.T) / weight_decay
    return m


def decompose(
    learned: Learned, source: int, target: int, features: Tensor | None = None
) -> Forgetting:
    """Δ^{s→t} = ‖Σ_{k=s+1}^{t} U_s Σ_s O^{s→k} M_k ỹ_k‖² and its parts.

    The theorem (CF for SGD), the corollaries (CF for GEM-NT) and (forgetting for PCA-OGD), and the
    same expression for OGD, whichever the learner's method is.

    Arguments:
        learned: what `learn` returned.
        source, target: s < t, from 0.
        features: φ(X), (n, p), of the samples to measure on, such as a test set; those that task s
            was trained on if None.
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
        m = rotation(
            learned.factors[k], basis, weight_decay=learned.weight_decay, rtol=learned.rtol
        )
        coefficients = of_source.s * (o @ (m @ residual))
        drift = of_source.u @ coefficients
        contributions.append(Contribution(k, o, m, residual, coefficients, drift))
    return Forgetting(source, target, of_source, tuple(contributions))
