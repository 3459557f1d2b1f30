"""Tasks and scenarios: a sequence of classification problems over tensors in memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from forgetless.support.errors import DataError


@final
@dataclass(frozen=True)
class Split:
    """The training or test samples of one task, shared by all seeds.

    Arguments:
        inputs: (n, *shape), ready for the network.
        labels: (n,), each an index among the outputs of the whole scenario.
        orders: (S, d), for each seed the order in which it sees the d numbers of an input, or
            None. Permuting what is looked at costs less than S permuted copies of the data.
        per_seed: whether every seed has inputs of its own, (S, n, *shape).
    """

    inputs: Tensor
    labels: Tensor
    orders: Tensor | None = None
    per_seed: bool = False

    def __len__(self) -> int:
        """How many samples."""
        return len(self.labels)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (S, m, *shape) and labels (S, m) at index (S, m)."""
        if self.per_seed:
            seed = torch.arange(len(index), device=index.device).unsqueeze(1)
            return self.inputs[seed, index], self.labels[index]
        inputs = self.inputs[index]
        if self.orders is not None:
            flat = inputs.flatten(2)
            inputs = flat.gather(2, self.orders.unsqueeze(1).expand_as(flat)).view_as(inputs)
        return inputs, self.labels[index]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Split":
        """The same samples on another device."""
        orders = None if self.orders is None else self.orders.to(device)
        inputs, labels = self.inputs.to(device, dtype), self.labels.to(device)
        return Split(inputs, labels, orders, self.per_seed)


@final
@dataclass(frozen=True)
class Task:
    """One problem of a sequence.

    Arguments:
        name: for people.
        train: the samples to learn from.
        test: the samples that accuracy is measured on.
        classes: the outputs that the task's samples choose among.
    """

    name: str
    train: Split
    test: Split
    classes: range


class Scenario(ABC):
    """A sequence of tasks; a task's data is made when it is asked for.

    Attributes:
        name: for people and for the command line.
        n_tasks: the length of the sequence.
        input_shape: shape of one input.
        n_outputs: outputs that a network needs, those of all tasks together.
    """

    name: str
    n_tasks: int
    input_shape: tuple[int, ...]
    n_outputs: int

    @abstractmethod
    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index` (from 0) as these seeds see it."""

    @abstractmethod
    def classes(self, index: int) -> range:
        """The outputs of task `index`."""

    @property
    def has_heads(self) -> bool:
        """Whether tasks have outputs of their own, so that a sample's task must be known."""
        return any(len(self.classes(t)) < self.n_outputs for t in range(self.n_tasks))


Pair = tuple[Tensor, Tensor]
TaskSource = Pair | Dataset[Any]


@final
class TensorScenario(Scenario):
    """Any list of (train, test) pairs, each a pair of tensors or a map-style dataset.

    Arguments:
        tasks: for each task its training and its test samples, (inputs, labels) each.
        heads: give every task outputs of its own; labels then count from 0 within each task.
            Otherwise all tasks share one set of outputs.
        name: for people.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[TaskSource, TaskSource]],
        *,
        heads: bool = False,
        name: str = "custom",
    ) -> None:
        tasks = list(tasks)
        if not tasks:
            raise DataError("a scenario needs at least one task")
        pairs = [
            (_tensors(train, f"training set of task {t}"), _tensors(test, f"test set of task {t}"))
            for t, (train, test) in enumerate(tasks, 1)
        ]
        self.name = name
        self.n_tasks = len(pairs)
        self.input_shape = tuple(pairs[0][0][0].shape[1:])
        for t, pair in enumerate(pairs, 1):
            for inputs, _ in pair:
                if tuple(inputs.shape[1:]) != self.input_shape:
                    raise DataError(
                        f"inputs of task {t} have shape {tuple(inputs.shape[1:])}, "
                        f"those of task 1 {self.input_shape}"
                    )
        sizes = [int(max(train[1].max(), test[1].max())) + 1 for train, test in pairs]
        if heads:
            starts = [sum(sizes[:t]) for t in range(len(sizes))]
            self._classes = [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        else:
            self._classes = [range(max(sizes))] * len(sizes)
        self.n_outputs = max(c.stop for c in self._classes)
        self._splits = [
            tuple(Split(x, y + c.start) for x, y in pair)
            for pair, c in zip(pairs, self._classes, strict=True)
        ]

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, the same for every seed."""
        train, test = self._splits[index]
        return Task(f"task {index + 1}", train, test, self._classes[index])

    def classes(self, index: int) -> range:
        """The outputs of task `index`."""
        return self._classes[index]


def _tensors(source: TaskSource, what: str) -> Pair:
    """Inputs and labels as two checked tensors."""
    try:
        if isinstance(source, Dataset):
            samples = [source[i] for i in range(len(source))]  # type: ignore[arg-type]
            if not samples:
                raise DataError(f"the {what} is empty")
            source = (
                torch.stack([torch.as_tensor(x) for x, _ in samples]),
                torch.stack([torch.as_tensor(y) for _, y in samples]),
            )
        inputs, labels = (torch.as_tensor(part) for part in source)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"the {what} must be a pair of tensors, or a map-style dataset of input tensors and "
            f"labels: {reason}"
        ) from error
    if len(inputs) == 0:
        raise DataError(f"the {what} is empty")
    if not inputs.is_floating_point():
        raise DataError(f"the {what} must have floating-point inputs, not {inputs.dtype}")
    if not bool(inputs.isfinite().all()):
        raise DataError(f"the {what} has inputs that are NaN or infinite")
    if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"the {what} needs one whole-number label per input, ({len(inputs)},), "
            f"not {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if int(labels.min()) < 0:
        raise DataError(f"the {what} has a negative label, {int(labels.min())}")
    return inputs, labels.long()
