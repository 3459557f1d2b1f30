"""Remembered directions as orthonormal rows, one stack per seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from forgetless.linalg import float64, orthonormalize
from forgetless.subspace.base import Record, refuse_infinite
from forgetless.subspace.kernels.inplace import lengths_of_long, orthonormalize_in_place
from forgetless.subspace.kernels.rows import aligned, laid_out
from forgetless.subspace.kernels.sweep import coefficients, combination, project_out_rows
from forgetless.subspace.storage import DENSE, Storage
from forgetless.support.collectives import Ranks
from forgetless.tangent import (
    TangentFeatures,
    merged,
    principal_weights,
    top_weights_of_each,
)

# Numbers that are made float64 at once.
_EXACT = 1 << 22
_TINY = 1e-300
# Norm of the inverse of V Vᵀ over some parameters from which rounding matters.
_STEEP = 100.0


@final
@dataclass(frozen=True)
class DenseSubspace:
    """The span of K remembered directions for each of S seeds.

    On several ranks each of them has some of the p columns, of these rows and of all vectors; a
    projection is one sum of K coefficients over the ranks, and all K × K matrices are on each.

    Arguments:
        rows: V, (S, K, p), orthonormal; where seeds have different ranks, rows of zeros fill up.
        moments: Σ over tasks of V Φᵀ Φ Vᵀ / tr Φ Φᵀ, (S, K, K) in float64: how much of the tasks'
            features lies in which direction.
        record: what was remembered of each task.
        storage: how rows are kept.
        movable: if not all parameters can move, the mask (p,) of those that can, the
            pseudo-inverse (S, K, K) of V Vᵀ over them, and how often a projection is done.
        columns: the columns of those that can.
    """

    rows: Tensor
    moments: Tensor
    record: Record
    storage: Storage = DENSE
    movable: tuple[Tensor, Tensor, int] | None = None
    columns: tuple[slice, ...] | None = None

    @classmethod
    def empty(cls, theta: Tensor, storage: Storage = DENSE) -> Self:
        """No directions yet, for weights theta (S, p)."""
        seeds, p = theta.shape
        rows = theta.new_empty(seeds, 0, p)
        return cls(rows, float64(theta.new_empty(seeds, 0, 0)), Record.empty(seeds), storage)

    @property
    def rank(self) -> int:
        """K."""
        return self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Of rows and moments."""
        return self.rows.nbytes + self.moments.nbytes

    def project_out(self, g: Tensor) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p).

        If only some parameters can move, the nearest vector among those that moves nothing
        protected: with F the projection on them, g − F Vᵀ (V F Vᵀ)⁺ V g.
        """
        if self.movable is None and self.storage.ranks is None:
            return project_out_rows(g, self.rows)
        if self.movable is None:
            return g - combination(self._sum(coefficients(g, self.rows)), self.rows)
        mask, inverse = (t.to(g.device) for t in self.movable[:2])
        g = g * mask
        for _ in range(self.movable[2]):
            along = self._sum(coefficients(g, self.rows)).to(inverse)
            inside = (inverse @ along.unsqueeze(2)).squeeze(2).to(g)
            g = g - combination(inside, self.rows) * mask
        return g

    def _sum(self, partial: Tensor) -> Tensor:
        """Over the ranks, if there are several."""
        ranks = self.storage.ranks
        return partial if ranks is None or partial.numel() == 0 else ranks.sum(partial)

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The same subspace where only the parameters in these columns can move."""
        mask = self.rows.new_zeros(self.rows.shape[2], dtype=torch.bool)
        gram = torch.zeros_like(self.moments)
        for some in columns:
            mask[some] = True
            # In float64, so that directions with little in these columns are not lost in rounding.
            for part in self.rows[..., some].split(max(1, _EXACT // max(1, self.rank)), dim=2):
                exact = float64(part).to(gram.device)
                gram += exact @ exact.mT
        inverse = torch.linalg.pinv(self._sum(gram), rtol=1e-10, hermitian=True)
        # Of a direction of which little can move, rounding leaves too much the first time.
        steep = self.rank and float(torch.linalg.matrix_norm(inverse, 2).max()) > _STEEP
        movable = mask, inverse, 2 if steep else 1
        return replace(self, movable=movable, columns=tuple(columns))

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        """With the features of all samples, one operator a seed."""
        vectors = [phi.dense() for phi in features]
        return self._extended(vectors, None)

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        """With the samples' top directions, one operator a seed."""
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
        """With the span of more vectors (d, p) for each seed.

        What is already inside, or depends on the other vectors, adds nothing.

        Arguments:
            vectors: of each seed.
            totals: the variance of the features that they are directions of; None if they are all
                of these features.
        """
        ranks = self.storage.ranks
        lengths = [lengths_of_long(v, ranks) for v in vectors]
        squares = [float(of_seed.square().sum()) for of_seed in lengths]
        totals = squares if totals is None else totals
        refuse_infinite(*totals)
        shares = [one / max(total, _TINY) for one, total in zip(squares, totals, strict=True)]
        problems = zip(vectors, self.rows, lengths, strict=True)
        found = [_taken_apart(*problem, ranks) for problem in problems]
        count = self.rank + max(len(new) for new, _ in found)
        rows = self._room(count, vectors[0])
        rows[:, : self.rank] = self.rows
        moments = self.moments.new_zeros(len(rows), count, count)
        moments[:, : self.rank, : self.rank] = self.moments
        for s, ((new, inside), total) in enumerate(zip(found, totals, strict=True)):
            size = self.rank + len(new)
            rows[s, self.rank : size] = new
            moments[s, :size, :size].add_(inside.T @ inside, alpha=1 / max(total, _TINY))
        record = self.record.with_task([len(new) for new, _ in found], shares)
        grown = replace(self, rows=rows, moments=moments, record=record, movable=None)
        kept = grown.stored(self.storage)
        return kept if self.columns is None else kept.restricted(self.columns)

    def _room(self, count: int, like: Tensor) -> Tensor:
        """Zero rows (S, count, p), as they are kept unless they are still to be made fewer."""
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
        """With no more than max_rank directions: those that explain most of all tasks' features."""
        limit = self.storage.max_rank
        if limit is None or self.rank <= limit:
            return self
        values, vectors = torch.linalg.eigh(self.moments)
        values, vectors = values.flip(-1)[:, :limit], vectors.flip(-1)[..., :limit]
        if self.storage.ranks is not None:
            values, vectors = map(self.storage.ranks.agreed, (values, vectors))
        old = _full(self.rows)
        rows = vectors.mT.to(old) @ old
        return replace(self, rows=rows, moments=torch.diag_embed(values))

    def stored(self, storage: Storage) -> Self:
        """The same directions kept in another way."""
        kept = replace(self, storage=storage)._truncated()
        device = kept.rows.device if storage.device is None else storage.device
        rows = kept.rows.to(device, storage.dtype or kept.rows.dtype)
        # Rows that wait for a model on a GPU are copied there again and again.
        if storage.device is not None and device.type == "cpu" and torch.cuda.is_available():
            rows = rows.pin_memory()
        return replace(kept, rows=laid_out(rows))

    def kept_share(self) -> float:
        """Of the variance of all tasks' features, the share that the directions explain."""
        tasks = self.record.tasks
        traces = self.moments.diagonal(dim1=1, dim2=2).sum(1)
        return float(traces.mean()) / tasks if tasks else 0.0

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What a trace keeps of a seed."""
        kept = {"directions": self.rows[seed], "moments": self.moments[seed]}
        return kept | self.record.tensors(seed)

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        """From what `tensors` gave for each seed."""
        device = theta.device if storage.device is None else storage.device
        of_each = [tensors["directions"].to(device) for tensors in of_seeds]
        rows = of_each[0].unsqueeze(0) if len(of_each) == 1 else torch.stack(of_each)
        moments = torch.stack([tensors["moments"] for tensors in of_seeds])
        record = Record.restore(of_seeds)
        return cls(rows, moments.to(float64(theta).device), record, storage).stored(storage)


def _agreed_weights(
    phi: TangentFeatures, components: int | float, centred: bool, ranks: Ranks
) -> tuple[Tensor, Tensor, float]:
    """The top directions' weights, the same on every rank: all have the same Gram matrix."""
    gram, dtype = ranks.sum(phi.gram()), phi.like.dtype
    values, weights, total = principal_weights(gram, components, centred=centred, dtype=dtype)
    return ranks.agreed(values), ranks.agreed(weights), total


def _taken_apart(
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
    """What rounding to half precision leaves of a vector outside of rows that held it."""
    return torch.finfo(rows.dtype).eps if len(rows) and rows.element_size() < 4 else 0.0


def _full(rows: Tensor) -> Tensor:
    """Rows precise enough to compute with."""
    return rows.float() if rows.element_size() < 4 else rows
