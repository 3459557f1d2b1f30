"""GEM without transfer (the PCA-OGD paper, section 4.3)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.linalg import project_out_span
from forgetless.methods.base import LossGrad
from forgetless.methods.episodic import Episodic, KeepsSamples
from forgetless.support.options import option
from forgetless.support.validation import whole


@final
@dataclass(frozen=True)
class GEMNT(KeepsSamples):
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
    memory: int = option(100, "Samples stored of each task.", accepted=whole(1))

    def update(self, g: Tensor, state: Episodic, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project out the span of the tasks' mean loss gradients."""
        if not state.tasks:
            return g
        return project_out_span(g, state.mean_gradients(loss_grad))
