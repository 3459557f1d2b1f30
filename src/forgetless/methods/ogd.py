"""Orthogonal gradient descent (Farajtabar et al. 2020)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.errors import require
from forgetless.methods.base import FinishedTask, LossGrad, Method
from forgetless.subspace import DenseSubspace


@final
@dataclass(frozen=True)
class OGD(Method[DenseSubspace]):
    """Steps are orthogonal to the tangent features of samples of earlier tasks: g̃ = (I − Vᵀ V) g.

    To first order the true-class outputs of those samples then stay as they were.

    Arguments:
        samples: samples of each task whose features are kept.
    """

    name: ClassVar[str] = "ogd"
    samples: int = 100

    def __post_init__(self) -> None:
        require(self.samples >= 1, "OGD's samples", self.samples, "at least 1")

    def init(self, theta: Tensor) -> DenseSubspace:
        """No directions yet."""
        return DenseSubspace.empty(theta)

    def update(self, g: Tensor, state: DenseSubspace, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project out the remembered directions."""
        return state.project_out(g)

    def consolidate(self, state: DenseSubspace, theta: Tensor, task: FinishedTask) -> DenseSubspace:
        """Add the features of some samples of the task."""
        features = task.features(task.draw(self.samples))
        return state.extend([phi.dense() for phi in features])
