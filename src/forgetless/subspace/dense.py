"""Directions as orthonormal rows, one stack per seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import TINY, float64, orthonormalize
from forgetless.subspace.base import Record, Subspace, refuse_infinite
from forgetless.subspace.inplace import lengths_of_long, orthonormalize_in_place
from forgetless.subspace.movable import Movable
from forgetless.subspace.projection import (
    aligned,
    coefficients,
    combination,
    laid_out,
    project_out_rows,
)
from forgetless.subspace.storage import DENSE, SQUARE_BYTES, Storage
from forgetless.support.collectives import Ranks
from forgetless.support.errors import ConfigError
from forgetless.support.layout import Growth
from forgetless.tangent import (
    TangentFeatures,
    merged,
    principal_weights,
    top_weights_of_each,
)

# Numbers converted to float64 at once.
_EXACT = 1 << 22
# The norm of the inverse of V Vᵀ over some parameters above which rounding matters.
_STEEP = 100.0


@final
@dataclass(frozen=True)
class DenseSubspace(Subspace):
    """The span of K remembered directions for each of S seeds.

    On several ranks, each has some of the p columns of these rows and of all vectors; a projection
    sums K coefficients over the ranks, and every rank has all K × K matrices.

    Arguments:
        rows: V, (S, K, p), orthonormal; where seeds have different ranks, rows of zeros fill up.
        moments: Σ over tasks of V Φᵀ Φ Vᵀ / tr Φ Φᵀ, (S, K, K) in float64: the share of each
            task's variance in each direction.
        record: what each task added.
        storage: how the rows are stored.
        movable: the parameters that can move, if not all can.
    """

    rows: Tensor
    moments: Tensor
    record: Record
    storage: Storage = DENSE
    over_ranks: ClassVar[bool] = True
    _square_bytes: ClassVar[int] = SQUARE_BYTES["dense"]
    movable: Movable | None = None

    @classmethod
    def empty(cls, theta: Tensor, storage: Storage = DENSE) -> Self:
        """No directions yet, for weights theta (S, p)."""
        seeds, p = theta.shape
        rows = theta.new_empty(seeds, 0, p)
        return cls(rows, float64(theta.new_empty(seeds, 0, 0)), Record.empty(seeds), storage)

    @property
    def rank(self) -> int:
        return self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.moments.nbytes

    def bytes_by_parameter(self, columns: Mapping[str, slice]) -> dict[str, int]:
        each = self.rows.element_size() * self.rank
        return {name: each * (own.stop - own.start) for name, own in columns.items()}

    def explained(self) -> Tensor:
        return self.moments.diagonal(dim1=1, dim2=2).sum(1)

    def bases(self) -> Iterator[Tensor]:
        yield from self.rows

    def project_out(self, g: Tensor) -> Tensor:
        """g − Vᵀ V g.

        If only some parameters can move, the nearest vector that moves those alone and nothing
        protected: with F the projection onto them, g − F Vᵀ (V F Vᵀ)⁺ V g.
        """
        if self.movable is None and self.storage.ranks is None:
            return project_out_rows(g, self.rows)
        if self.movable is None:
            return g - combination(self._sum(coefficients(g, self.rows)), self.rows)
        mask, inverse = self.movable.mask.to(g.device), self.movable.inverse.to(g.device)
        g = g * mask
        for _ in range(self.movable.passes):
            along = self._sum(coefficients(g, self.rows)).to(inverse)
            inside = (inverse @ along.unsqueeze(2)).squeeze(2).to(g)
            g = g - combination(inside, self.rows) * mask
        return g

    def _sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, if there are several."""
        ranks = self.storage.ranks
        return partial if ranks is None or partial.numel() == 0 else ranks.sum(partial)

    def restricted(self, columns: Sequence[slice]) -> Self:
        mask = self.rows.new_zeros(self.rows.shape[2], dtype=torch.bool)
        gram = torch.zeros_like(self.moments)
        for some in columns:
            mask[some] = True
            # In float64, so that rounding does not lose directions with little in these columns.
            for part in self.rows[..., some].split(max(1, _EXACT // max(1, self.rank)), dim=2):
                exact = float64(part).to(gram.device)
                gram += exact @ exact.mT
        inverse = torch.linalg.pinv(self._sum(gram), rtol=1e-10, hermitian=True)
        # One pass leaves too much of a direction of which little can move.
        steep = self.rank and float(torch.linalg.matrix_norm(inverse, 2).max()) > _STEEP
        return replace(self, movable=Movable(mask, inverse, passes=2 if steep else 1))

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        vectors = [phi.dense() for phi in features]
        return self._extended(vectors, None)

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        phis, ranks = [merged(one) for one in features], self.storage.ranks
        if ranks is None:
            found = top_weights_of_each(phis, components, centred=centred)
        else:
            found = [_agreed_weights(phi, components, centred, ranks) for phi in phis]
        vectors = [
            phi.combine((values.unsqueeze(1) * weights).to(phi.like))
            for phi, (values, weights, _) in zip(phis, found, strict=True)
        ]
        return self._extended(vectors, [total for *_, total in found])

    def _extended(self, vectors: Sequence[Tensor], totals: Sequence[float] | None) -> Self:
        """The subspace extended by the span of more vectors.

        Vectors that lie inside it, or depend on the others, add nothing.

        Arguments:
            vectors: (d, p) for each seed.
            totals: the variance of the features whose directions they are; None if the vectors are
                these features.
        """
        ranks = self.storage.ranks
        lengths = [lengths_of_long(v, ranks) for v in vectors]
        squares = [float(of_seed.square().sum()) for of_seed in lengths]
        totals = squares if totals is None else totals
        refuse_infinite(*totals)
        shares = [one / max(total, TINY) for one, total in zip(squares, totals, strict=True)]
        problems = zip(vectors, self.rows, lengths, strict=True)
        found = [_new_rows(*problem, ranks) for problem in problems]
        count = self.rank + max(len(new) for new, _ in found)
        rows = self._room(count, vectors[0])
        rows[:, : self.rank] = self.rows
        moments = self.moments.new_zeros(len(rows), count, count)
        moments[:, : self.rank, : self.rank] = self.moments
        for s, ((new, inside), total) in enumerate(zip(found, totals, strict=True)):
            size = self.rank + len(new)
            rows[s, self.rank : size] = new
            moments[s, :size, :size].add_(inside.T @ inside, alpha=1 / max(total, TINY))
        record = self.record.with_task([len(new) for new, _ in found], shares)
        grown = replace(self, rows=rows, moments=moments, record=record, movable=None)
        return grown.stored(self.storage)

    def _room(self, count: int, like: Tensor) -> Tensor:
        """Zero rows (S, count, p), stored as asked unless max_rank will first reduce them."""
        limit = self.storage.max_rank
        whole = limit is None or count <= limit
        none = like.new_empty(len(self.rows), 0, like.shape[1])
        none = none.to(self.storage.device, self.storage.dtype) if whole else none
        return (
            aligned(none, count)
            if none.is_cuda
            else none.new_zeros(len(none), count, none.shape[2])
        )

    def _truncated(self) -> Self:
        """At most max_rank directions: those that explain most of all tasks' features."""
        limit = self.storage.max_rank
        if limit is None or self.rank <= limit:
            return self
        values, vectors = torch.linalg.eigh(self.moments)
        values, vectors = values.flip(-1)[:, :limit], vectors.flip(-1)[..., :limit]
        if self.storage.ranks is not None:
            values, vectors = map(self.storage.ranks.broadcast, (values, vectors))
        old = _full(self.rows)
        rows = vectors.mT.to(old) @ old
        return replace(self, rows=rows, moments=torch.diag_embed(values))

    def stored(self, storage: Storage) -> Self:
        """The same directions in another storage."""
        kept = replace(self, storage=storage)._truncated()
        device = kept.rows.device if storage.device is None else storage.device
        rows = kept.rows.to(device, storage.dtype or kept.rows.dtype)
        # Rows for a model on a GPU are copied there at every step.
        if storage.device is not None and device.type == "cpu" and torch.cuda.is_available():
            rows = rows.pin_memory()
        return replace(kept, rows=laid_out(rows))

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        rows = growth.padded(self.rows)
        return replace(self, rows=rows, movable=None).stored(self.storage)

    def limited(self, limit: int) -> Self:
        """The best mixtures of all directions."""
        return replace(self.stored(replace(self.storage, max_rank=limit)), storage=self.storage)

    def moved_to(self, storage: Storage, theta: Tensor) -> Self:
        if storage.kind == "factored":
            raise ConfigError("the state has dense rows, which cannot become factored samples")
        # `stored` changes only what the storage names.
        rows = self.rows.to(theta.device) if storage.device is None else self.rows
        rows = rows.to(theta.dtype) if storage.dtype is None else rows
        return replace(self, rows=rows).stored(storage)

    def compressed(self, budget: int) -> tuple[Self, tuple[str, ...]]:
        what = "rows rounded to bfloat16, which leaves about 1e-3 of a protected component"
        return self.stored(replace(self.storage, dtype=torch.bfloat16)), (what,)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        kept = {"directions": self.rows[seed], "moments": self.moments[seed]}
        return kept | self.record.tensors(seed)

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        device = theta.device if storage.device is None else storage.device
        of_each = [tensors["directions"].to(device) for tensors in of_seeds]
        rows = of_each[0].unsqueeze(0) if len(of_each) == 1 else torch.stack(of_each)
        moments = torch.stack([tensors["moments"] for tensors in of_seeds])
        record = Record.restore(of_seeds)
        return cls(rows, moments.to(float64(theta).device), record, storage).stored(storage)


def _agreed_weights(
    phi: TangentFeatures, components: int | float, centred: bool, ranks: Ranks
) -> tuple[Tensor, Tensor, float]:
    """The top directions' weights, equal on all ranks, from the summed Gram matrix."""
    gram, dtype = ranks.sum(phi.gram()), phi.like.dtype
    values, weights, total = principal_weights(gram, components, centred=centred, dtype=dtype)
    return ranks.broadcast(values), ranks.broadcast(weights), total


def _new_rows(
    vectors: Tensor, old: Tensor, lengths: Tensor, ranks: Ranks | None
) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that vectors (d, p) add to old ones (K, p), and A: vectors = A [old; new].

    Vectors in float32, or on several ranks, are overwritten.
    """
    if vectors.dtype == torch.float32 or ranks is not None:
        new, in_old, in_new = orthonormalize_in_place(
            vectors, old, lengths=lengths, least=_rounding(old), ranks=ranks
        )
        return new, torch.cat([in_old, in_new], 1)
    least, old = _rounding(old), _full(old).to(vectors)
    new = orthonormalize(vectors, against=old, least=least)
    return new, torch.cat([float64(vectors @ old.T), float64(vectors @ new.T)], 1)


def _rounding(rows: Tensor) -> float:
    """The share of a vector that rounding rows to half precision leaves outside their span."""
    return torch.finfo(rows.dtype).eps if len(rows) and rows.element_size() < 4 else 0.0


def _full(rows: Tensor) -> Tensor:
    """Rows in at least float32."""
    return rows.float() if rows.element_size() < 4 else rows
