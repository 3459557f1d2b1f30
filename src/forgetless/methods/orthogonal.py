"""What OGD and PCA-OGD have in common: directions that no step may have a part of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from forgetless.methods.base import LoadSamples, LossGrad, Method
from forgetless.subspace import DENSE, Storage, Subspace, empty_subspace, restored_subspace
from forgetless.subspace.footprint import Demand


class Orthogonal(Method[Subspace], ABC):
    """Steps are orthogonal to stored directions: g̃ = (I − Vᵀ V) g."""

    keeps_directions: ClassVar[bool] = True
    uses_loss_grad: ClassVar[bool] = False

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
        """The remembered directions."""
        return restored_subspace(of_seeds, theta, storage)

    def update(self, g: Tensor, state: Subspace, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project out the remembered directions."""
        return state.project_out(g)

    @abstractmethod
    def demand(self, available: int | None = None) -> Demand:
        """The directions stored for each task.

        Arguments:
            available: training samples of a task; None if unknown.
        """
