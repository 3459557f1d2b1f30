"""The interface between a continual-learning method and whoever drives it.

A method is a frozen dataclass of hyperparameters and three functions; what it remembers is a value
that is handed back and forth. It sees vectors in parameter space, never the model, the optimizer
or the loop. Every vector has a leading dimension of S seeds that do not know of each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from forgetless.tangent import TangentFeatures


@final
@dataclass(frozen=True)
class Samples:
    """Training samples of one or several tasks, n for each of S seeds.

    Arguments:
        inputs: (S, n, *).
        labels: (S, n), each an index among all of the network's outputs.
        tasks: (S, n), the task that each sample came from (it decides the head).
    """

    inputs: Tensor
    labels: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        """How many samples a seed has."""
        return self.labels.shape[1]

    def __add__(self, other: Self) -> Self:
        """Both, these first."""
        return type(self)(
            torch.cat([self.inputs, other.inputs], 1),
            torch.cat([self.labels, other.labels], 1),
            torch.cat([self.tasks, other.tasks], 1),
        )

    def select(self, index: Tensor) -> Self:
        """The samples at index (S, m), a choice of its own for each seed."""
        seed = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        return type(self)(
            self.inputs[seed, index], self.labels[seed, index], self.tasks[seed, index]
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps."""
        return {"inputs": self.inputs, "labels": self.labels, "tasks": self.tasks}


class LossGrad(Protocol):
    """The gradient of the mean loss on remembered samples, at the current weights."""

    def __call__(
        self, samples: Samples, batch_size: int | None = None, *, one_head: bool = False
    ) -> Tensor:
        """The gradient, (S, p).

        Arguments:
            samples: where to take it.
            batch_size: if given, on a random choice of this many of them.
            one_head: send all of them through the head of the first.
        """


class FinishedTask(Protocol):
    """What a method may ask of the task that was just learned, at the weights it ended with."""

    @property
    def size(self) -> int:
        """How many training samples the task has."""

    def draw(self, count: int) -> Samples:
        """A random choice of its training samples, all of them if it has no more than count."""

    def features(self, samples: Samples) -> Sequence[TangentFeatures]:
        """φ of the samples' true-class outputs, one operator a seed."""

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (S, p)."""


class State(Protocol):
    """What a method remembers. Never changed in place."""

    def tensors(self) -> dict[str, Tensor]:
        """The parts that a trace keeps, each with the seeds as leading dimension."""


@final
@dataclass(frozen=True)
class Nothing:
    """The memory of a method that keeps none."""

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps: nothing."""
        return {}


S = TypeVar("S", bound=State)


class Method(ABC, Generic[S]):
    """A way to learn the next task without losing the earlier ones.

    Subclasses are frozen dataclasses whose fields are the hyperparameters.
    """

    name: ClassVar[str]

    @abstractmethod
    def init(self, theta: Tensor) -> S:
        """What is remembered before the first task; theta is (S, p)."""

    @abstractmethod
    def update(self, g: Tensor, state: S, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """The direction g̃ to step against, from the gradient g of the current batch: (S, p)."""

    @abstractmethod
    def consolidate(self, state: S, theta: Tensor, task: FinishedTask) -> S:
        """What is remembered once a task is learned."""

    @property
    def reaches_heads(self) -> bool:
        """Whether the method works on the heads too, not only on what the tasks share.

        Projections away from a task's features need not: its head is left alone by other tasks.
        Methods that follow the loss on remembered samples do, for it depends on their heads.
        """
        return False

    def trains_heads(self, state: S) -> bool:
        """Whether parameters outside of the method's reach (heads) follow their own gradient."""
        return True
