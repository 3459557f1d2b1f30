"""Columns of φ that belong to slices of parameters: one process's share of a sharded model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch

from forgetless.support.layout import ParameterSlice
from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.chunks import FeatureSource, Piece
from forgetless.tangent.factors import Dense, Left, OneHot, Right
from forgetless.tangent.features import TangentFeatures


def sliced_features(phi: TangentFeatures, shares: Mapping[str, ParameterSlice]) -> TangentFeatures:
    """The columns of φ that belong to these slices of its parameters, (n, Σ size)."""
    return TangentFeatures(_Sliced(phi.source, shares))


@final
class _Sliced:
    """A source with fewer columns; blocks are cut on demand."""

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
    """The columns of a block that belong to a slice, as outer products where possible."""
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
        return Dense(left.data[..., share.start : share.stop]), right
    # A token whose row lies outside gets a gradient of zero, at any index.
    inside = (left.data >= share.start) & (left.data < share.stop)
    index = torch.where(inside, left.data - share.start, 0)
    values = right.dense() * inside[:, None, :, None]
    return OneHot(index, share.stop - share.start), Dense(values)
