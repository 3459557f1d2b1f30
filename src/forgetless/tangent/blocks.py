"""Per-sample gradients of one parameter: as rows, or as outer products of factors; their kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import functional

ALL = slice(None)

# Scratch space of one step, in elements: 64 MiB of float64, and 1 GiB on a GPU.
_SCRATCH = 1 << 23
# Elements that stay in a CPU's cache until they are used.
_CACHED = 1 << 20
# Rows of a gradient below which a tile of whole rows is too flat to be computed fast.
_FLAT = 32
_GPU_SCRATCH = 1 << 27
# Rows of a matrix product on a CPU: fewer cost time, more only memory. A GPU takes all at once.
_TALL = 1 << 10
# Rows of a symmetric product that are computed at once, from the diagonal to the right: short
# stripes save most of a CPU's work, tall ones keep a GPU busy.
_STRIPE = {"cpu": 1 << 9, "cuda": 1 << 13}
_STRIPES = 4
# Pairs of positions of two samples from which products of factors need no more than the factors'
# precision.
_MANY = 64


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


def scratch(like: Tensor) -> int:
    """Elements that one step may allocate on the tensor's device."""
    return _GPU_SCRATCH if like.is_cuda else _SCRATCH


class Block(Protocol):
    """B, the columns of φ that belong to one parameter, (n, size)."""

    @property
    def size(self) -> int:
        """Number of columns."""

    def rows(self) -> Tensor:
        """B itself, (n, size)."""

    def first(self, count: int) -> "Block":
        """The rows of some first samples."""

    def apply(self, v: Tensor) -> Tensor:
        """B v: (size, k) → (n, k)."""

    def add_combined(self, weights: Tensor, out: Tensor, beta: float = 1) -> None:
        """`out` ← β · `out` + W B, (k, size), with weights W (k, n); memory may be new if β = 0."""

    def squared_sum(self) -> Tensor:
        """Σ_i B_i², element by element, (size,)."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in memory."""


@final
@dataclass(frozen=True)
class Rows:
    """One row per sample: for small parameters, and for layers without a rule.

    Arguments:
        values: (n, size).
    """

    values: Tensor

    @property
    def size(self) -> int:
        return self.values.shape[1]

    def rows(self) -> Tensor:
        return self.values

    def first(self, count: int) -> "Rows":
        return Rows(self.values[:count])

    def apply(self, v: Tensor) -> Tensor:
        return self.values @ v

    def add_combined(self, weights: Tensor, out: Tensor, beta: float = 1) -> None:
        out.addmm_(weights, self.values, beta=beta)

    def squared_sum(self) -> Tensor:
        return self.values.square().sum(0)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@final
