"""Gradient episodic memory (Lopez-Paz and Ranzato 2017)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from forgetless.linalg import project_cone
from forgetless.methods.base import ActsOn, View
from forgetless.methods.rehearsal import PerTaskRehearsal
from forgetless.support.validation import option, real, whole


@final
@dataclass(frozen=True)
class GEM(PerTaskRehearsal):
    """Steps oppose no task's loss gradient: the nearest vector to g with ⟨g̃, g_k⟩ ≥ 0 for all k.

    Arguments:
        memory: samples kept of each task.
        margin: lower bound of the dual variables; above 0 it favours backward transfer.
    """

    name: ClassVar[str] = "gem"
    label: ClassVar[str] = "GEM"
    summary: ClassVar[str] = "gradient episodic memory: no step against any task's loss gradient"
    family: ClassVar[str] = "replay"
    memory: int = option(100, "Samples stored of each task.", accepted=whole(1))
    margin: float = option(
        0.0, "Lower bound of the dual variables.", accepted=real(0), setting="gem_margin"
    )

    @property
    def acts_on(self) -> ActsOn:
        """A margin is in units of the gradients, not of steps."""
        return "update" if self.margin == 0 else "gradient"

    def update(
        self, g: Tensor, state: tuple[Any, ...], view: View
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Project on the cone that raises no task's loss."""
        if not state:
            return g, state
        return project_cone(g, view.gradients(state), self.margin), state
