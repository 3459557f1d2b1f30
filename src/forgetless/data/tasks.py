"""Tasks and scenarios: a sequence of classification problems over tensors in memory."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from forgetless.support.validation import ConfigError, DataError, first_line, require

Setting = Literal["task", "domain", "class"]
SETTINGS: tuple[Setting, ...] = ("task", "domain", "class")


@final
@dataclass(frozen=True)
class Split:
    """The training or test samples of one task, shared by all seeds.

    Arguments:
        inputs: (n, *shape), ready for the network.
        labels: (n,), each an index among the outputs of the whole scenario.
        orders: (S, d), for each seed the order of the d numbers of an input, or None. Permuting
            the samples taken costs less than S permuted copies of the data.
    """

    inputs: Tensor
    labels: Tensor
    orders: Tensor | None = None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.labels)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (S, m, *shape) and labels (S, m) at index (S, m)."""
        inputs = self.inputs[index]
        if self.orders is not None:
            flat = inputs.flatten(2)
            inputs = flat.gather(2, self.orders.unsqueeze(1).expand_as(flat)).view_as(inputs)
        return inputs, self.labels[index]

    def subset(self, index: Tensor) -> "Split":
        """The samples at index (m,)."""
        return Split(self.inputs[index], self.labels[index], self.orders)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Split":
        """The same samples on another device."""
        orders = None if self.orders is None else self.orders.to(device)
        inputs, labels = self.inputs.to(device, dtype), self.labels.to(device)
        return Split(inputs, labels, orders)


@final
@dataclass(frozen=True)
class Task:
    """One problem of a sequence.

    Arguments:
        name: for tables and messages.
        train: the samples to learn from.
        test: the samples that accuracy is measured on.
    """

    name: str
    train: Split
    test: Split


class Scenario(ABC):
    """A sequence of tasks; the data of a task is created on request.

    The setting decides which outputs compete for a sample, in the loss and in the accuracy:

    - "task" (task-incremental): those of the sample's own task, which is known at test time.
    - "domain" (domain-incremental): all of them; every task has the same classes.
    - "class" (class-incremental): those of all classes seen so far. In training the cross-entropy
      is over these, for new and for stored samples.

    Attributes:
        name: for tables and the command line.
        setting: "task", "domain" or "class".
        n_tasks: the length of the sequence.
        input_shape: shape of one input.
        n_outputs: number of outputs that a network needs for all tasks.
        measured_on: whether the tasks' test sets are the "test" set or a "validation" set, held
            out of the training set.
        recipe: the options from which its name makes it again, as a trace notes them; None for
            tasks that only a script can make.
    """

    name: str
    setting: Setting
    n_tasks: int
    input_shape: tuple[int, ...]
    n_outputs: int
    measured_on: Literal["test", "validation"] = "test"
    recipe: Mapping[str, Any] | None = None

    @abstractmethod
    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, counted from 0, with the orders of these seeds."""

    @abstractmethod
    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""

    def competing(self, index: int, learned: int | None = None) -> range:
        """The outputs that compete for a sample of task `index`.

        Arguments:
            index: the sample's task.
            learned: the latest task that was learned; by default `index` itself.
        """
        if self.setting == "task":
            return self.classes(index)
        if self.setting == "domain":
            return range(self.n_outputs)
        latest = index if learned is None else max(index, learned)
        return range(max(self.classes(t).stop for t in range(latest + 1)))

    @property
    def has_heads(self) -> bool:
        """Whether tasks have their own outputs, so that a sample's task must be known."""
        own = any(len(self.classes(t)) < self.n_outputs for t in range(self.n_tasks))
        return self.setting == "task" and own

    def check(self) -> None:
        """Reject a scenario without a setting, or whose classes contradict it."""
        setting = getattr(self, "setting", None)
        accepted = "task, domain or class: which outputs compete for a sample"
        require(setting in SETTINGS, f"the setting of {self.name}", setting, accepted)
        seen = 0
        for t in range(self.n_tasks):
            own, whose = self.classes(t), f"the classes of task {t + 1}"
            inside = own.step == 1 and 0 <= own.start < own.stop <= self.n_outputs
            require(inside, whose, own, f"a range within the {self.n_outputs} outputs")
            if setting == "domain":
                require(own == range(self.n_outputs), whose, own, "all outputs in a domain setting")
            elif setting == "class":
                accepted = f"a range from at most {seen} in a class setting, without a gap"
                require(own.start <= seen, whose, own, accepted)
            seen = max(seen, own.stop)


