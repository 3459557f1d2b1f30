"""The watch over weights that become NaN or infinite."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from forgetless.support.errors import TrainingError


@final
class FiniteWatch:
    """Whether weights stay finite: noted after every few steps, checked now and then.

    At every check a GPU waits for Python, so there are few.

    Arguments:
        seeds: the S seeds.
        remedies: what may help if they are not, for the message.
    """

    def __init__(self, seeds: Sequence[int], remedies: Sequence[str]) -> None:
        self._seeds = seeds
        self._remedies = remedies
        self._task = self._first = 0
        self._notes: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """The number of notes that are not checked yet."""
        return len(self._notes)

    def begin(self, task: int, first_step: int) -> None:
        """Start watching a task whose first step is `first_step`."""
        self._task, self._first = task, first_step
        self._notes.clear()

    def note(self, step: int, finite: Tensor) -> None:
        """Note whether the weights are finite after a step, (S,)."""
        self._notes.append((step, finite))

    def check(self) -> None:
        """Raise if any of the weights were not finite."""
        if not self._notes:
            return
        broken = (~torch.stack([finite for _, finite in self._notes])).nonzero()
        steps = [step for step, _ in self._notes]
        self._notes.clear()
        if len(broken):
            row, seed = broken[0].tolist()
            raise TrainingError(
                f"the weights are NaN or infinite by step {steps[row] - self._first} of task "
                f"{self._task + 1}, seed {self._seeds[seed]}; {' or '.join(self._remedies)} "
                "may help"
            )
