"""Stored samples of earlier tasks: what all methods that follow the loss on them have in common."""

from abc import ABC
from typing import Any, ClassVar, TypeVar

from forgetless.methods.base import Method
from forgetless.methods.view import FinishedTask, View

State = TypeVar("State")


class Rehearsal(Method[State], ABC):
    """A method that stores samples of earlier tasks, and follows the loss on them."""

    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True


class PerTaskRehearsal(Rehearsal[tuple[Any, ...]], ABC):
    """A method that stores some samples of each task, apart from those of the others."""

    protected_by = "memory"
    memory: int

    def init(self, view: View) -> tuple[Any, ...]:
        """No samples yet."""
        return ()

    def consolidate(
        self, state: tuple[Any, ...], view: View, task: FinishedTask
    ) -> tuple[Any, ...]:
        """Store some samples of the task."""
        return (*state, task.draw(self.memory))
