"""What autograd says of a network's gradients, against which rows are checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import final

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block
from forgetless.tangent.fallback import gradients_of


@final
@dataclass(frozen=True)
class Truth:
    """Gradients of Σ_ik w_ik s_ik by autograd, with random weights w, to check any rows against.

    Samples do not interact, so the gradient is Σ_ik w_ik φ_ik however the network lays its samples
    out. A rule that took other things for samples (time steps, say) gives a different sum for all
    w but a set of measure zero.
    """

    weights: Tensor  # (n, K)
    gradients: Mapping[str, Tensor | None]
    lengths: Mapping[str, float]  # of the gradients
    # Some gradients are zero but for rounding (of the keys' bias in attention): the rounding of
    # everything else is their measure.
    rounding: float
    eps: float  # of the coarsest precision in which a layer computed

    def confirms(self, name: str, blocks: list[Block]) -> bool:
        """Whether the blocks (one a scalar) of a parameter give that sum, up to rounding."""
        return name in self.confirmed({name: blocks})

    def confirmed(self, several: Mapping[str, list[Block]]) -> list[str]:
        """The parameters whose blocks it confirms; a GPU is asked once for all."""
        errors = _numbers([self._error(name, blocks) for name, blocks in several.items()])
        share = min(0.1, 20 * self.eps**0.5)
        return [
            name
            for name, error in zip(several, errors, strict=True)
            if error <= share * self.lengths[name] + self.rounding
        ]

    def _error(self, name: str, blocks: list[Block]) -> Tensor:
        found = self.weights.new_zeros(1, blocks[0].size)
        for block, weights in zip(blocks, self.weights.T, strict=True):
            block.add_combined(weights.unsqueeze(0), found)
        if (gradient := self.gradients[name]) is not None:
            found = found - gradient.reshape(1, -1)
        error: Tensor = found.norm()
        return error


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers, brought over together."""
    found: list[float] = torch.stack([float64(s) for s in scalars]).tolist() if scalars else []
    return found


def truth_of(scalars: Tensor, leaves: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> Truth:
    """What autograd finds.

    Arguments:
        scalars: (n, K).
        leaves: the parameters.
        outputs: of the layers on the way.
    """
    generator = torch.Generator().manual_seed(len(scalars))
    weights = torch.rand(scalars.shape, generator=generator) + 0.5
    weights *= torch.randint(0, 2, scalars.shape, generator=generator) * 2 - 1
    weights = weights.to(scalars)
    gradients = gradients_of((weights * scalars).sum(), leaves)
    there = {name: g for name, g in gradients.items() if g is not None}
    lengths = dict.fromkeys(gradients, 0.0)
    lengths |= zip(there, _numbers([g.norm() for g in there.values()]), strict=True)
    eps = max(torch.finfo(t.dtype).eps for t in (weights, *outputs))
    return Truth(weights, gradients, lengths, 30 * eps * hypot(*lengths.values()), eps)
