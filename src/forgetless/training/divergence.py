"""Whether weights stay finite: noted after every few steps, looked at now and then."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from forgetless.support.errors import TrainingError


@final
class FiniteWatch:
    """Steps after which each seed's weights were finite or not.

    A GPU would have to wait for Python at every look, so there are few.

    Arguments:
        seeds: the S seeds.
        remedies: what may help where they are not, for the message.
    """

    def __init__(self, seeds: Sequence[int], remedies: Sequence[str]) -> None:
        self._seeds = seeds
        self._remedies = remedies
        self._task = self._first = 0
        self._noted: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """How many notes nobody has looked at."""
        return len(self._noted)

    def begin(self, task: int, first_step: int) -> None:
        """A task is learned from this step of the run on."""
        self._task, self._first = task, first_step
        self._noted.clear()

    def note(self, step: int, finite: Tensor) -> None:
        """After a step, the last of some: whether the weights are finite, (S,)."""
        self._noted.append((step, finite))

    def look(self) -> None:
        """Raise if any of the weights were not finite."""
        if not self._noted:
            return
        broken = (~torch.stack([finite for _, finite in self._noted])).nonzero()
        steps = [step for step, _ in self._noted]
        self._noted.clear()
        if len(broken):
            row, seed = broken[0].tolist()
            raise TrainingError(
                f"the weights are NaN or infinite by step {steps[row] - self._first} of task "
                f"{self._task + 1}, seed {self._seeds[seed]}; {' or '.join(self._remedies)} "
                "may help"
            )
