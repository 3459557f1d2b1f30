"""Joint training on all tasks so far: the upper reference, which keeps all data."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.errors import require
from forgetless.linalg import add_scaled
from forgetless.methods.base import FinishedTask, LossGrad, Method, Samples


@final
@dataclass(frozen=True)
class Everything:
    """All training samples of the finished tasks, and how many tasks that were."""

    samples: Samples | None = None
    tasks: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps: nothing, for the dataset is there already."""
        return {}


@final
@dataclass(frozen=True)
class Joint(Method[Everything]):
    """Follows the mean loss of all tasks seen so far.

    g̃ = (g + K r) / (K + 1), with r the gradient on a random batch of the K earlier tasks' samples:
    for tasks of one size an unbiased estimate of the gradient on the union of their data.

    Arguments:
        batch_size: samples of the earlier tasks in every step.
    """

    name: ClassVar[str] = "joint"
    batch_size: int = 32

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "joint's batch_size", self.batch_size, "at least 1")

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True

    def init(self, theta: Tensor) -> Everything:
        """No samples yet."""
        return Everything()

    def update(self, g: Tensor, state: Everything, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Mix in the gradient on the earlier tasks."""
        if state.samples is None:
            return g
        earlier = loss_grad(state.samples, self.batch_size)
        return add_scaled(g, state.tasks / (state.tasks + 1), earlier - g)

    def consolidate(self, state: Everything, theta: Tensor, task: FinishedTask) -> Everything:
        """Keep all of the task."""
        new = task.draw(task.size)
        return Everything(new if state.samples is None else state.samples + new, state.tasks + 1)
