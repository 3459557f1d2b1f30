"""A task that a user's model has just learned, as methods see it."""

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from forgetless.guard.batches.loading import TaskData
from forgetless.guard.batches.outputs import refuse_none
from forgetless.guard.batches.samples import Part, Remembered
from forgetless.guard.distributed.gathering import SharedTaskData
from forgetless.guard.model import GuardedModel
from forgetless.support.errors import DataError, NoSamplesError
from forgetless.tangent import TangentFeatures

# Samples whose per-sample gradients are looked at together when only their sum is wanted.
_FISHER_CHUNK = 1024


@final
class GuardedTask:
    """`FinishedTask`: what a method may ask of the task that was just learned."""

    def __init__(self, model: GuardedModel, data: TaskData | SharedTaskData) -> None:
        self.model = model.gathered()
        self.data = data
        self._drawn: Remembered | None = None

    @property
    def size(self) -> int:
        """How many training samples the task has."""
        return self.data.size

    def draw(self, count: int) -> Remembered:
        """A random choice of its training samples."""
        self._drawn = self.data.draw(count)
        return self._drawn

    def features(self, samples: Remembered) -> Sequence[TangentFeatures]:
        """φ of the samples' protected scalars."""
        self._drawn = None
        phi = self.model.features(samples)
        refuse_none(self.model.output, self.model.counted(samples.parts))
        return [phi]

    def check(self) -> None:
        """Refuse samples that are kept for their loss and have none."""
        if self._drawn is not None:
            self.model.check_losses(self._drawn)

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (1, p)."""
        parameters = self.model.parameters
        width = sum(prod(shape) for shape in parameters.shapes.values())
        total = parameters.empty().new_zeros(1, width)
        waiting: list[Part] = []
        seen = labels = 0
        for part in self.data.batches():
            waiting.append(part)
            seen += len(part)
            labels += self.model.counted([part])
            if sum(map(len, waiting)) >= _FISHER_CHUNK:
                total += self.model.loss_features(Remembered.stacked(waiting)).squared_sum()
                waiting = []
        if not int(self.data.summed(torch.tensor(seen))):
            raise NoSamplesError("the loader has no samples")
        if waiting:
            total += self.model.loss_features(Remembered.stacked(waiting)).squared_sum()
        self.model.refuse_unlabelled(int(self.data.summed(torch.tensor(labels))))
        total = self.data.summed(total)
        if not bool(total.isfinite().all()):
            raise DataError("the loss of the task's samples has a NaN or infinite gradient")
        return parameters.of_whole(total)
