"""Steps that can move some parameters only."""

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class Movable:
    """The parameters that can move, where not all of them can.

    Arguments:
        mask: which they are, (p,) of bool.
        inverse: the pseudo-inverse over them of the directions' Gram matrix, (K, K) or (S, K, K).
        passes: how often a projection is done.
    """

    mask: Tensor
    inverse: Tensor
    passes: int = 2