def own_settings(scenario: Scenario, path: str | None) -> dict[str, Any]:
    """What a trace notes of tasks that are not a benchmark's.

    Arguments:
        path: where they are defined; None for an installed plug-in, whose name says it.
    """
    found: dict[str, Any] = {"setting": scenario.setting}
    if path is not None:
        found["scenario_from"] = path
    if scenario.measured_on != "test":
        found["measured_on"] = scenario.measured_on
    return found


Pair = tuple[Tensor, Tensor]
TaskSource = Pair | Dataset[Any]


@final
class TensorScenario(Scenario):
    """Any list of (train, test) pairs, each a pair of tensors or a map-style dataset.

    Arguments:
        tasks: for each task its training and its test samples, (inputs, labels) each.
        setting: which outputs compete (see `Scenario`). With "domain" all tasks have the same
            labels; with "class" every class has its own label, and each task continues where the
            earlier ones stop; with "task" labels count from 0 within each task, which has its own
            outputs.
        name: for tables and messages.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[TaskSource, TaskSource]],
        *,
        setting: Setting = "domain",
        name: str = "custom",
    ) -> None:
        require(setting in SETTINGS, "setting", setting, "task, domain or class")
        tasks = list(tasks)
        if not tasks:
            raise DataError("a scenario needs at least one task")
        pairs = [
            (_tensors(train, f"training set of task {t}"), _tensors(test, f"test set of task {t}"))
            for t, (train, test) in enumerate(tasks, 1)
        ]
        self.name = name
        self.setting = setting
        self.n_tasks = len(pairs)
        self.input_shape = tuple(pairs[0][0][0].shape[1:])
        for t, pair in enumerate(pairs, 1):
            for inputs, _ in pair:
                if tuple(inputs.shape[1:]) != self.input_shape:
                    raise DataError(
                        f"inputs of task {t} have shape {tuple(inputs.shape[1:])}, "
                        f"those of task 1 {self.input_shape}"
                    )
        labels = [{int(c) for _, y in pair for c in y.unique()} for pair in pairs]
        _check_labels(labels, setting)
        stops = [max(own) + 1 for own in labels]
        if setting == "task":
            starts = [sum(stops[:t]) for t in range(len(stops))]
            self._classes = [range(a, a + n) for a, n in zip(starts, stops, strict=True)]
        elif setting == "domain":
            self._classes = [range(max(stops))] * len(stops)
        else:
            self._classes = [range(min(own), stop) for own, stop in zip(labels, stops, strict=True)]
        self.n_outputs = max(c.stop for c in self._classes)
        self._splits = [
            tuple(Split(x, y + (c.start if setting == "task" else 0)) for x, y in pair)
            for pair, c in zip(pairs, self._classes, strict=True)
        ]

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, the same for every seed."""
        return Task(f"task {index + 1}", *self._splits[index])

    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""
        return self._classes[index]


def _check_labels(labels: Sequence[set[int]], setting: Setting) -> None:
    """Reject labels that belong to another setting."""
    seen: set[int] = set()
    for t, own in enumerate(labels, 1):
        if setting == "task" and min(own) > 0:
            raise ConfigError(
                f"the labels of task {t} start at {min(own)}: with setting='task' they count from "
                "0 within each task"
            )
        if setting == "domain" and not own & labels[0]:
            raise ConfigError(
                f"task {t} has none of the labels of task 1, and with setting='domain' all tasks "
                "have the same: choose setting='task' (labels from 0 within each task) or 'class'"
            )
        if setting == "class" and (own <= seen or max(own) + 1 != len(seen | own)):
            raise ConfigError(
                f"with setting='class' every class has its own label, and task {t} must add the "
                f"labels {len(seen)}, {len(seen) + 1}, …, not {', '.join(map(str, sorted(own)))}"
            )
        seen |= own


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
        reason = first_line(error)
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
            f"the {what} needs one integer label per input, ({len(inputs)},), "
            f"not {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if int(labels.min()) < 0:
        raise DataError(f"the {what} has a negative label, {int(labels.min())}")
    return inputs, labels.long()
