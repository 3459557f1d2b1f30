"""Gradient projection memory (Saha, Garg and Roy 2021)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from forgetless.methods.input_projection import SpannedInputs


@final
@dataclass(frozen=True, kw_only=True)
class GPM(SpannedInputs):
    """Steps of each layer are orthogonal to its inputs on earlier tasks: ΔW ← ΔW − ΔW Q Qᵀ.

    Q spans a share of the inputs' energy, in convolutions that of the patches.
    """

    name: ClassVar[str] = "gpm"
    label: ClassVar[str] = "GPM"
    summary: ClassVar[str] = "gradient projection memory: steps orthogonal to layers' inputs"
    family: ClassVar[str] = "projection"

    def scales(self, old: Tensor, new: Tensor, before: Tensor) -> Tensor:
        """One for every direction."""
        return torch.ones_like(torch.cat([old, new]))
