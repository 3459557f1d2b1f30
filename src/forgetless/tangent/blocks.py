"""How the per-sample gradients of one layer's parameters are held: as factors or as rows."""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from forgetless.linalg import float64

# Scratch space of a combination, in elements: 256 MB of float32.
_SCRATCH = 1 << 26


class Block(Protocol):
    """The columns of φ that belong to one parameter or one layer, for n samples."""

    def dense(self) -> list[tuple[str, Tensor]]:
        """Parameter name and its columns (n, size), for every parameter of the block."""

    def gram(self) -> Tensor:
        """The block's part of φ φᵀ, (n, n) in float64."""

    def combine(self, weights: Tensor) -> list[tuple[str, Tensor]]:
        """Parameter name and its columns of weights @ φ, (k, size)."""

    def squared_sum(self) -> list[tuple[str, Tensor]]:
        """Parameter name and the sum over samples of its squared columns, (size,)."""


@final
@dataclass(frozen=True)
class RowBlock:
    """The gradients of one parameter, one row a sample: works for every layer."""

    name: str
    rows: Tensor  # (n, size)

    def dense(self) -> list[tuple[str, Tensor]]:
        return [(self.name, self.rows)]

    def gram(self) -> Tensor:
        rows = float64(self.rows)
        return rows @ rows.T

    def combine(self, weights: Tensor) -> list[tuple[str, Tensor]]:
        return [(self.name, weights @ self.rows)]

    def squared_sum(self) -> list[tuple[str, Tensor]]:
        return [(self.name, self.rows.square().sum(0))]


@final
@dataclass(frozen=True)
class LinearBlock:
    """The gradients of a linear layer z = W a + b that ran once: the outer products δ aᵀ, and δ.

    n_in + n_out numbers a sample instead of n_in · n_out, and a Gram matrix from two small ones:
    ⟨δ aᵀ, δ' a'ᵀ⟩ + ⟨δ, δ'⟩ = (⟨a, a'⟩ + 1) ⟨δ, δ'⟩.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor  # a, (n, n_in)
    deltas: Tensor  # δ = ∂f/∂z, (n, n_out)

    def dense(self) -> list[tuple[str, Tensor]]:
        outer = torch.einsum("no,ni->noi", self.deltas, self.inputs)
        return self._named(outer.flatten(1), self.deltas)

    def gram(self) -> Tensor:
        deltas, inputs = float64(self.deltas), float64(self.inputs)
        kernel = torch.zeros(len(deltas), len(deltas), dtype=deltas.dtype, device=deltas.device)
        if self.weight is not None:
            kernel += inputs @ inputs.T
        if self.bias is not None:
            kernel += 1.0
        return kernel * (deltas @ deltas.T)

    def combine(self, weights: Tensor) -> list[tuple[str, Tensor]]:
        n, n_out = self.deltas.shape
        parts = []
        for some in weights.split(max(1, _SCRATCH // (n * n_out))):
            scaled = some.unsqueeze(1) * self.deltas.T  # (k, n_out, n)
            parts.append((scaled.flatten(0, 1) @ self.inputs).reshape(len(some), -1))
        return self._named(torch.cat(parts), weights @ self.deltas)

    def squared_sum(self) -> list[tuple[str, Tensor]]:
        deltas = self.deltas.square()
        return self._named((deltas.T @ self.inputs.square()).flatten(), deltas.sum(0))

    def _named(self, weight: Tensor, bias: Tensor) -> list[tuple[str, Tensor]]:
        named = [(self.weight, weight), (self.bias, bias)]
        return [(name, value) for name, value in named if name is not None]
