"""GEM without transfer (the PCA-OGD paper, section 4.3)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from forgetless.linalg import project_out_span
from forgetless.methods.base import View
from forgetless.methods.rehearsal import PerTaskRehearsal
from forgetless.support.validation import option, whole


@final
@dataclass(frozen=True)
class GEMNT(PerTaskRehearsal):
    """Steps are orthogonal to every task's loss gradient, whatever the sign: g̃ = (I − G Gᵀ) g.

    G's columns are an orthonormal basis of the tasks' mean loss gradients at the current weights.
    (The paper's released code solves GEM's quadratic programme with margin 0.5 under this name:
    that is `GEM(margin=0.5)`.)

    Arguments:
        memory: samples kept of each task.
    """

    name: ClassVar[str] = "gem-nt"
    label: ClassVar[str] = "GEM-NT"
    summary: ClassVar[str] = "GEM without transfer: steps orthogonal to every task's loss gradient"
    family: ClassVar[str] = "replay"
    acts_on = "update"
    memory: int = option(100, "Samples stored of each task.", accepted=whole(1))

    def update(
        self, g: Tensor, state: tuple[Any, ...], view: View
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Project out the span of the tasks' mean loss gradients."""
        if not state:
            return g, state
        return project_out_span(g, view.gradients(state)), state
