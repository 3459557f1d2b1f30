"""How the per-sample gradients of one parameter are held: as rows, or as sums of outer products."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from forgetless.tangent.factors import ALL, Left, OneHot, Right, by_position, cuts, multiplied

# Scratch space of one step, in elements: 64 MiB of float64, and 1 GiB on a GPU.
_SCRATCH = 1 << 23
_GPU_SCRATCH = 1 << 27
# Rows of a matrix product: on a CPU fewer cost time and more only memory; a GPU likes all of them.
_TALL = 1 << 10


def scratch(like: Tensor) -> int:
    """Elements that one step may take where the tensor is."""
    return _GPU_SCRATCH if like.is_cuda else _SCRATCH


class Block(Protocol):
    """The columns of φ that belong to one parameter, for n samples."""

    @property
    def size(self) -> int:
        """How many columns."""

    def rows(self) -> Tensor:
        """The columns themselves, (n, size)."""

    def apply(self, v: Tensor) -> Tensor:
        """Their product with v: (size, k) → (n, k)."""

    def add_combined(self, weights: Tensor, out: Tensor) -> None:
        """Add weights times them, (k, n) → (k, size), to `out`."""

    def squared_sum(self) -> Tensor:
        """The sum over samples of their squares, (size,)."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept in memory."""


@final
@dataclass(frozen=True)
class Rows:
    """One row a sample, (n, size): for small parameters, and for layers without a rule."""

    values: Tensor

    @property
    def size(self) -> int:
        return self.values.shape[1]

    def rows(self) -> Tensor:
        return self.values

    def apply(self, v: Tensor) -> Tensor:
        return self.values @ v

    def add_combined(self, weights: Tensor, out: Tensor) -> None:
        out.addmm_(weights, self.values)

    def squared_sum(self) -> Tensor:
        return self.values.square().sum(0)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@final
@dataclass(frozen=True)
class Outer:
    """Gradients of a parameter seen as g matrices r×c: G_i = Σ_uses Σ_t L_it R_itᵀ.

    T · (r + c) numbers a sample instead of r · c. For a linear layer L = ∂f/∂z and R = a are the
    gradient at its outputs and its inputs; for a convolution T are the output positions and R the
    input patches; for an embedding L is one-hot. No uses at all: a gradient of zero.

    Arguments:
        shape: (g, r, c).
        uses: pairs L (n, g, T, r), R (n, g, T, c).
        like: (n, 0), says how many samples, and the dtype and device.
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
        """T, of all uses together."""
        return sum(left.positions for left, _ in self.uses)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(factor.data for use in self.uses for factor in use)

    def rows(self) -> Tensor:
        return self.part(ALL).flatten(1)

    def part(self, columns: slice) -> Tensor:
        """Some of the c columns of every gradient, (n, g, r, columns)."""
        g, r, c = self.shape
        width = len(range(c)[columns])
        out = self.like.new_zeros(self.n, g, r, width)
        for left, right in self.uses:
            for some in cuts(self.n, scratch(self.like) // (g * left.positions * width)):
                values = right.dense(some, columns)  # (m, g, T, columns)
                if isinstance(left, OneHot):
                    index = left.index[some].unsqueeze(-1).expand_as(values[:, 0])
                    out[some, 0].scatter_add_(1, index, values[:, 0])
                else:
                    out[some] += left.dense(some).mT @ values
        return out

    def slices(self) -> list[slice]:
        """Cuts of the c columns whose `part` is not too large."""
        g, r, c = self.shape
        grain = max((right.grain for _, right in self.uses), default=1)
        return list(cuts(c, max(1, scratch(self.like) // (self.n * g * r * grain)) * grain))

    def _samples(self, left: Left) -> Iterator[slice]:
        """Cuts of the samples whose factors are not too large."""
        g, r, c = self.shape
        width = c if isinstance(left, OneHot) else max(r, c)
        return cuts(self.n, scratch(self.like) // (g * left.positions * width))

    def _by_use(self, k: int) -> bool:
        """Whether k products use by use take less than building the gradients first."""
        one_hot = any(isinstance(left, OneHot) for left, _ in self.uses)
        return one_hot or k <= 1 or self.positions <= 1

    def apply(self, v: Tensor) -> Tensor:
        g, r, c = self.shape
        k = v.shape[1]
        v = v.reshape(g, r, c, k)
        out = v.new_zeros(self.n, k)
        if not self._by_use(k):
            for columns in self.slices():
                out += self.part(columns).flatten(1) @ v[:, :, columns].reshape(-1, k)
            return out
        for left, right in self.uses:
            for some in self._samples(left):
                values = right.dense(some)
                for j in range(k):
                    if isinstance(left, OneHot):
                        product = v[0, :, :, j][left.index[some]].unsqueeze(1) * values
                    else:
                        seen = multiplied(by_position(values), v[..., j].mT)  # (g, m·T, r)
                        product = seen.mul_(by_position(left.dense(some))).sum((0, 2))
                        product = product.view(len(values), -1)
                    out[some, j] += product.flatten(1).sum(1)
        return out

    def apply_outer(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Their product with the matrix Lᵀ R, (b, r), (b, c) → (n, 1), from L and R.

        Σ_t ⟨L_it Lᵀ, R_it Rᵀ⟩ takes b (r + c) products a position in place of r c. None where
        that is not clearly less.
        """
        g, r, c = self.shape
        if g > 1 or 2 * len(left) * (r + c) > r * c:
            return None
        out = self.like.new_zeros(self.n, 1)
        for mine, other in self.uses:
            if isinstance(mine, OneHot):
                return None
            for some in self._samples(mine):
                seen = by_position(mine.dense(some))[0] @ left.T  # (m·T, b)
                seen.mul_(by_position(other.dense(some))[0] @ right.T)
                out[some] += seen.sum(1).view(-1, mine.positions).sum(1, keepdim=True)
        return out

    def add_combined(self, weights: Tensor, out: Tensor) -> None:
        k = len(weights)
        out = out.unflatten(1, self.shape)  # (k, g, r, c)
        if not self._by_use(k):
            for columns in self.slices():
                part = self.part(columns)
                out[..., columns] += (weights @ part.flatten(1)).view(k, *part.shape[1:])
            return
        for left, right in self.uses:
            for some in self._samples(left):
                _add_combined(left, right, weights[:, some], some, out)

    def squared_sum(self) -> Tensor:
        if len(self.uses) == 1:
            ((left, right),) = self.uses
            if isinstance(left, OneHot):
                return _squared_tokens(left, right.dense())
            if left.positions == 1:
                squares = (f.dense().square().transpose(0, 2)[0] for f in (left, right))
                deltas, inputs = squares  # (g, n, r), (g, n, c)
                return (deltas.mT @ inputs).flatten()
        parts = [self.part(columns).square().sum(0) for columns in self.slices()]
        return torch.cat(parts, -1).flatten()


