"""Plain stochastic gradient descent: nothing is done against forgetting."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe


@final
@dataclass(frozen=True)
class SGD(Method[None]):
    """g̃ = g, the lower reference."""

    name: ClassVar[str] = "sgd"
    label: ClassVar[str] = "SGD"
    summary: ClassVar[str] = "plain SGD, the lower reference"
    acts_on = "update"
    protects: ClassVar[bool] = False
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def cost(self, probe: TaskProbe) -> Cost:
        """Nothing."""
        return Cost(0, 0, 0)

    def init(self, view: View) -> None:
        """Nothing to remember."""

    def update(self, g: Tensor, state: None, view: View) -> tuple[Tensor, None]:
        """The gradient as it is."""
        return g, None

    def consolidate(self, state: None, view: View, task: FinishedTask) -> None:
        """Nothing to remember."""
