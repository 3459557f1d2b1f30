"""Second moments of per-sample gradients, as Kronecker products where the layer allows.

The gradient of a layer's weight is Σ_t δ_t a_tᵀ over positions t, with inputs a and gradients δ at
the layer's outputs. K-FAC (Martens and Grosse 2015; for positions, Grosse and Martens 2016) takes δ
and a for independent:

    Σ_i vec(g_i) vec(g_i)ᵀ ≈ G ⊗ A,    G = Σ_i Σ_t δ δᵀ,    A = the mean of a aᵀ
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.factors import OneHot, cuts
from forgetless.tangent.features import TangentFeatures

_POSITIONS = 1 << 14  # positions of samples whose factors are dense at once


@final
@dataclass(frozen=True)
class Moments:
    """The moments of one weight, in float64.

    Arguments:
        outputs: G, (r, r), or its diagonal (r,) for an embedding, whose δ is one-hot.
        inputs: A, (c, c); with a bias (c + 1, c + 1), a one appended to the inputs.
        bias: the name of the bias that A includes, or "".
    """

    outputs: Tensor
    inputs: Tensor
    bias: str


@final
class _Sums:
    """Running sums of one weight's factors."""

    def __init__(self, block: Outer) -> None:
        _, rows, columns = block.shape
        like = float64(block.like)
        one_hot = isinstance(block.uses[0][0], OneHot)
        self.outputs = like.new_zeros(rows) if one_hot else like.new_zeros(rows, rows)
        self.inputs = like.new_zeros(columns, columns)
        self.mean = like.new_zeros(columns)
        self.count = 0

    def add(self, block: Outer) -> None:
        """The samples of a block."""
        for left, right in block.uses:
            for some in cuts(block.n, _POSITIONS // max(1, left.positions)):
                a = right.dense(some)[:, 0].flatten(0, 1)  # (m T, c)
                self.inputs += a.mT @ a
                self.mean += a.sum(0)
                self.count += len(a)
                if isinstance(left, OneHot):
                    index = left.data[some].flatten()
                    self.outputs += torch.bincount(index, minlength=left.width)
                else:
                    delta = left.dense(some)[:, 0].flatten(0, 1)
                    self.outputs += delta.mT @ delta

    def moments(self, bias: str) -> Moments:
        """G and A."""
        inputs, mean = self.inputs / self.count, (self.mean / self.count).unsqueeze(1)
        if bias:
            one = torch.ones_like(mean[:1])
            inputs = torch.cat([torch.cat([inputs, mean], 1), torch.cat([mean.mT, one], 1)])
        return Moments(self.outputs, inputs, bias)


def kronecker_moments(
    phi: TangentFeatures, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Moments], dict[str, Tensor]]:
    """The moments of all parameters, summed over the samples (and scalars) of φ.

    Linear and convolutional layers without groups, and embeddings, have Kronecker factors, with the
    bias of the same layer. Every other parameter (norms, weights that several layers share in
    different ways) has the diagonal alone, which is exact.

    Arguments:
        phi: the features.
        shapes: parameter → its shape.

    Returns:
        weight → its moments; other parameter → Σ_i g_i², in its shape.
    """
    sums: dict[str, _Sums] = {}
    squares: dict[str, Tensor] = {}
    for piece in phi.pieces():
        for name, block in piece.blocks.items():
            if isinstance(block, Outer) and _has_factors(block):
                sums.setdefault(name, _Sums(block)).add(block)
            else:
                found = float64(block.squared_sum()).view(shapes[name])
                squares[name] = squares[name] + found if name in squares else found
    weights: dict[str, Moments] = {}
    for name, sum_ in sums.items():
        bias = f"{name.removesuffix('weight')}bias"
        joined = name.endswith("weight") and bias in squares and sum_.outputs.dim() == 2
        joined = joined and shapes[bias] == tuple(sum_.outputs.shape[:1])
        weights[name] = sum_.moments(bias if joined else "")
        if joined:
            del squares[bias]
    return weights, squares


def _has_factors(block: Block) -> bool:
    """Whether all uses are of one kind, in a single group."""
    if isinstance(block, Rows) or not isinstance(block, Outer) or block.shape[0] != 1:
        return False
    return len({isinstance(left, OneHot) for left, _ in block.uses}) == 1
