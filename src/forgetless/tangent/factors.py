"""Factors of per-sample gradients: d numbers at each of T positions, in g groups, of n samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

ALL = slice(None)


@final
@dataclass(frozen=True)
class Dense:
    """A factor stored as it is.

    Arguments:
        data: (n, g, T, d).
    """

    data: Tensor
    grain = 1  # columns can be cut anywhere

    @property
    def positions(self) -> int:
        """T."""
        return self.data.shape[2]

    def dense(self, samples: slice = ALL, columns: slice = ALL) -> Tensor:
        """(m, g, T, columns)."""
        return self.data[samples, ..., columns]


@final
@dataclass(frozen=True)
class OneHot:
    """A one at an index below `width`, zeros elsewhere: a single group, never written out.

    Arguments:
        data: the indices, (n, T).
        width: d.
    """

    data: Tensor
    width: int

    @property
    def positions(self) -> int:
        """T."""
        return self.data.shape[1]


@final
@dataclass(frozen=True)
class Window:
    """Which inputs each output of a convolution sees."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]  # as `torch.nn.functional.pad` takes it
    mode: str  # of padding

    def patches(self, inputs: Tensor) -> Tensor:
        """(N, channels, *space) → (N, channels, *outputs, *kernel), a view of the padded inputs."""
        if any(self.padding):
            inputs = functional.pad(inputs, self.padding, self.mode)
        for axis, (size, step, gap) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True), start=2
        ):
            inputs = inputs.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
        return inputs


@final
@dataclass(frozen=True)
class Patches:
    """The input patches of a convolution, cut out of its inputs on demand.

    Storing the inputs takes k · channels · space numbers a sample, the patches T · d.

    Arguments:
        data: the inputs, (n, k, channels, *space), k images a sample.
        groups: g.
        window: the patches' geometry.
        positions: T, output positions of all k images.
    """

    data: Tensor
    groups: int
    window: Window
    positions: int

    @property
    def grain(self) -> int:
        """Columns are cut between channels."""
        return prod(self.window.kernel)

    def dense(self, samples: slice = ALL, columns: slice = ALL) -> Tensor:
        """(m, g, T, columns)."""
        inputs = self.data[samples]
        m, k, channels, *space = inputs.shape
        start, stop, _ = columns.indices(channels // self.groups * self.grain)
        inputs = inputs.reshape(m * k, self.groups, channels // self.groups, *space)
        inputs = inputs[:, :, start // self.grain : stop // self.grain]
        patches = self.window.patches(inputs.flatten(1, 2))
        dims = len(space)
        patches = patches.reshape(m, k, self.groups, -1, *patches.shape[2:])
        outputs, kernel = range(4, 4 + dims), range(4 + dims, 4 + 2 * dims)
        patches = patches.permute(0, 2, 1, *outputs, 3, *kernel)
        return patches.reshape(m, self.groups, self.positions, stop - start)


Left = Dense | OneHot
Right = Dense | Patches
Factor = Dense | OneHot | Patches


def factor_products(a: Factor, b: Factor, mine: slice, theirs: slice, like: Tensor) -> Tensor:
    """⟨a_it, b_js⟩ of some samples i, j at all positions t, s: (g, m·T, m'·T').

    Computed in the precision of `like`. With a one-hot factor it is a lookup, between two of them
    a comparison.
    """
    if isinstance(a, OneHot):
        if isinstance(b, OneHot):
            same = a.data[mine].reshape(-1, 1) == b.data[theirs].reshape(1, -1)
            return same.to(like).unsqueeze(0)
        return _looked_up(b.dense(theirs), a.data[mine], like).mT
    if isinstance(b, OneHot):
        return _looked_up(a.dense(mine), b.data[theirs], like)
    left = by_position(a.dense(mine).to(like))
    right = left if a is b and mine == theirs else by_position(b.dense(theirs).to(like))
    return grouped_product(left, right.mT)


def _looked_up(dense: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """The entries of (m, 1, T, d) at index (m', T'): (1, m·T, m'·T')."""
    return by_position(dense).index_select(2, index.flatten()).to(like)


def by_position(values: Tensor) -> Tensor:
    """(m, g, T, d) → (g, m·T, d)."""
    return values.transpose(0, 1).flatten(1, 2)


def grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """A B in each group, (g, ·, ·); a batch of one is slower than no batch."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if len(a) == 1 else a @ b


def cuts(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` (at least one) that cover the length."""
    size = max(1, size)
    return (slice(i, min(i + size, length)) for i in range(0, length, size))


def distinct_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the tensors, those that share memory counted once."""
    return sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())


def joined_uses(uses: list[tuple[Left, Right]]) -> list[tuple[Left, Right]]:
    """The same sum of outer products, with as many uses as possible concatenated into one."""
    plain = [(a, b) for a, b in uses if isinstance(a, Dense) and isinstance(b, Dense)]
    tokens = [(a, b) for a, b in uses if isinstance(a, OneHot) and isinstance(b, Dense)]
    rest = [(a, b) for a, b in uses if isinstance(b, Patches)]
    if len(plain) > 1:
        left, right = (torch.cat([use[side].data for use in plain], 2) for side in (0, 1))
        plain = [(Dense(left), Dense(right))]
    if len(tokens) > 1:
        index = OneHot(torch.cat([a.data for a, _ in tokens], 1), tokens[0][0].width)
        tokens = [(index, Dense(torch.cat([b.data for _, b in tokens], 2)))]
    return [*plain, *tokens, *rest]
