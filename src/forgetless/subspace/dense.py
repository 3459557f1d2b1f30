"""Remembered directions as orthonormal rows, one stack per seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from forgetless.linalg import orthonormalize, project_out


@final
@dataclass(frozen=True)
class DenseSubspace:
    """The span of K remembered directions for each of S seeds.

    `rows` is (S, K, p), orthonormal; where seeds have different ranks, rows of zeros fill up.
    """

    rows: Tensor

    @classmethod
    def empty(cls, theta: Tensor) -> Self:
        """No directions yet, for weights theta (S, p)."""
        return cls(theta.new_empty(theta.shape[0], 0, theta.shape[1]))

    def project_out(self, g: Tensor) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p)."""
        return project_out(g, self.rows)

    def extend(self, vectors: Sequence[Tensor]) -> Self:
        """The subspace with the span of more vectors added, (d, p) for each seed.

        What is already inside, or depends on the other vectors, adds nothing.
        """
        new = [
            orthonormalize(v.to(old), against=old)
            for v, old in zip(vectors, self.rows, strict=True)
        ]
        height = max(len(n) for n in new)
        padded = [torch.cat([n, n.new_zeros(height - len(n), n.shape[1])]) for n in new]
        return type(self)(torch.cat([self.rows, torch.stack(padded)], dim=1))

    def tensors(self) -> dict[str, Tensor]:
        """What a trace keeps."""
        return {"directions": self.rows}
