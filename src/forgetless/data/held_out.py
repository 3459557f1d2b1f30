"""Any tasks, measured on some of their training samples in place of their test samples."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from forgetless.data.scenarios import Scenario, Split, Task
from forgetless.support.streams import stream
from forgetless.support.validation import require, whole


@final
class HeldOutTasks(Scenario):
    """The tasks of a scenario with training samples held out, to choose settings on.

    Arguments:
        tasks: the scenario; its test samples are not used.
        per_class: samples of each class that are held out of each task's training set.
        seed: of the choice.
    """

    measured_on = "validation"

    def __init__(self, tasks: Scenario, per_class: int, seed: int = 0) -> None:
        whole(1).check("validation_per_class", per_class)
        self.name, self.setting, self.n_tasks = tasks.name, tasks.setting, tasks.n_tasks
        self.input_shape, self.n_outputs = tuple(tasks.input_shape), tasks.n_outputs
        self._tasks, self._per_class, self._seed = tasks, per_class, seed

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, measured on the samples that are held out."""
        found = self._tasks.task(index, seeds)
        held = self._chosen(found.train, index)
        return Task(found.name, found.train.subset(~held), found.train.subset(held))

    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""
        return self._tasks.classes(index)

    def competing(self, index: int, learned: int | None = None) -> range:
        """The outputs that compete for a sample of task `index`."""
        return self._tasks.competing(index, learned)

    def _chosen(self, train: Split, index: int) -> Tensor:
        """Which samples of a task are held out, (n,)."""
        held = torch.zeros(len(train), dtype=torch.bool)
        for c in train.labels.unique().tolist():
            members = torch.nonzero(train.labels == c).flatten()
            fits, count = self._per_class < len(members), len(members)
            accepted = f"less than the {count} training samples of class {c} in task {index + 1}"
            require(fits, "validation_per_class", self._per_class, accepted)
            generator = stream(self._seed, f"held out of class {c}", index)
            held[members[torch.randperm(count, generator=generator)[: self._per_class]]] = True
        return held
