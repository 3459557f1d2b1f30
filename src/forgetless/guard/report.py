"""Reports of a guard: how much of the steps it removes, and what it stores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from forgetless.guard.drift import Drift
from forgetless.linalg import float64
from forgetless.methods.state import STRUCTURE, state_tensors
from forgetless.subspace import Directions
from forgetless.support.collectives import Ranks
from forgetless.support.validation import format_bytes

_NO_TASK = "no task is stored yet: nothing is protected"


@final
@dataclass(frozen=True)
class Stats:
    """How much a method changed the steps, since the latest task was stored.

    Of projected steps Δθ_t, whose removed parts are ρ_t, the share is Σ ‖ρ_t‖² / Σ ‖Δθ_t‖²: 1 means
    that nothing is left. A component that the projection adds to a parameter counts as removed, up
    to a share of 1. To first order, steps with the gradients g_t would lower the loss of the new
    task by −Σ g_tᵀ Δθ_t; the share of it that was removed is `blocked`.

    A penalty removes nothing. It adds a vector ρ_t to the gradient g_t, as long as
    (Σ ‖ρ_t‖² / Σ ‖g_t‖²)^½ of it, its `pull`. What it blocks has no first order: a batch's
    gradient is mostly noise, which a penalty damps, to the good of the loss.

    Arguments:
        steps: how many steps there were that were projected.
        removed: mean share of all of them.
        last: share of the latest one.
        layers: parameter → mean share of its part of the steps.
        tasks: how many tasks are stored.
        drift: how far the outputs on earlier tasks have moved, if it was measured.
        blocked: share of the new task's progress that projections removed, looked at in every
            tenth step; below zero if they add to it, None if there were none.
        pull: what a method adds to the gradient, in lengths of the gradient, looked at in every
            tenth step; None if nothing was looked at.
        method: what the method tells of itself, such as the strength of its penalty.
    """

    steps: int
    removed: float
    last: float
    layers: Mapping[str, float]
    tasks: int = 0
    drift: Drift | None = None
    blocked: float | None = None
    pull: float | None = None
    method: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The numbers by name, for a logger: "removed", "blocked", "pull", and more."""
        found = {"removed": self.removed} if self.steps else {}
        found |= {} if self.blocked is None else {"blocked": self.blocked}
        found |= {} if self.pull is None else {"pull": self.pull}
        return {**found, **self.method, **(self.drift.metrics() if self.drift else {})}

    @property
    def share(self) -> float | None:
        """The share of the steps that was removed; None if none was projected."""
        return self.removed if self.steps else None

    def __str__(self) -> str:
        lines = [] if self.tasks else [_NO_TASK]
        lines += [f"{name} {value:.4g}" for name, value in self.method.items()]
        if self.steps:
            last = f"({self.last:.1%} of the last)"
            lines += [f"{self.removed:6.1%} of {self.steps} steps removed {last}"]
        elif self.tasks and self.pull is None:
            lines += ["no step yet since the latest task was stored"]
        if self.blocked is not None:
            lines += [f"{self.blocked:6.1%} of what the steps would have learned, to first order"]
        if self.pull is not None:
            lines += [f"pull {self.pull:.3g}: what was added, in lengths of the loss's gradient"]
        layers = self.layers.items() if self.steps else ()
        lines += [f"{share:6.1%}  {name}" for name, share in layers]
        return "\n".join([*lines, *([f"drift {self.drift}"] if self.drift else [])])


