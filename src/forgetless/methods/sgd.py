"""Plain stochastic gradient descent: nothing is done against forgetting."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.methods.base import FinishedTask, LossGrad, Method, Nothing


@final
@dataclass(frozen=True)
class SGD(Method[Nothing]):
    """g̃ = g, the lower reference."""

    name: ClassVar[str] = "sgd"

    def init(self, theta: Tensor) -> Nothing:
        """Nothing to remember."""
        return Nothing()

    def update(self, g: Tensor, state: Nothing, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """The gradient as it is."""
        return g

    def consolidate(self, state: Nothing, theta: Tensor, task: FinishedTask) -> Nothing:
        """Nothing to remember."""
        return state
