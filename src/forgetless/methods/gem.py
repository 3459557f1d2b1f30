"""Gradient episodic memory (Lopez-Paz and Ranzato 2017)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.errors import require
from forgetless.linalg import project_cone
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, Method
from forgetless.methods.episodic import Episodic
from forgetless.subspace import DENSE, Storage


@final
@dataclass(frozen=True)
class GEM(Method[Episodic]):
    """Steps oppose no task's loss gradient: the nearest vector to g with ⟨g̃, g_k⟩ ≥ 0 for all k.

    Arguments:
        memory: samples kept of each task.
        margin: lower bound of the dual variables; above 0 it favours backward transfer.
    """

    name: ClassVar[str] = "gem"
    memory: int = 100
    margin: float = 0.0

    def __post_init__(self) -> None:
        require(self.memory >= 1, "GEM's memory", self.memory, "at least 1")
        require(self.margin >= 0, "GEM's margin", self.margin, "at least 0")

    @property
    def is_projection(self) -> bool:
        """A margin is in units of the gradients, not of steps."""
        return self.margin == 0

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True

    def init(self, theta: Tensor, storage: Storage = DENSE) -> Episodic:
        """No samples yet."""
        return Episodic()

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> Episodic:
        """What was remembered."""
        return Episodic.restore(of_seeds, load)

    def update(self, g: Tensor, state: Episodic, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project on the cone that raises no task's loss."""
        if not state.tasks:
            return g
        return project_cone(g, state.mean_gradients(loss_grad), self.margin)

    def consolidate(self, state: Episodic, theta: Tensor, task: FinishedTask) -> Episodic:
        """Keep some samples of the task."""
        return state.remember(task.draw(self.memory))
