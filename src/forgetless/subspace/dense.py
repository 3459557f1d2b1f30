"""Remembered directions as orthonormal rows, one stack per seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from forgetless.linalg import orthonormalize
from forgetless.subspace.rows import project_out_rows, stacked


@final
@dataclass(frozen=True)
class DenseSubspace:
    """The span of K remembered directions for each of S seeds.

    `rows` is (S, K, p), orthonormal up to the rounding of their type; where seeds have different
    ranks, rows of zeros fill up.
    """

    rows: Tensor

    @classmethod
    def empty(cls, theta: Tensor, dtype: torch.dtype | None = None) -> Self:
        """No directions yet, for weights theta (S, p); to be stored in their type or another."""
        return cls(theta.new_empty(theta.shape[0], 0, theta.shape[1], dtype=dtype))

    def project_out(self, g: Tensor) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p)."""
        return project_out_rows(g, self.rows)

    def extend(self, vectors: Sequence[Tensor]) -> Self:
        """The subspace with the span of more vectors added, (d, p) for each seed.

        What is already inside, or depends on the other vectors, adds nothing.
        """
        new = [
            orthonormalize(v, against=old.to(v)) for v, old in zip(vectors, self.rows, strict=True)
        ]
        return type(self)(stacked(self.rows, new))

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps."""
        return {"directions": self.rows}
