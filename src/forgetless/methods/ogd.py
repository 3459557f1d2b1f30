"""Orthogonal gradient descent (Farajtabar et al. 2020)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.errors import require
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, Method
from forgetless.subspace import DENSE, Storage, Subspace, empty_subspace, restored_subspace


@final
@dataclass(frozen=True)
class OGD(Method[Subspace]):
    """Steps are orthogonal to the tangent features of samples of earlier tasks: g̃ = (I − Vᵀ V) g.

    To first order the true-class outputs of those samples then stay as they were.

    Arguments:
        samples: samples of each task whose features are kept.
    """

    name: ClassVar[str] = "ogd"
    samples: int = 100

    def __post_init__(self) -> None:
        require(self.samples >= 1, "OGD's samples", self.samples, "at least 1")

    def init(self, theta: Tensor, storage: Storage = DENSE) -> Subspace:
        """No directions yet."""
        return empty_subspace(theta, storage)

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> Subspace:
        """What was remembered."""
        return restored_subspace(of_seeds, theta, storage)

    def update(self, g: Tensor, state: Subspace, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project out the remembered directions."""
        return state.project_out(g)

    def consolidate(self, state: Subspace, theta: Tensor, task: FinishedTask) -> Subspace:
        """Add the features of some samples of the task."""
        features = task.features(task.draw(self.samples))
        return state.add_samples(features)
