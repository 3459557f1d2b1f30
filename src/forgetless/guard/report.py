"""What a guard tells: how much it removes of the steps, and what it keeps in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.support.collectives import Ranks
from forgetless.support.sizes import in_words


@final
@dataclass(frozen=True)
class Stats:
    """How much of the steps was removed, since the latest task was remembered.

    A share is of the steps' squared length: 1 means that nothing is left of them. What a projection
    puts into a parameter counts as removed from it, to a share of at most 1.

    Arguments:
        steps: how many steps were looked at.
        removed: mean share of all of them.
        last: share of the latest one.
        layers: parameter → mean share of its part of the steps.
    """

    steps: int
    removed: float
    last: float
    layers: Mapping[str, float]

    def __str__(self) -> str:
        lines = [f"{self.removed:6.1%} of {self.steps} steps removed ({self.last:.1%} of the last)"]
        lines += [f"{share:6.1%}  {name}" for name, share in self.layers.items()]
        return "\n".join(lines)


@final
class Removed:
    """Sums of squared lengths, before and removed, parameter by parameter; no synchronisation."""

    def __init__(self, names: Sequence[str], ranks: Ranks | None = None) -> None:
        self.names = tuple(names)
        self.ranks = ranks  # that each hold a part of every parameter, if there are several
        self.steps = 0
        self.sums: Tensor | None = None  # (2, parameters)
        self.last: Tensor | None = None

    def add(self, step: Sequence[Tensor], removed: Sequence[Tensor]) -> None:
        """Note a step as it was and what was taken out of it, parameter by parameter.

        The sums stay where they are, so that a GPU can repeat it. `steps` is counted elsewhere.
        """
        norms = torch.stack(torch._foreach_norm([*step, *removed]))
        squares = float64(norms).square().view(2, -1)
        if self.sums is None or self.last is None:
            self.sums, self.last = torch.zeros_like(squares), torch.zeros_like(squares)
        # A step that overflowed is one that `GradScaler` leaves out.
        self.last.copy_(torch.where(squares.isfinite().all(), squares, 0.0))
        self.sums += self.last

    def stats(self) -> Stats:
        """The shares so far."""
        if self.sums is None or self.last is None:
            return Stats(0, 0.0, 0.0, dict.fromkeys(self.names, 0.0))
        sums, last = self.sums.cpu(), self.last.cpu()
        if self.ranks is not None:
            sums, last = self.ranks.sum(torch.stack([sums, last]))
        layers = [_share(removed, whole) for whole, removed in sums.T.tolist()]
        return Stats(
            self.steps,
            _share(float(sums[1].sum()), float(sums[0].sum())),
            _share(float(last[1].sum()), float(last[0].sum())),
            dict(zip(self.names, layers, strict=True)),
        )


def _share(removed: float, whole: float) -> float:
    return min(1.0, removed / whole) if whole > 0 else 0.0


@final
@dataclass(frozen=True)
class TaskMemory:
    """What is kept of one task.

    Arguments:
        directions: that were new with it; 0 for methods that keep none.
        bytes: of memory.
        share: of the variance of its samples' features that was remembered when it ended; None
            for methods that keep no directions.
    """

    directions: int
    bytes: int
    share: float | None


@final
@dataclass(frozen=True)
class MemoryReport:
    """What a guard keeps.

    Arguments:
        storage: how, in words.
        bytes: in all.
        directions: in all.
        share: of the variance of all tasks' features, what the directions explain; None for
            methods that keep no directions.
        tasks: task by task.
        layers: parameter → bytes.
        notes: what was chosen or given up to stay within the budget.
    """

    storage: str
    bytes: int
    directions: int
    share: float | None
    tasks: tuple[TaskMemory, ...]
    layers: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{in_words(self.bytes)}, {self.storage}"]
        if self.share is not None:
            lines[0] += f", {self.directions} directions, {self.share:.1%} of the variance"
        for number, task in enumerate(self.tasks, 1):
            line = f"  task {number}: {in_words(task.bytes)}"
            if task.share is not None:
                share = f"{task.share:.1%} of its variance, at its end"
                line += f", {task.directions} directions, {share}"
            lines.append(line)
        lines += [f"  {name}: {in_words(size)}" for name, size in self.layers.items()]
        return "\n".join([*lines, *self.notes])