@final
class Removed:
    """Sums of squared lengths, before and removed, parameter by parameter; no synchronisation.

    Arguments:
        names: of the parameters.
        ranks: the processes that each hold a part of every parameter, if there are several.
        adds: whether a method adds to the gradient, and removes nothing.
    """

    def __init__(
        self, names: Sequence[str], ranks: Ranks | None = None, *, adds: bool = False
    ) -> None:
        self.names = tuple(names)
        self._adds = adds
        self.ranks = ranks
        self.steps = 0
        self.sums: Tensor | None = None  # (2, parameters)
        self.last: Tensor | None = None
        self.progress: Tensor | None = None  # (2,)

    def add(self, step: Sequence[Tensor], removed: Sequence[Tensor]) -> None:
        """Add a step's squared lengths, and those of its removed part, parameter by parameter.

        The sums are changed in place, so that a GPU can repeat it. `steps` is counted elsewhere.
        """
        norms = torch.stack(torch._foreach_norm([*step, *removed]))
        squares = float64(norms).square().view(2, -1)
        if self.sums is None or self.last is None:
            self.sums, self.last = torch.zeros_like(squares), torch.zeros_like(squares)
        # A step that overflowed is one that `GradScaler` leaves out.
        self.last.copy_(torch.where(squares.isfinite().all(), squares, 0.0))
        self.sums += self.last

    def weigh(self, whole: Tensor, removed: Tensor) -> None:
        """Add a step's progress and what of it was removed, or squared lengths: scalars."""
        found = float64(torch.stack([whole, removed]))
        found = torch.where(found.isfinite().all(), found, 0.0)
        self.progress = found if self.progress is None else self.progress + found

    def stats(self) -> Stats:
        """The shares so far."""
        weighed = self._weighed()
        blocked = None if self._adds else weighed
        pull = math.sqrt(weighed) if self._adds and weighed is not None else None
        if self.sums is None or self.last is None:
            none = dict.fromkeys(self.names, 0.0)
            return Stats(0, 0.0, 0.0, none, blocked=blocked, pull=pull)
        sums, last = self.sums.cpu(), self.last.cpu()
        if self.ranks is not None:
            sums, last = self.ranks.sum(torch.stack([sums, last]))
        layers = [_share(removed, whole) for whole, removed in sums.T.tolist()]
        return Stats(
            self.steps,
            _share(float(sums[1].sum()), float(sums[0].sum())),
            _share(float(last[1].sum()), float(last[0].sum())),
            dict(zip(self.names, layers, strict=True)),
            blocked=blocked,
        )

    def _weighed(self) -> float | None:
        """The ratio of what `weigh` was given."""
        if self.progress is None:
            return None
        progress = self.progress.cpu()
        whole, removed = (progress if self.ranks is None else self.ranks.sum(progress)).tolist()
        if whole <= 0:
            return None
        return removed / whole if self._adds else _share(removed, whole)


def _share(removed: float, whole: float) -> float:
    return min(1.0, removed / whole) if whole > 0 else 0.0


@final
@dataclass(frozen=True)
class TaskMemory:
    """Size and quality of what is stored of one task.

    Arguments:
        directions: the number of new directions; 0 for methods that keep none.
        bytes: the bytes.
        share: the share of the variance of its samples' features that was stored when it ended;
            None for methods that keep no directions.
    """

    directions: int
    bytes: int
    share: float | None


@final
@dataclass(frozen=True)
class MemoryReport:
    """Size and quality of all that a guard stores.

    Arguments:
        storage: the way of storing, in words.
        bytes: of all tasks.
        directions: of all tasks.
        share: the share of the variance of all tasks' features that the directions explain; None
            for methods that keep no directions.
        tasks: one entry for each task.
        layers: parameter → bytes.
        notes: choices and losses made to stay within the budget.
        drift_check: bytes besides those, of samples and outputs for the drift check.
    """

    storage: str
    bytes: int
    directions: int
    share: float | None
    tasks: tuple[TaskMemory, ...]
    layers: Mapping[str, int]
    notes: tuple[str, ...] = ()
    drift_check: int = 0

    def __str__(self) -> str:
        lines = [f"{format_bytes(self.bytes)}, {self.storage}"]
        if self.share is not None:
            lines[0] += f", {self.directions} directions, {self.share:.1%} of the variance"
        for number, task in enumerate(self.tasks, 1):
            line = f"  task {number}: {format_bytes(task.bytes)}"
            if task.share is not None:
                share = f"{task.share:.1%} of its variance, at its end"
                line += f", {task.directions} directions, {share}"
            lines.append(line)
        lines += [f"  {name}: {format_bytes(size)}" for name, size in self.layers.items()]
        if not self.tasks:
            lines.append(_NO_TASK)
        if self.drift_check:
            lines.append(f"  drift check: {format_bytes(self.drift_check)} more")
        return "\n".join([*lines, *self.notes])


def directions_report(
    state: Directions, columns: Mapping[str, slice], notes: tuple[str, ...]
) -> MemoryReport:
    """The report of a method that keeps directions.

    Arguments:
        state: the directions.
        columns: parameter → its columns.
        notes: what was chosen or given up to stay within the budget.
    """
    total = state.nbytes
    ranks, shares = state.record.ranks[0].tolist(), state.record.shares[0].tolist()
    # Directions that were merged or dropped since are missing from every task alike.
    each = total / max(1, sum(ranks))
    tasks = tuple(TaskMemory(k, round(k * each), s) for k, s in zip(ranks, shares, strict=True))
    share = state.kept_share() if tasks else None
    layers = state.bytes_by_parameter(columns)
    return MemoryReport(str(state), total, state.rank, share, tasks, layers, notes)


def samples_report(state: Any, tasks: int) -> MemoryReport:
    """The report of a method that keeps samples, or numbers per weight."""
    tensors = state_tensors(state, 0)
    tensors.pop(STRUCTURE)
    total = sum(t.nbytes for t in tensors.values())
    kept = ", ".join(sorted({name.rpartition(":")[2].rpartition(".")[2] for name in tensors}))
    by_task = tuple(TaskMemory(0, total // tasks, None) for _ in range(tasks))
    return MemoryReport(kept or "nothing", total, 0, None, by_task, {})