@dataclass(frozen=True)
class Outer:
    """Gradients of a parameter as g matrices r×c: G_i = Σ_uses Σ_t L_it R_itᵀ.

    T · (r + c) numbers per sample instead of r · c. For a linear layer L = ∂f/∂z is the gradient at
    its outputs and R = a its inputs; for a convolution T counts output positions and R holds the
    input patches; for an embedding L is one-hot. Without uses the gradient is zero.

    Arguments:
        shape: (g, r, c).
        uses: pairs L (n, g, T, r), R (n, g, T, c).
        like: an empty tensor (n, 0) with the number of samples, dtype and device.
    """

    shape: tuple[int, int, int]
    uses: tuple[tuple[Left, Right], ...]
    like: Tensor

    @property
    def n(self) -> int:
        """Samples."""
        return self.like.shape[0]

    @property
    def size(self) -> int:
        g, r, c = self.shape
        return g * r * c

    @property
    def positions(self) -> int:
        """T, summed over uses."""
        return sum(left.positions for left, _ in self.uses)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(factor.data for use in self.uses for factor in use)

    def rows(self) -> Tensor:
        return self.part(ALL, ALL).flatten(1)

    def first(self, count: int) -> "Outer":
        uses = tuple(
            (replace(left, data=left.data[:count]), replace(right, data=right.data[:count]))
            for left, right in self.uses
        )
        return replace(self, uses=uses, like=self.like[:count])

    def part(self, rows: slice, columns: slice) -> Tensor:
        """Some of the r rows and c columns of every gradient, (n, g, rows, columns)."""
        g, r, c = self.shape
        height, width = len(range(r)[rows]), len(range(c)[columns])
        for left, right in self.uses if len(self.uses) == 1 else ():
            if isinstance(left, Dense) and isinstance(right, Dense):
                return left.dense()[..., rows].mT @ right.dense(ALL, columns)
        out = self.like.new_zeros(self.n, g, height, width)
        for left, right in self.uses:
            for some in cuts(self.n, scratch(self.like) // (g * left.positions * width)):
                values = right.dense(some, columns)  # (m, g, T, columns)
                if isinstance(left, OneHot):
                    index = left.data[some].unsqueeze(-1).expand_as(values[:, 0])
                    out[some, 0].scatter_add_(1, index, values[:, 0])
                else:
                    out[some] += left.dense(some)[..., rows].mT @ values
        return out

    def tiles(self) -> list[tuple[slice, slice]]:
        """Rows and columns whose `part` fits in scratch space: whole rows, if that is fast."""
        g, r, c = self.shape
        row = self.n * g * c
        room = scratch(self.like)
        if self._is_dense and room // row >= min(r, _FLAT):
            cached = room if self.like.is_cuda else max(_CACHED, _FLAT * row)
            return [(rows, ALL) for rows in cuts(r, cached // row)]
        grain = max((right.grain for _, right in self.uses), default=1)
        width = max(1, room // (self.n * g * r * grain)) * grain
        return [(ALL, columns) for columns in cuts(c, width)]

    @property
    def _is_dense(self) -> bool:
        """Whether all factors are stored as they are, so that rows can be cut anywhere."""
        return all(isinstance(factor, Dense) for use in self.uses for factor in use)

    def _samples(self, left: Left) -> Iterator[slice]:
        """Slices of the samples whose factors fit in scratch space."""
        g, r, c = self.shape
        width = c if isinstance(left, OneHot) else max(r, c)
        return cuts(self.n, scratch(self.like) // (g * left.positions * width))

    def _by_use(self, k: int) -> bool:
        """Whether k products from the factors are cheaper than building the gradients first."""
        one_hot = any(isinstance(left, OneHot) for left, _ in self.uses)
        return one_hot or k <= 1 or self.positions <= 1

    def apply(self, v: Tensor) -> Tensor:
        g, r, c = self.shape
        k = v.shape[1]
        v = v.reshape(g, r, c, k)
        out = v.new_zeros(self.n, k)
        if not self._by_use(k):
            for rows, columns in self.tiles():
                out += self.part(rows, columns).flatten(1) @ v[:, rows, columns].reshape(-1, k)
            return out
        for left, right in self.uses:
            for some in self._samples(left):
                values = right.dense(some)
                for j in range(k):
                    if isinstance(left, OneHot):
                        product = v[0, :, :, j][left.data[some]].unsqueeze(1) * values
                    else:
                        seen = grouped_product(by_position(values), v[..., j].mT)  # (g, m·T, r)
                        product = seen.mul_(by_position(left.dense(some))).sum((0, 2))
                        product = product.view(len(values), -1)
                    out[some, j] += product.flatten(1).sum(1)
        return out

    def add_combined(self, weights: Tensor, out: Tensor, beta: float = 1) -> None:
        tokens = tuple(use for use in self.uses if isinstance(use[0], OneHot))
        built = replace(self, uses=tuple(use for use in self.uses if isinstance(use[0], Dense)))
        by_use = tokens if built.uses and not built._by_use(len(weights)) else self.uses
        if by_use is tokens:
            built._add_built(weights, out, beta)
        elif not beta:
            out.zero_()
        matrices = out.unflatten(1, self.shape)  # (k, g, r, c)
        for left, right in by_use:
            for some in self._samples(left):
                _add_combined(left, right, weights[:, some], some, matrices)

    def _add_built(self, weights: Tensor, out: Tensor, beta: float) -> None:
        """The same from gradients of the samples, a part of them at a time."""
        g, matrices = self.shape[0], out.unflatten(1, self.shape)
        for rows, columns in self.tiles():
            part = self.part(rows, columns)
            if g == 1 and columns == ALL:  # numbers in a row: no copy
                here = matrices[:, 0, rows].flatten(1)
                here.addmm_(weights, part.flatten(1), beta=beta)
            else:
                found = (weights @ part.flatten(1)).view(len(weights), *part.shape[1:])
                to = matrices[:, :, rows, columns]
                to.copy_(found if not beta else found.add_(to, alpha=beta))

    def squared_sum(self) -> Tensor:
        if len(self.uses) == 1:
            ((left, right),) = self.uses
            if isinstance(left, OneHot):
                return _squared_tokens(left, right.dense())
            if left.positions == 1:
                squares = (f.dense().square().transpose(0, 2)[0] for f in (left, right))
                deltas, inputs = squares  # (g, n, r), (g, n, c)
                return (deltas.mT @ inputs).flatten()
        out = self.like.new_empty(self.shape)
        for rows, columns in self.tiles():
            torch.sum(self.part(rows, columns).square_(), 0, out=out[:, rows, columns])
        return out.flatten()


def _add_combined(left: Left, right: Right, weights: Tensor, some: slice, out: Tensor) -> None:
    """Add Σ_i w_i Σ_t L_it R_itᵀ over some samples, for k weightings (k, m), to (k, g, r, c)."""
    values = right.dense(some)  # (m, g, T, c)
    if isinstance(left, OneHot):
        index = left.data[some].flatten()
        for w, to in zip(weights, out, strict=True):
            to[0].index_add_(0, index, (w[:, None, None] * values[:, 0]).flatten(0, 1))
        return
    inputs = by_position(values)  # (g, m·T, c)
    if len(weights) == 1:  # as in every step of training: only the smaller factor is copied
        scaled = by_position(left.dense(some) * weights[0].view(-1, 1, 1, 1))
        for to, a, b in zip(out[0], scaled, inputs, strict=True):
            to.addmm_(a.T, b)
        return
    deltas = left.dense(some).permute(1, 3, 0, 2).contiguous()  # (g, r, m, T)
    _, r, m, _ = deltas.shape
    tall = len(weights) if deltas.is_cuda else -(-_TALL // r)
    for few in cuts(len(weights), min(tall, scratch(deltas) // deltas.numel())):
        scaled = deltas.unsqueeze(1) * weights[few].view(1, -1, 1, m, 1)  # (g, few, r, m, T)
        products = grouped_product(scaled.flatten(3).flatten(1, 2), inputs)
        out[few] += products.unflatten(1, (-1, r)).transpose(0, 1)


def _squared_tokens(left: OneHot, values: Tensor) -> Tensor:
    """Σ_i (Σ_t onehot_it R_itᵀ)²: repeated tokens of a sample are summed before squaring."""
    n = len(left.data)
    sample = torch.arange(n, device=values.device).unsqueeze(1)
    key = (sample * left.width + left.data).flatten()
    distinct, where = key.unique(return_inverse=True)
    width = values.shape[-1]
    sums = values.new_zeros(len(distinct), width).index_add_(0, where, values.reshape(-1, width))
    out = values.new_zeros(left.width, width)
    return out.index_add_(0, distinct % left.width, sums.square()).flatten()


def add_kernel(a: Block, b: Block, out: Tensor) -> None:
    """Add a parameter's part of φ φ'ᵀ to `out`, (n, n'), computed in its precision.

    For two blocks of outer products, either build the rows, r · c numbers each, or sum
    ⟨G_i, G'_j⟩ = Σ_ts ⟨L_it, L'_js⟩ ⟨R_it, R'_js⟩ over pairs of positions, whichever takes less
    arithmetic. For a linear layer on vectors the sum is (D D'ᵀ)∘(A A'ᵀ). For a block with itself
    only the entries on and above the diagonal are right: call `mirror` afterwards.
    """
    if not isinstance(a, Outer) or not isinstance(b, Outer):
        left, right = a.rows(), b.rows()
        for some in cuts(a.size, scratch(out) // max(len(left), len(right))):
            _add_product(left[:, some], right[:, some], a is b, out)
    elif _pairs_are_cheaper(a, b):
        _add_by_positions(a, b, out)
    else:
        for tile in _common_tiles(a, b):
            left = a.part(*tile).flatten(1)
            right = left if a is b else b.part(*tile).flatten(1)
            _add_product(left, right, a is b, out)


def mirror(out: Tensor) -> None:
    """Copy the upper triangle of a square matrix to the lower one."""
    for some in cuts(len(out), _stripe(out)):
        corner = out[some, some]
        corner.copy_(corner.triu() + corner.triu(1).T)
        out[some.stop :, some] = out[some, some.stop :].T


def _stripe(out: Tensor) -> int:
    return _STRIPE.get(out.device.type, _STRIPE["cpu"])


def _tiles(out: Tensor, size: tuple[int, int], symmetric: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles of a matrix; of a symmetric one, those that touch the upper triangle."""
    rows, columns = out.shape
    height, width = size
    for mine in cuts(rows, min(height, _stripe(out)) if symmetric else height):
        first = mine.start if symmetric else 0
        for theirs in cuts(columns - first, width):
            yield mine, slice(first + theirs.start, first + theirs.stop)


def _add_product(a: Tensor, b: Tensor, symmetric: bool, out: Tensor) -> None:
    """Add A Bᵀ."""
    left = a.to(out)
    right = left if symmetric else b.to(out)
    for mine, theirs in _tiles(out, (len(left), len(right)), symmetric):
        out[mine, theirs].addmm_(left[mine], right[theirs].T)


def _common_tiles(a: Outer, b: Outer) -> list[tuple[slice, slice]]:
    """Tiles of which both have the parts, for the one with more samples."""
    many, few = (a, b) if a.n > b.n else (b, a)
    return (few if many._is_dense and not few._is_dense else many).tiles()


def _pairs_are_cheaper(a: Outer, b: Outer) -> bool:
    """Compare multiplications per pair of samples."""
    _, r, c = a.shape
    by_pairs = sum(
        left.positions * other.positions * (c + (r if isinstance(left, Dense) else 1))
        for left, _ in a.uses
        for other, _ in b.uses
    )
    building = a.positions / max(1, b.n) + b.positions / max(1, a.n)
    return by_pairs <= r * c * (1 + building)


def _add_by_positions(a: Outer, b: Outer, out: Tensor) -> None:
    # Products of float32 factors as precise as these, many of which are summed more precisely.
    full = torch.get_float32_matmul_precision() == "highest" and not out.is_cuda
    like = a.like if full and a.positions * b.positions >= _MANY else out
    side = isqrt(scratch(out) // a.shape[0])
    # Of a few samples with many positions each, most below the diagonal is saved by few stripes.
    most = -(-a.n // _STRIPES) if a is b and not out.is_cuda else a.n
    for left, right in a.uses:
        for other_left, other_right in b.uses:
            t, s = left.positions, other_left.positions
            height = min(side // t, most) if t > 1 else side // t
            for mine, theirs in _tiles(out, (height, side // s), a is b):
                lefts = factor_products(left, other_left, mine, theirs, like)  # (g, m·T, m'·T')
                rights = factor_products(right, other_right, mine, theirs, like)
                if len(lefts) * t * s == 1:
                    out[mine, theirs].addcmul_(lefts[0], rights[0])
                    continue
                products = (lefts.to(out) * rights.to(out)).sum(0)
                products = products.view(-1, t, products.shape[1]).sum(1)
                out[mine, theirs] += products.view(len(products), -1, s).sum(2)
