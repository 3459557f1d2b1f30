"""Gradient episodic memory (Lopez-Paz and Ranzato 2017)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.linalg import project_cone
from forgetless.methods.base import LossGrad
from forgetless.methods.episodic import Episodic, KeepsSamples
from forgetless.support.options import option
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
    label: ClassVar[str] = "GEM"
    summary: ClassVar[str] = "gradient episodic memory: no step against any task's loss gradient"
    memory: int = option(100, "Samples stored of each task.", accepted=whole(1))
    margin: float = option(
        0.0, "Lower bound of the dual variables.", accepted=real(0), setting="gem_margin"
    )

    @property
    def is_projection(self) -> bool:
        """A margin is in units of the gradients, not of steps."""
        return self.margin == 0

    def update(self, g: Tensor, state: Episodic, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project on the cone that raises no task's loss."""
        if not state.tasks:
            return g
        return project_cone(g, state.mean_gradients(loss_grad), self.margin)
