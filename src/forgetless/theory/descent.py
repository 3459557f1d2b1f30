"""Projected gradient descent on one task of the linearised learner."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from forgetless.support.errors import TrainingError
from forgetless.support.validation import SHARE, whole
from forgetless.theory.factors import project_rows


@final
@dataclass(frozen=True)
class Descent:
    """Train to convergence by w ← w − η T ∇L(w), the learner of the corollary (convergence).

    L(w) = ½ ‖φ w − ỹ‖² + ½ λ ‖w‖², w the change since the previous task, from w = 0. T is fixed
    during the task and w never leaves its range, so T ∇L(w) = φ̃ᵀ (φ̃ w − ỹ) + λ w.

    Arguments:
        share: the step is η = share / ‖φ̃ φ̃ᵀ + λ I‖, below the corollary's bound for share < 1.
        tolerance: stop when ‖T ∇L‖ ≤ tolerance · ‖φ̃‖ ‖ỹ‖. The error of w is up to that over the
            smallest eigenvalue of φ̃ φ̃ᵀ + λ I.
        accelerated: Nesterov's momentum, restarted when it points uphill; the same limit with
            about the square root of the steps.
        max_steps: give up after so many with a TrainingError.
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
        self, features: Tensor, residual: Tensor, basis: Tensor, weight_decay: float, rtol: float
    ) -> Tensor:
        """ω_k − ω_{k−1}, (p,), where descent on one task ends.

        Arguments:
            features: φ_k, (n, p).
            residual: ỹ_k, (n,).
            basis: B_{k−1}, (K, p), with T_{k−1} = I − Bᵀ B.
            weight_decay: λ.
            rtol: features are all protected if ‖φ̃‖ ≤ rtol · ‖φ‖.
        """
        projected = project_rows(features, basis)
        top = matrix_norm(projected, 2)
        w = previous = features.new_zeros(features.shape[1])
        if top <= rtol * matrix_norm(features, 2) or not bool(residual.any()):
            return w
        step = self.share / (top.square() + weight_decay)
        enough = self.tolerance * top * vector_norm(residual)
        transposed = projected.T.contiguous()
        age = 0  # steps since the momentum was restarted
        length = torch.inf
        for _ in range(self.max_steps):
            ahead = w + age / (age + 3) * (w - previous) if self.accelerated else w
            gradient = transposed @ (projected @ ahead - residual) + weight_decay * ahead
            length = vector_norm(gradient)
            if length <= enough:
                return project_rows(ahead.unsqueeze(0), basis).squeeze(0)
            new = ahead - step * gradient
            age = age + 1 if gradient @ (new - w) <= 0 else 0
            previous, w = w, new
        raise TrainingError(
            f"gradient descent has not converged in {self.max_steps} steps: the projected gradient "
            f"is {float(length):.2e}, {float(enough):.2e} would do; use weight decay, a larger "
            "tolerance or the closed form"
        )
