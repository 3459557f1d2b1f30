"""Stored samples of earlier tasks: what all methods that follow the loss on them have in common."""

from abc import ABC
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from forgetless.methods.base import Method
from forgetless.methods.view import FinishedTask, View

K = TypeVar("K")


class Rehearsal(Method[K], ABC):
    """A method that stores samples of earlier tasks, and follows the loss on them."""

    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True


class KeepsEach(Rehearsal[tuple[Any, ...]], ABC):
    """A method that stores some samples of each task, apart from those of the others."""

    memory: int

    def init(self, view: View) -> tuple[Any, ...]:
        """No samples yet."""
        return ()

    def consolidate(
        self, state: tuple[Any, ...], view: View, task: FinishedTask
    ) -> tuple[Any, ...]:
        """Store some samples of the task."""
        return (*state, task.draw(self.memory))

    def mean_gradients(self, state: tuple[Any, ...], view: View) -> Tensor:
        """g_k = mean loss gradient on the samples of task k, for every task: (S, K, p)."""
        return view.gradients(state)
