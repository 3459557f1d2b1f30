"""Scaled gradient projection (Saha and Roy 2023)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from forgetless.linalg import TINY
from forgetless.methods.input_projection import SpannedInputs
from forgetless.support.validation import option, real


@final
@dataclass(frozen=True, kw_only=True)
class SGP(SpannedInputs):
    """GPM that removes important directions entirely, and of others a part.

        ΔW ← ΔW − ΔW Q diag(λ) Qᵀ,    λ_j = Σ_tasks (α + 1) σ_j / (α σ_j + max σ), at most 1

    σ_j² is the energy of a task's inputs along q_j, and the sum goes over the tasks since the one
    that added q_j.

    Arguments:
        scale: α. Zero is in proportion to σ; the larger it is, the nearer to GPM.
    """

    name: ClassVar[str] = "sgp"
    label: ClassVar[str] = "SGP"
    summary: ClassVar[str] = "scaled gradient projection: GPM with a strength for each direction"
    family: ClassVar[str] = "projection"
    scale: float = option(
        10.0, "α of the directions' importance.", accepted=real(0), setting="sgp_scale"
    )

    def scales(self, old: Tensor, new: Tensor, before: Tensor) -> Tensor:
        """The accumulated importances."""
        sizes = torch.cat([old, new])
        largest = sizes.max() if len(sizes) else sizes.sum()
        importance = (self.scale + 1) * sizes / (self.scale * sizes + largest).clamp_min(TINY)
        importance[: len(old)] += before
        return importance.clamp_max(1)
