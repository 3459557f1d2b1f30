"""Remembered samples, task by task: what GEM and GEM-NT have in common."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, SampleSet
from forgetless.methods.rehearsal import Rehearsal, part


@final
@dataclass(frozen=True)
class Episodic:
    """The samples kept of each finished task."""

    tasks: tuple[SampleSet, ...] = ()

    def remember(self, samples: SampleSet) -> "Episodic":
        """One more task."""
        return Episodic((*self.tasks, samples))

    def mean_gradients(self, loss_grad: LossGrad) -> Tensor:
        """g_k = mean loss gradient on the samples of task k, for every task: (S, K, p)."""
        return loss_grad.of_each(self.tasks)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """The samples of each task, numbered."""
        return {
            f"{k}.{name}": tensor
            for k, samples in enumerate(self.tasks)
            for name, tensor in samples.tensors(seed).items()
        }

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]], load: LoadSamples) -> "Episodic":
        """From what `tensors` gave for each seed."""
        count = 1 + max((int(name.split(".")[0]) for name in of_seeds[0]), default=-1)
        return cls(tuple(load([part(of, str(k)) for of in of_seeds]) for k in range(count)))


class KeepsSamples(Rehearsal[Episodic], ABC):
    """A method that keeps some samples of each task, apart from those of the others."""

    kept = Episodic
    memory: int

    def consolidate(self, state: Episodic, theta: Tensor, task: FinishedTask) -> Episodic:
        """Keep some samples of the task."""
        return state.remember(task.draw(self.memory))