def _add_combined(left: Left, right: Right, weights: Tensor, some: slice, out: Tensor) -> None:
    """Add Σ_i w_i Σ_t L_it R_itᵀ over some samples, for k weightings (k, m), to (k, g, r, c)."""
    values = right.dense(some)  # (m, g, T, c)
    if isinstance(left, OneHot):
        index = left.index[some].flatten()
        for w, to in zip(weights, out, strict=True):
            to[0].index_add_(0, index, (w[:, None, None] * values[:, 0]).flatten(0, 1))
        return
    inputs = by_position(values)  # (g, m·T, c)
    if len(weights) == 1:  # as at every step of training: nothing is copied but what is weighted
        scaled = by_position(left.dense(some) * weights[0].view(-1, 1, 1, 1))
        for to, a, b in zip(out[0], scaled, inputs, strict=True):
            to.addmm_(a.T, b)
        return
    deltas = left.dense(some).permute(1, 3, 0, 2).contiguous()  # (g, r, m, T)
    _, r, m, _ = deltas.shape
    tall = len(weights) if deltas.is_cuda else -(-_TALL // r)
    for few in cuts(len(weights), min(tall, scratch(deltas) // deltas.numel())):
        scaled = deltas.unsqueeze(1) * weights[few].view(1, -1, 1, m, 1)  # (g, few, r, m, T)
        products = multiplied(scaled.flatten(3).flatten(1, 2), inputs)
        out[few] += products.unflatten(1, (-1, r)).transpose(0, 1)


def _squared_tokens(left: OneHot, values: Tensor) -> Tensor:
    """Σ_i (Σ_t onehot_it R_itᵀ)²: what a sample's repeated tokens add is squared as a whole."""
    n = len(left.index)
    sample = torch.arange(n, device=values.device).unsqueeze(1)
    key = (sample * left.width + left.index).flatten()
    distinct, where = key.unique(return_inverse=True)
    width = values.shape[-1]
    sums = values.new_zeros(len(distinct), width).index_add_(0, where, values.reshape(-1, width))
    out = values.new_zeros(left.width, width)
    return out.index_add_(0, distinct % left.width, sums.square()).flatten()
