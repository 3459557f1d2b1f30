"""The interface between a continual-learning method and whoever drives it.

A method is a frozen dataclass of hyperparameters and three functions; what it remembers is a value
that is handed back and forth. It sees vectors in parameter space, never the model, the optimizer
or the loop. Every vector has a leading dimension of S seeds that do not know of each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from forgetless.subspace import DENSE, Storage
from forgetless.support.errors import ConfigError
from forgetless.support.options import check_options
from forgetless.tangent import TangentFeatures


class SampleSet(Protocol):
    """Remembered training samples. A method keeps them and hands them back, and looks no closer."""

    def __len__(self) -> int:
        """How many samples a seed has."""

    def __add__(self, other: Any) -> Any:
        """Both, these first."""

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""


# From what `SampleSet.tensors` gave for each seed to the samples.
LoadSamples = Callable[[Sequence[Mapping[str, Tensor]]], SampleSet]


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

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""
        of_all = {"inputs": self.inputs, "labels": self.labels, "tasks": self.tasks}
        return {name: tensor[seed] for name, tensor in of_all.items()}

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """From what `tensors` gave for each seed."""
        inputs, labels, tasks = (
            torch.stack([tensors[name] for tensors in of_seeds])
            for name in ("inputs", "labels", "tasks")
        )
        return cls(inputs, labels, tasks)


class LossGrad(Protocol):
    """The gradient of the mean loss on remembered samples, at the current weights."""

    def __call__(
        self, samples: Any, batch_size: int | None = None, *, one_head: bool = False
    ) -> Tensor:
        """The gradient, (S, p).

        Arguments:
            samples: where to take it.
            batch_size: if given, on a random choice of this many of them.
            one_head: send all of them through the head of the first.
        """

    def of_each(self, several: Sequence[Any]) -> Tensor:
        """The gradients on K sets of samples, (S, K, p)."""


class FinishedTask(Protocol):
    """What a method may ask of the task that was just learned, at the weights it ended with."""

    @property
    def size(self) -> int:
        """How many training samples the task has."""

    def draw(self, count: int) -> SampleSet:
        """A random choice of its training samples, all of them if it has no more than count."""

    def features(self, samples: Any) -> Sequence[TangentFeatures]:
        """φ of the samples' true-class outputs, one operator a seed."""

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (S, p)."""


class State(Protocol):
    """What a method remembers. Never changed in place."""

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """All of it that belongs to a seed, enough to restore it."""


@final
@dataclass(frozen=True)
class Nothing:
    """The memory of a method that keeps none."""

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}


S = TypeVar("S", bound=State)


class Method(ABC, Generic[S]):
    """A way to learn the next task without losing the earlier ones.

    Subclasses are frozen dataclasses whose fields are the hyperparameters. A field made by `option`
    is checked when the method is made, and is an option of the command line.

    Attributes:
        name: in configurations and on the command line.
        label: as people write it; by default the name.
        summary: one line for `forgetless list`.
        protects: whether it does anything against forgetting.
        keeps_directions: whether its memory is a subspace, which has a storage and fits a budget.
        keeps_all_data: whether its memory is all training data, which a trace need not repeat.
        uses_loss_grad: whether `update` calls `loss_grad`.
        replaces: setting → another setting that is not used where the first is given.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    protects: ClassVar[bool] = True
    keeps_directions: ClassVar[bool] = False
    keeps_all_data: ClassVar[bool] = False
    uses_loss_grad: ClassVar[bool] = True
    replaces: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        called = self.label or self.name
        check_options(type(self), vars(self), lambda field: f"{called}'s {field}")

    @abstractmethod
    def init(self, theta: Tensor, storage: Storage = DENSE) -> S:
        """What is remembered before the first task.

        Arguments:
            theta: the weights, (S, p).
            storage: how directions are to be kept, for methods that keep directions.
        """

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> S:
        """What was remembered, from what its `tensors` gave for each seed."""
        raise ConfigError(f"{type(self).__name__} has no `restore`: its memory cannot be loaded")

    @abstractmethod
    def update(self, g: Tensor, state: S, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """The direction g̃ to step against, from the gradient g of the current batch: (S, p)."""

    @abstractmethod
    def consolidate(self, state: S, theta: Tensor, task: FinishedTask) -> S:
        """What is remembered once a task is learned."""

    @property
    def is_projection(self) -> bool:
        """Whether `update` projects, so that any step may take the gradient's place in it.

        Then what an optimizer makes of the gradients can be projected, momentum and all. Other
        methods change the gradient itself, and only that.
        """
        return True

    @property
    def steadied_by(self) -> str:
        """What of the method, beside a smaller learning rate, may help where training diverges."""
        return ""

    @property
    def reaches_heads(self) -> bool:
        """Whether the method works on the heads too, not only on what the tasks share.

        Projections away from a task's features need not: its head is left alone by other tasks.
        Methods that follow the loss on remembered samples do, for it depends on their heads.
        """
        return False

    @property
    def may_leave_unprotected(self) -> bool:
        """Whether some parameters can be trained out of the method's reach throughout a run."""
        return True

    def trains_heads(self, state: S) -> bool:
        """Whether parameters outside of the method's reach (heads) follow their own gradient."""
        return True
