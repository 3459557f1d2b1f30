"""What a method may ask of remembered directions, however they are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol, Self, final, runtime_checkable

import torch
from torch import Tensor

from forgetless.subspace.storage import Storage
from forgetless.support.errors import DataError
from forgetless.tangent import TangentFeatures

# Matrices in a gradient (S, p), each from a column on, that are known as Lᵀ R, too: L (S, b, r) and
# R (S, b, c), as a linear layer's on b samples is.
Outers = Mapping[int, tuple[Tensor, Tensor]]


@runtime_checkable
class Subspace(Protocol):
    """Directions in parameter space, K of them for each of S seeds. Never changed in place."""

    @property
    def rank(self) -> int:
        """K, the largest of all seeds."""

    @property
    def record(self) -> "Record":
        """What was remembered of each task."""

    @property
    def storage(self) -> Storage:
        """How directions are kept."""

    @property
    def nbytes(self) -> int:
        """What they take in memory."""

    def project_out(self, g: Tensor) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p)."""

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The same subspace where only the parameters in these columns can move."""

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        """With the features of all samples, one operator a seed."""

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        """With the samples' top directions, one operator a seed."""

    def kept_share(self) -> float:
        """Of the variance of all tasks' features, the share that the directions explain."""

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""


def refuse_infinite(*totals: float) -> None:
    """Refuse features by their total variance: they would leave a task without protection."""
    if not all(map(isfinite, totals)):
        raise DataError("the features of samples to remember are NaN or infinite")


@final
@dataclass(frozen=True)
class Record:
    """How many directions each task added, and the share of its variance that was remembered.

    Arguments:
        ranks: (S, T), directions that were new.
        shares: (S, T), of the variance of the samples looked at, what their directions explain.
    """

    ranks: Tensor
    shares: Tensor

    @classmethod
    def empty(cls, seeds: int) -> Self:
        """No task yet."""
        return cls(torch.zeros(seeds, 0, dtype=torch.long), torch.zeros(seeds, 0).double())

    @property
    def tasks(self) -> int:
        """T."""
        return self.ranks.shape[1]

    def with_task(self, ranks: Sequence[int], shares: Sequence[float]) -> Self:
        """One more task, of each seed."""
        rank = torch.tensor(ranks).unsqueeze(1)
        share = torch.tensor(shares, dtype=torch.float64).unsqueeze(1)
        return type(self)(torch.cat([self.ranks, rank], 1), torch.cat([self.shares, share], 1))

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""
        return {"ranks": self.ranks[seed], "shares": self.shares[seed]}

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """From what `tensors` gave for each seed."""
        ranks = torch.stack([tensors["ranks"].cpu() for tensors in of_seeds])
        return cls(ranks, torch.stack([tensors["shares"].cpu() for tensors in of_seeds]))
