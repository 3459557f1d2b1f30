"""Joint training on all tasks so far: the upper reference, which keeps all data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from forgetless.linalg import add_scaled
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, SampleSet
from forgetless.methods.rehearsal import Rehearsal, part
from forgetless.support.options import option
from forgetless.support.validation import whole


@final
@dataclass(frozen=True)
class Everything:
    """All training samples of the finished tasks, and how many tasks that were."""

    samples: SampleSet | None = None
    tasks: int = 0

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """The samples of a seed, and the number of tasks."""
        samples = {} if self.samples is None else self.samples.tensors(seed)
        return {"count": torch.tensor(self.tasks)} | {f"all.{n}": t for n, t in samples.items()}

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]], load: LoadSamples) -> "Everything":
        """From what `tensors` gave for each seed."""
        tasks = int(of_seeds[0]["count"])
        return cls(load([part(of, "all") for of in of_seeds]) if tasks else None, tasks)


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
    kept = Everything
    batch_size: int = option(
        32, "Samples of earlier tasks in a step.", accepted=whole(1), setting="joint_batch"
    )

    @property
    def is_projection(self) -> bool:
        """The earlier tasks' gradients are added to the gradient."""
        return False

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
