"""Tangent features apart from the network: in memory, as tensors for a file, or some columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.linalg import Growth, ParameterSlice
from forgetless.support.files import json_tensor, json_value
from forgetless.support.validation import ConfigError
from forgetless.tangent.blocks import (
    Block,
    Dense,
    Factor,
    Left,
    OneHot,
    Outer,
    Patches,
    Right,
    Rows,
    Window,
    distinct_bytes,
)
from forgetless.tangent.features import FeatureSource, Piece, TangentFeatures

_LAYOUT = "layout"
F = TypeVar("F", Left, Right)
# Gradients summed over T positions are stored as rows if these have at most so many times the
# numbers of their factors: products with rows take a T-th of the arithmetic.
_AS_ROWS = 2


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


Blocks = dict[str, Block]


@final
@dataclass(frozen=True)
class Stored:
    """Rows of φ as blocks, in parts whose layouts differ.

    Arguments:
        names, sizes: of the parameters.
        like: an empty tensor of the rows' dtype and device.
        parts: blocks and their number of rows.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    like: Tensor
    parts: tuple[tuple[Blocks, int], ...]

    @property
    def height(self) -> int:
        """Number of rows."""
        return sum(rows for _, rows in self.parts)

    @property
    def rules(self) -> dict[str, str]:
        """Parameter → "rows" or "outer"."""
        first = self.parts[0][0] if self.parts else {}
        return {name: type(block).__name__.lower() for name, block in first.items()}

    def __len__(self) -> int:
        return len(self.parts)

    def pieces(self, index: int) -> list[Piece]:
        """One part."""
        start = sum(rows for _, rows in self.parts[:index])
        blocks, rows = self.parts[index]
        return [Piece(slice(start, start + rows), blocks)]


def stored(phi: TangentFeatures, rows: Tensor | None = None) -> TangentFeatures:
    """The features, or some of their rows, in memory and independent of the network.

    With several scalars per sample, all first scalars come first. Gradients of a layer that is used
    at many positions, such as a convolution, are stored as rows where factors save little.

    Arguments:
        rows: increasing indices; None for all.
    """
    parts = [(_lighter(p.blocks), len(range(len(phi))[p.rows])) for p in phi.pieces()]
    if rows is None:
        parts = [(_owned(blocks), count) for blocks, count in parts]
    else:
        starts = [0, *accumulate(count for _, count in parts)]
        some = [rows[(rows >= a) & (rows < b)] - a for a, b in pairwise(starts)]
        parts = [
            (_selected(blocks, index), len(index))
            for (blocks, _), index in zip(parts, some, strict=True)
            if len(index)
        ]
    return TangentFeatures(Stored(phi.names, phi.sizes, phi.like, _merged(parts)))


def empty_features(phi: TangentFeatures) -> TangentFeatures:
    """Stored features without rows, to concatenate others to."""
    return TangentFeatures(Stored(phi.names, phi.sizes, phi.like, ()))


def concatenated(*features: TangentFeatures) -> TangentFeatures:
    """Stored features, one below the other."""
    parts = [part for phi in features for part in _parts(phi)]
    first = features[0]
    return TangentFeatures(Stored(first.names, first.sizes, first.like, _merged(parts)))


def grown(phi: TangentFeatures, growth: Growth) -> TangentFeatures:
    """Stored features in a network with more weights, in which they are zero."""
    sizes = {name: some.stop - some.start for name, some in growth.new.columns.items()}
    parts = []
    for blocks, count in _parts(phi):
        memo: dict[object, Tensor] = {}

        def padded(values: Tensor, more: int, memo: dict[object, Tensor] = memo) -> Tensor:
            key = same_memory(values), more  # a bias and its weight share their δ
            if key not in memo:
                memo[key] = pad(values, (0, more))
            return memo[key].view(*values.shape[:-1], -1)

        taller: Blocks = {}
        for name, size in sizes.items():
            if name in blocks:
                rows = growth.old.shapes[name][:1], growth.new_rows(name)
                taller[name] = _grown(blocks[name], *rows, size, padded)
            else:
                taller[name] = Outer((1, 1, size), (), phi.like.new_empty(count, 0))
        parts.append((taller, count))
    return TangentFeatures(Stored(tuple(sizes), tuple(sizes.values()), phi.like, tuple(parts)))


