"""The interface of remembered directions, however they are stored."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import Growth, Layout
from forgetless.subspace.storage import DENSE, Storage, most_directions
from forgetless.support.validation import ConfigError, DataError, format_bytes, require
from forgetless.tangent import TangentFeatures


@final
@dataclass(frozen=True)
class Movable:
    """The parameters that can move, where not all of them can.

    Arguments:
        mask: which they are, (p,) of bool.
        inverse: the pseudo-inverse over them of the directions' Gram matrix, (K, K) or (S, K, K).
        passes: how often a projection is done.
    """

    mask: Tensor
    inverse: Tensor
    passes: int = 2


class Directions(ABC):
    """Directions in parameter space that steps must avoid, for each of S seeds.

    What a method with `keeps_directions` has as its state. A class of your own needs a field
    `record`, the abstract methods below, and what else it can do better than here. It is never
    changed in place.

    Attributes:
        record: what each task added.
        storage: how the directions are stored; the one that was asked for, for a class that can
            store them in several ways.
        over_ranks: whether `project_out` works with some of the p columns, the others being on the
            processes of `storage.ranks`.
    """

    record: "Record"
    storage: Storage = DENSE
    over_ranks: ClassVar[bool] = False
    # K directions take a K + b K² bytes; this is b.
    _square_bytes: ClassVar[int] = 0

    @property
    @abstractmethod
    def rank(self) -> int:
        """K, the largest number of directions of a seed."""

    @abstractmethod
    def project_out(self, g: Tensor) -> Tensor:
        """g without its part along the directions: (S, p) → (S, p)."""

    @abstractmethod
    def limited(self, limit: int) -> Self:
        """At most `limit` directions, those that explain most; later tasks may add more."""

    @abstractmethod
    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Everything stored for a seed, enough to restore it."""

    @classmethod
    @abstractmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> "Directions":
        """The directions from their `tensors` for each seed, for weights theta (S, p)."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        seeds = range(len(self.record.ranks))
        kept = [self.tensors(seed) for seed in seeds]
        return sum(t.nbytes for of_seed in kept for t in of_seed.values())

    def bytes_by_parameter(self, columns: Mapping[str, slice]) -> dict[str, int]:
        """Parameter → bytes of the directions in its columns, for the first seed."""
        return {}

    def reaches(self, columns: Mapping[str, slice]) -> bool:
        """Whether the last task's directions are known to have a part in each parameter."""
        return False

    def explained(self) -> Tensor:
        """The shares of the tasks' variances that the directions explain, summed: (S,)."""
        return self.record.shares.sum(1)

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The projection of vectors that are zero outside these columns, and stay so."""
        raise ConfigError(
            f"{type(self).__name__} has no `restricted`, so all protected parameters must be "
            "trained in every step"
        )

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """The same directions in a network with more weights, which are free.

        Arguments:
            growth: which weights are new.
            theta: all weights, (S, p').
        """
        raise ConfigError(
            f"{type(self).__name__} has no `grown`, so the protected layers cannot get more rows"
        )

    def moved_to(self, storage: Storage, theta: Tensor) -> "Directions":
        """The same directions in another storage, for weights of the dtype and device of theta."""
        return self.restore([self.tensors(seed) for seed in range(len(theta))], theta, storage)

    def compressed(self, budget: int) -> tuple["Directions", tuple[str, ...]]:
        """All directions in fewer bytes at the price of speed or precision, and how, in words.

        Arguments:
            budget: bytes; nothing more is given up once they suffice.
        """
        return self, ()

    def __str__(self) -> str:
        return type(self).__name__

    def kept_share(self) -> float:
        """The share of the variance of all tasks' features that the directions explain."""
        tasks = self.record.tasks
        return float(self.explained().mean()) / tasks if tasks else 0.0

    def within(self, budget: int) -> tuple["Directions", str | None]:
        """The directions in at most `budget` bytes, and what was given up for it, in words.

        First all directions are compressed; if that is not enough, those that explain least are
        dropped.
        """
        if self.nbytes <= budget:
            return self, None
        fewer, how = self.compressed(budget)
        if fewer.nbytes > budget:
            fewer = fewer._fewer(budget)
            how = (*how, f"{fewer.rank} of {self.rank} directions kept")
        if fewer.nbytes > budget:
            raise ConfigError(
                "budget must be enough for at least one direction, "
                f"{format_bytes(fewer.nbytes)} for this model, not {format_bytes(budget)}"
            )
        return fewer, (
            f"{', '.join(how)}: {format_bytes(self.nbytes)} asked for, {format_bytes(budget)} "
            f"given; {self.kept_share():.1%} of the variance was explained, "
            f"{fewer.kept_share():.1%} is now"
        )

    def _fewer(self, budget: int) -> "Directions":
        """As many directions as fit, at least one."""
        rank, square = self.rank, self._square_bytes
        each = self.nbytes / rank - square * rank
        limit = min(rank - 1, most_directions(each, square, budget))
        while True:
            limit = max(1, limit)
            fewer = self.limited(limit)
            if fewer.nbytes <= budget or limit == 1:
                return fewer
            # Samples differ in size, such as sequences of different lengths.
            limit = min(limit - 1, int(limit * budget / fewer.nbytes))


class Subspace(Directions):
    """The span of tangent features, K orthonormal directions for each of S seeds."""

    def __str__(self) -> str:
        return str(self.storage)

    @abstractmethod
    def bases(self) -> Iterator[Tensor]:
        """An orthonormal basis (K, p) for each seed, one at a time."""

    @abstractmethod
    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        """With the features of all samples, one operator per seed."""

    @abstractmethod
    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        """With the samples' top directions, one operator per seed."""


def require_no_rows(storage: Storage, what: str) -> None:
    """Reject a storage for rows as long as the model, which some directions do not have."""
    if replace(storage, max_rank=None, ranks=None, layout=None) != DENSE:
        raise ConfigError(
            f"storage must be 'dense' for {what}, not {storage}: it has no rows as long as the "
            "model; a budget makes it smaller"
        )


def stored_layout(shapes: Mapping[str, Sequence[int]], theta: Tensor, storage: Storage) -> Layout:
    """The layout of weights theta (S, p), for directions stored with their parameters' shapes."""
    layout = storage.layout or Layout({name: tuple(shape) for name, shape in shapes.items()})
    if layout.size != theta.shape[1]:
        raise ConfigError(f"the directions are of {layout.size} weights, not {theta.shape[1]}")
    return layout


def refuse_infinite(*totals: float) -> None:
    """Reject features whose total variance is not finite: they would protect nothing."""
    if not all(map(isfinite, totals)):
        raise DataError("the features of samples to remember are NaN or infinite")


@final
@dataclass(frozen=True)
class Record:
    """How many directions each task added, and the share of its variance that they explain.

    Arguments:
        ranks: (S, T), new directions.
        shares: (S, T), shares of the variance of the task's samples.
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

    def with_task(self, ranks: Sequence[int] | Tensor, shares: Sequence[float] | Tensor) -> Self:
        """With one more task, a rank and a share per seed."""
        rank = torch.as_tensor(ranks).detach().to("cpu", torch.long)
        share = torch.as_tensor(shares).detach().to("cpu", torch.float64)
        for argument, given in {"ranks": rank, "shares": share}.items():
            accepted = f"{len(self.ranks)} numbers, one for each seed"
            require(given.shape == self.ranks.shape[:1], argument, tuple(given.shape), accepted)
        ranks, shares = rank.unsqueeze(1), share.unsqueeze(1)
        return type(self)(torch.cat([self.ranks, ranks], 1), torch.cat([self.shares, shares], 1))

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Everything stored for a seed."""
        return {"ranks": self.ranks[seed], "shares": self.shares[seed]}

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """From the `tensors` of each seed."""
        ranks = torch.stack([tensors["ranks"].cpu() for tensors in of_seeds])
        return cls(ranks, torch.stack([tensors["shares"].cpu() for tensors in of_seeds]))
