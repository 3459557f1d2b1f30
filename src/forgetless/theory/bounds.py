"""Upper bounds of forgetting: as the paper prints them, and ones that hold."""

from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from forgetless.theory.factors import project_rows
from forgetless.theory.forgetting import decompose
from forgetless.theory.learner import Learned
from forgetless.theory.projections import ComponentProjection, NoProjection


@final
@dataclass(frozen=True)
class Bounds:
    """Three upper bounds of Δ^{s→t}, of which the first holds for t = s + 1 only.

    With v_k the term of a later task k and a_k a bound of ‖v_k‖,

    - `printed` is Σ_k a_k², from ‖Σ v_k‖² ≤ Σ ‖v_k‖². That is false for two terms or more: two
      equal ones give 4 ‖v‖² on the left and 2 ‖v‖² on the right.
    - `valid` is (Σ_k a_k)², by the triangle inequality, with the same a_k. It is at most t − s
      times `printed`, and equal to it for one later task.
    - `tight` is (Σ_k ‖Σ_s O^{s→k}‖ ‖M_k ỹ_k‖)², which keeps Σ_s and O together.

    Δ ≤ tight ≤ valid always.
    """

    printed: float
    valid: float
    tight: float


def bounds(learned: Learned, source: int, target: int) -> Bounds:
    """Bounds of Δ^{s→t} on the samples that task s was trained on.

    The a_k of the paper, with Θ^{s→R} the singular values of V_s T_{k−1}:

    - SGD, corollary (bounding CF with angle between source and target subspace):
      a_k = σ_{s,1} ‖O^{s→k}‖ ‖M_k ỹ_k‖.
    - GEM-NT, the equation after the corollary (CF for GEM-NT):
      a_k = σ_{s,1} ‖V_s T_{k−1}‖ ‖V_k T_{k−1}‖ ‖M_k ỹ_k‖. For OGD, for which none is printed, the
      same.
    - PCA-OGD, the equation after the corollary (forgetting for PCA-OGD): σ_{s,d+1} in place of
      σ_{s,1}. This part is right: s ≤ k − 1, so T_{k−1} removes the top d right singular vectors
      of φ_s for every later k, and φ_s T_{k−1} = U_{>d} Σ_{>d} V_{>d} T_{k−1}.

    It is right for the φ_s whose own top directions were stored. With centred PCA they were not:
    φ_s keeps its mean, the largest part of it as a rule, and σ_{s,d+1} bounds nothing. There
    `valid` has ‖φ_s T_{k−1}‖ in place of σ_{s,d+1} ‖V_s T_{k−1}‖, and `printed` stays as printed.
    The same would hold for samples other than those whose directions were stored, which is why
    there is no argument for them; `decompose` has Δ itself.

    Arguments:
        learned: what `learn` returned.
        source, target: s < t, from 0.
    """
    parts = decompose(learned, source, target)
    method, of_source = learned.method, parts.factors
    sigma = of_source.sigma(0)
    if isinstance(method, ComponentProjection):
        d = of_source.rank if method.components is None else method.components
        sigma = of_source.sigma(d)
    printed, valid, tight = 0.0, 0.0, 0.0
    for term in parts.contributions:
        length = float(vector_norm(term.rotated_residual))
        basis = learned.bases[term.task]
        if isinstance(method, NoProjection):
            as_printed = holds = sigma * _norm(term.overlap)
        else:
            of_target = _norm(project_rows(learned.factors[term.task].v, basis))
            rows = project_rows(of_source.v, basis)
            as_printed = holds = sigma * _norm(rows) * of_target
            if isinstance(method, ComponentProjection) and method.centred:
                holds = _norm(of_source.s.unsqueeze(1) * rows) * of_target
        printed += (as_printed * length) ** 2
        valid += holds * length
        tight += _norm(of_source.s.unsqueeze(1) * term.overlap) * length
    return Bounds(printed, valid**2, tight**2)


def _norm(matrix: Tensor) -> float:
    """The spectral norm; 0 of an empty matrix."""
    return float(matrix_norm(matrix, 2)) if matrix.numel() else 0.0
