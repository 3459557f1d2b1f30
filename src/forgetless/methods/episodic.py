"""Remembered samples, task by task: the memory of GEM and GEM-NT."""

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import final

import torch
from torch import Tensor

from forgetless.methods.base import LossGrad, Samples


@final
@dataclass(frozen=True)
class Episodic:
    """The samples kept of each finished task."""

    tasks: tuple[Samples, ...] = ()

    def remember(self, samples: Samples) -> "Episodic":
        """One more task."""
        return Episodic((*self.tasks, samples))

    def union(self) -> Samples:
        """The samples of all tasks together."""
        return reduce(add, self.tasks)

    def mean_gradients(self, loss_grad: LossGrad) -> Tensor:
        """g_k = mean loss gradient on the samples of task k, for every task: (S, K, p)."""
        return torch.stack([loss_grad(samples) for samples in self.tasks], dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps."""
        return self.union().tensors() if self.tasks else {}
