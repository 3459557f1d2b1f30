"""Gradient episodic memory (Lopez-Paz and Ranzato 2017)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.linalg import project_cone
from forgetless.methods.base import LossGrad
from forgetless.methods.episodic import Episodic, KeepsSamples
from forgetless.support.validation import real, whole


@final
@dataclass(frozen=True)
class GEM(KeepsSamples):
    """Steps oppose no task's loss gradient: the nearest vector to g with ⟨g̃, g_k⟩ ≥ 0 for all k.

    Arguments:
        memory: samples kept of each task.
        margin: lower bound of the dual variables; above 0 it favours backward transfer.
    """

    name: ClassVar[str] = "gem"
    memory: int = 100
    margin: float = 0.0

    def __post_init__(self) -> None:
        whole(1).check("GEM's memory", self.memory)
        real(0).check("GEM's margin", self.margin)

    @property
    def is_projection(self) -> bool:
        """A margin is in units of the gradients, not of steps."""
        return self.margin == 0

    def update(self, g: Tensor, state: Episodic, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project on the cone that raises no task's loss."""
        if not state.tasks:
            return g
        return project_cone(g, state.mean_gradients(loss_grad), self.margin)
