"""Plain stochastic gradient descent: nothing is done against forgetting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, Method, Nothing
from forgetless.subspace import DENSE, Storage


@final
@dataclass(frozen=True)
class SGD(Method[Nothing]):
    """g̃ = g, the lower reference."""

    name: ClassVar[str] = "sgd"
    label: ClassVar[str] = "SGD"
    summary: ClassVar[str] = "plain SGD, the lower reference"
    protects: ClassVar[bool] = False
    uses_loss_grad: ClassVar[bool] = False

    def init(self, theta: Tensor, storage: Storage = DENSE) -> Nothing:
        """Nothing to remember."""
        return Nothing()

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> Nothing:
        """Nothing was remembered."""
        return Nothing()

    def update(self, g: Tensor, state: Nothing, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """The gradient as it is."""
        return g

    def consolidate(self, state: Nothing, theta: Tensor, task: FinishedTask) -> Nothing:
        """Nothing to remember."""
        return state
