"""Stored samples of earlier tasks: what all methods that follow the loss on them have in common."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, Work

State = TypeVar("State")


class Rehearsal(Method[State], ABC):
    """A method that stores samples of earlier tasks, and follows the loss on them."""

    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True

    @abstractmethod
    def kept(self, probe: TaskProbe) -> int | None:
        """How many samples of a task are stored; None if unknown."""

    @abstractmethod
    def rehearsed(self, tasks: int) -> int:
        """The most stored samples that a step uses, after so many tasks."""

    def cost(self, probe: TaskProbe) -> Cost | None:
        """The bytes of the samples, and a pass over some in every step."""
        kept = self.kept(probe)
        if kept is None or probe.sample_bytes is None:
            return None
        total = probe.stored + kept * probe.sample_bytes
        step = Work(self.rehearsed(probe.tasks + 1))
        return Cost(total, total, 2 * total + 2 * probe.vector, Work(kept), step)

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True


class PerTaskRehearsal(Rehearsal[tuple[Any, ...]], ABC):
    """A method that stores some samples of each task, apart from those of the others."""

    protected_by = "memory"
    memory: int

    def kept(self, probe: TaskProbe) -> int:
        """As many as asked for, or all."""
        return probe.drawn(self.memory)

    def rehearsed(self, tasks: int) -> int:
        """All of them."""
        return tasks * self.memory

    def init(self, view: View) -> tuple[Any, ...]:
        """No samples yet."""
        return ()

    def consolidate(
        self, state: tuple[Any, ...], view: View, task: FinishedTask
    ) -> tuple[Any, ...]:
        """Store some samples of the task."""
        return (*state, task.draw(self.memory))
