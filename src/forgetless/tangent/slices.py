"""Some columns of φ: those of the parts of parameters that one of several processes holds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import final

import torch
from torch import Tensor

from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.chunks import FeatureSource, Piece
from forgetless.tangent.factors import Dense, Left, OneHot, Right
from forgetless.tangent.features import TangentFeatures


@final
@dataclass(frozen=True)
class ParameterSlice:
    """A part of a parameter: the indices start … stop − 1 of one of its dimensions.

    Arguments:
        shape: of the whole parameter.
        dim: the dimension that is cut.
        start, stop: what is here of it.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Of the part."""
        here = list(self.shape)
        here[self.dim] = self.stop - self.start
        return tuple(here)

    @property
    def size(self) -> int:
        """How many numbers the part has."""
        return prod(self.shape_here)

    def of(self, whole: Tensor) -> Tensor:
        """The part of rows (n, numbers of the whole parameter): (n, size)."""
        shaped = whole.unflatten(1, self.shape)
        part: Tensor = shaped.narrow(1 + self.dim, self.start, self.stop - self.start)
        return part.flatten(1)


def sliced_features(phi: TangentFeatures, shares: Mapping[str, ParameterSlice]) -> TangentFeatures:
    """The columns of φ that belong to these parts of its parameters, (n, Σ size)."""
    return TangentFeatures(_Shared(phi.source, shares))


@final
class _Shared:
    """A source of fewer columns: each block is cut when it is asked for."""

    def __init__(self, source: FeatureSource, shares: Mapping[str, ParameterSlice]) -> None:
        self.source = source
        self.shares = shares
        self.names = source.names
        self.sizes = tuple(shares[name].size for name in source.names)
        self.like = source.like

    @property
    def height(self) -> int:
        return self.source.height

    @property
    def rules(self) -> Mapping[str, str]:
        return self.source.rules

    def __len__(self) -> int:
        return len(self.source)

    def pieces(self, index: int) -> list[Piece]:
        return [
            Piece(piece.rows, {n: _cut(b, self.shares[n]) for n, b in piece.blocks.items()})
            for piece in self.source.pieces(index)
        ]


def _cut(block: Block, share: ParameterSlice) -> Block:
    """The columns of a block that belong to a part; outer products stay outer products."""
    if share.size == block.size:
        return block
    if not isinstance(block, Outer):
        return Rows(share.of(block.rows()).contiguous())
    if share.size == 0:
        return Rows(block.like.new_empty(block.n, 0))
    if not block.uses:
        return replace(block, shape=(1, 1, share.size))
    groups, rows, columns = block.shape
    if groups > 1 or share.dim > 0 or rows != share.shape[0]:
        return Rows(share.of(block.rows()))
    uses = tuple(_cut_use(left, right, share) for left, right in block.uses)
    return replace(block, shape=(1, share.stop - share.start, columns), uses=uses)


def _cut_use(left: Left, right: Right, share: ParameterSlice) -> tuple[Left, Right]:
    if isinstance(left, Dense):
        return Dense(left.values[..., share.start : share.stop]), right
    # A token whose row is elsewhere counts for nothing, wherever it is put.
    inside = (left.index >= share.start) & (left.index < share.stop)
    index = torch.where(inside, left.index - share.start, 0)
    values = right.dense() * inside[:, None, :, None]
    return OneHot(index, share.stop - share.start), Dense(values)