def _grown(
    block: Block,
    rows: tuple[int, ...],
    more: int,
    size: int,
    padded: Callable[[Tensor, int], Tensor],
) -> Block:
    """The block of a parameter with more rows.

    Arguments:
        block: the columns of the first rows.
        rows: how many these are; none for a single number.
        more: the new rows.
        size: columns of all rows.
        padded: from a tensor and a number to as many more zeros in the last dimension.
    """
    if not more:
        return block
    if not isinstance(block, Outer) or (block.uses and (1, *rows) != block.shape[:2]):
        return Rows(padded(block.rows(), size - block.size))
    if not block.uses:
        return replace(block, shape=(1, 1, size))
    groups, r, c = block.shape
    uses = tuple(
        (
            Dense(padded(left.data, more))
            if isinstance(left, Dense)
            else replace(left, width=left.width + more),
            right,
        )
        for left, right in block.uses
    )
    return replace(block, shape=(groups, r + more, c), uses=uses)


def stored_bytes(phi: TangentFeatures) -> int:
    """Memory of stored features, shared tensors counted once; 0 if they are not stored."""
    every = (block for blocks, _ in _parts(phi) for block in blocks.values())
    return distinct_bytes(tensor for block in every for tensor in block.tensors())


def bytes_by_parameter(phi: TangentFeatures) -> dict[str, int]:
    """Memory of each parameter's stored features; a shared tensor counts for the first one."""
    seen: set[object] = set()
    sizes = dict.fromkeys(phi.names, 0)
    for blocks, _ in _parts(phi):
        for name in phi.names:
            for tensor in blocks[name].tensors():
                key = same_memory(tensor)
                sizes[name] += 0 if key in seen else tensor.nbytes
                seen.add(key)
    return sizes


def _parts(phi: TangentFeatures) -> tuple[tuple[Blocks, int], ...]:
    """The parts of stored features; none of others."""
    return phi.source.parts if isinstance(phi.source, Stored) else ()


def _merged(parts: Sequence[tuple[Blocks, int]]) -> tuple[tuple[Blocks, int], ...]:
    """Concatenate neighbouring parts of equal layout."""
    runs = [list(run) for _, run in groupby(parts, lambda part: _layout(part[0]))]
    return tuple(_concatenated(run) for run in runs)


def _concatenated(run: list[tuple[Blocks, int]]) -> tuple[Blocks, int]:
    if len(run) == 1:
        return run[0]
    cat = _shared(torch.cat)
    blocks = {name: _mapped([blocks[name] for blocks, _ in run], cat) for name in run[0][0]}
    return blocks, sum(rows for _, rows in run)


def _lighter(blocks: Mapping[str, Block]) -> Blocks:
    """Each parameter's gradients as they are, or as rows where these are cheaper."""

    def lighter(block: Block) -> Block:
        if not isinstance(block, Outer) or block.positions <= 1:
            return block
        few = block.n * block.size <= _AS_ROWS * sum(t.numel() for t in block.tensors())
        return Rows(block.rows()) if few else block

    return {name: lighter(block) for name, block in blocks.items()}


def _owned(blocks: Blocks) -> Blocks:
    """The blocks with contiguous tensors: products then round as after loading from a file."""
    in_order = _shared(lambda tensors: tensors[0].contiguous())
    return {name: _mapped([block], in_order) for name, block in blocks.items()}


def _selected(blocks: Blocks, index: Tensor) -> Blocks:
    pick = _shared(lambda tensors: tensors[0][index.to(tensors[0].device)])
    return {name: _mapped([block], pick) for name, block in blocks.items()}


