"""Joint training on all tasks so far: the upper reference, which keeps all data."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from forgetless.linalg import add_scaled
from forgetless.methods.base import FinishedTask, View, choose
from forgetless.methods.cost import TaskProbe
from forgetless.methods.rehearsal import Rehearsal
from forgetless.support.validation import option, whole


@final
@dataclass(frozen=True)
class Everything:
    """All training samples of the finished tasks, and how many tasks that were."""

    samples: Any = None
    tasks: int = 0


@final
@dataclass(frozen=True)
class Joint(Rehearsal[Everything]):
    """Follows the mean loss of all tasks seen so far.

    g̃ = (g + K r) / (K + 1), with r the gradient on a random batch of the K earlier tasks' samples:
    for tasks of one size an unbiased estimate of the gradient on the union of their data.

    Arguments:
        batch_size: samples of the earlier tasks in every step.
    """

    name: ClassVar[str] = "joint"
    label: ClassVar[str] = "joint"
    summary: ClassVar[str] = "training on all tasks so far, the upper reference"
    keeps_all_data: ClassVar[bool] = True
    acts_on = "gradient"
    protected_by = "batch_size"
    batch_size: int = option(
        32, "Samples of earlier tasks in a step.", accepted=whole(1), setting="joint_batch"
    )

    def kept(self, probe: TaskProbe) -> int | None:
        """All of them."""
        return probe.size

    def rehearsed(self, tasks: int) -> int:
        """A batch."""
        return self.batch_size

    def init(self, view: View) -> Everything:
        """No samples yet."""
        return Everything()

    def update(self, g: Tensor, state: Everything, view: View) -> tuple[Tensor, Everything]:
        """Mix in the gradient on the earlier tasks."""
        if state.samples is None:
            return g, state
        earlier = view.gradient(choose(view, state.samples, self.batch_size))
        return add_scaled(g, state.tasks / (state.tasks + 1), earlier - g), state

    def consolidate(self, state: Everything, view: View, task: FinishedTask) -> Everything:
        """Store all of the task."""
        new = task.draw(task.size)
        return Everything(new if state.samples is None else state.samples + new, state.tasks + 1)