def _shared(change: Callable[[list[Tensor]], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Apply a change to tensors (n, …), once for tensors that share memory.

    A bias and its weight share their δ, also afterwards.
    """
    memo: dict[object, Tensor] = {}

    def changed(tensors: Sequence[Tensor]) -> Tensor:
        key = tuple(map(same_memory, tensors))
        if key not in memo:
            memo[key] = change([t.flatten(1) for t in tensors])
        return memo[key].view(len(memo[key]), *tensors[0].shape[1:])

    return changed


def same_memory(tensor: Tensor) -> object:
    """A key that is equal for tensors with the same memory, dtype and strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tensor.dtype, tuple((n, step) for n, step in steps if n != 1)


def _mapped(blocks: Sequence[Block], change: Callable[[Sequence[Tensor]], Tensor]) -> Block:
    """One block from several of equal layout, each of its tensors (n, …) made by `change`."""
    outers = [block for block in blocks if isinstance(block, Outer)]
    if not outers:
        return Rows(change([block.rows() for block in blocks]))

    def changed(factors: Sequence[F]) -> F:
        return replace(factors[0], data=change([factor.data for factor in factors]))

    uses = []
    for several in zip(*(outer.uses for outer in outers), strict=True):
        left, right = zip(*several, strict=True)
        uses.append((changed(left), changed(right)))
    like = change([outer.like for outer in outers])
    return replace(outers[0], uses=tuple(uses), like=like)


def _layout(blocks: Blocks) -> object:
    """A key that is equal for parts that can be concatenated."""

    def factor(f: Factor) -> object:
        if isinstance(f, Patches):
            return f.data.shape[1:], f.groups, f.window, f.positions
        return f.data.shape[1:], f.width if isinstance(f, OneHot) else None

    def block(b: Block) -> object:
        if isinstance(b, Outer):
            return b.shape, tuple((factor(left), factor(right)) for left, right in b.uses)
        return b.size

    return {name: block(b) for name, b in blocks.items()}


def to_tensors(phi: TangentFeatures) -> dict[str, Tensor]:
    """The tensors of stored features, and under "layout" a JSON text that describes them."""
    source = phi.source
    if not isinstance(source, Stored):
        raise ConfigError("only stored features can be saved; call stored(phi) first")
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}

    def put(tensor: Tensor) -> str:
        # A tensor that a bias shares with its weight is stored once.
        key = same_memory(tensor)
        if key not in names:
            names[key] = str(len(names))
            tensors[names[key]] = tensor.flatten(1)
        return names[key]

    def described(block: Block) -> Any:
        if not isinstance(block, Outer):
            return put(block.rows())
        uses = [[[put(f.data), f.data.shape[1:], _described(f)] for f in use] for use in block.uses]
        return {"shape": block.shape, "uses": uses}

    parts = [
        {"rows": rows, "blocks": {name: described(block) for name, block in blocks.items()}}
        for blocks, rows in source.parts
    ]
    layout = {"names": source.names, "sizes": source.sizes, "parts": parts}
    return tensors | {_LAYOUT: json_tensor(layout)}


def from_tensors(tensors: Mapping[str, Tensor], like: Tensor) -> TangentFeatures:
    """Stored features from what `to_tensors` returned, on the device of `like`."""
    try:
        layout = json_value(tensors[_LAYOUT])
        here = {
            name: t.to(like if t.is_floating_point() else like.device)
            for name, t in tensors.items()
            if name != _LAYOUT
        }
        names, sizes = tuple(layout["names"]), tuple(layout["sizes"])
        parts = []
        for part in layout["parts"]:
            rows = int(part["rows"])
            blocks: Blocks = {n: _block(part["blocks"][n], here, rows, like) for n in names}
            parts.append((blocks, rows))
            if any(blocks[n].size != size for n, size in zip(names, sizes, strict=True)):
                raise ValueError("a layer has another size")
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(f"the stored features do not fit together: {error!r}") from error
    return TangentFeatures(Stored(names, sizes, like.new_empty(0), tuple(parts)))


def _block(layout: Any, tensors: Mapping[str, Tensor], n: int, like: Tensor) -> Block:
    if isinstance(layout, str):
        if len(tensors[layout]) != n:
            raise ValueError(f"{len(tensors[layout])} rows, not {n}")
        return Rows(tensors[layout])
    uses = []
    for use in layout["uses"]:
        left, right = (tensors[name].view(n, *shape) for name, shape, _ in use)
        uses.append((_left(use[0][2], left), _right(use[1][2], right)))
    g, r, c = layout["shape"]
    return Outer((g, r, c), tuple(uses), like.new_empty(n, 0))


def _described(factor: Factor) -> dict[str, Any]:
    if isinstance(factor, OneHot):
        return {"width": factor.width}
    if isinstance(factor, Patches):
        window = asdict(factor.window)
        return {"groups": factor.groups, "window": window, "positions": factor.positions}
    return {}


def _left(layout: Mapping[str, Any], data: Tensor) -> Left:
    if not layout:
        return Dense(data)
    width = int(layout["width"])
    if data.numel() and not 0 <= int(data.min()) <= int(data.max()) < width:
        raise ValueError(f"tokens outside of [0, {width})")
    return OneHot(data, width)


def _right(layout: Mapping[str, Any], data: Tensor) -> Right:
    if not layout:
        return Dense(data)
    fields: dict[str, Any] = dict(layout["window"])
    mode = str(fields.pop("mode"))
    window = Window(**{name: tuple(value) for name, value in fields.items()}, mode=mode)
    return Patches(data, layout["groups"], window, layout["positions"])
