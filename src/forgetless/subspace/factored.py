"""Directions as samples' features or weighted sums of them, without a row of p numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Self, final

import numpy as np
import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor
from torch.linalg import cholesky, solve_triangular

from forgetless.linalg import TINY, Growth, float64
from forgetless.subspace.base import Movable, Record, Subspace, refuse_infinite
from forgetless.subspace.dense import DenseSubspace
from forgetless.subspace.storage import DENSE, FACTORED, SQUARE_BYTES, Storage
from forgetless.support.cuda_graphs import run_concurrently
from forgetless.tangent import (
    TangentFeatures,
    bytes_by_parameter,
    concatenated,
    empty_features,
    from_tensors,
    grown,
    stored,
    stored_bytes,
    to_tensors,
)

# The share of a direction's squared length outside the earlier ones above which one pass leaves no
# more rounding than two.
_WELL_CONDITIONED = 1e-3
# ‖Ĝ⁻¹‖ (see `_sturdy`) up to which directions are kept, and above which another pass is needed.
_STEEPEST = 1e11
_STEEP = (1e7, 1e9)
# The share of a direction's squared length outside the others at which it counts as dependent.
# Coefficients grow as its inverse: below it, their rounding costs more than the direction helps.
_SQUARED_RESIDUAL = 1e-9
# Steps of the power method.
_POWERS = 12


@final
@dataclass(frozen=True)
class Atoms:
    """One seed's K directions W Φ with W Φ Φᵀ Wᵀ = L Lᵀ: their orthonormal basis is V = L⁻¹ W Φ.

    Arguments:
        phi: the remembered samples' features Φ, (n, p), as factors.
        weights: W, (K, n) in float64; None for the samples themselves.
        factor: L, (K, K) in float64, lower triangular.
        moments: Σ over tasks of V Φᵀ Φ Vᵀ / tr Φ Φᵀ, (K, K) in float64: the share of each task's
            variance in each direction.
    """

    phi: TangentFeatures
    weights: Tensor | None
    factor: Tensor
    moments: Tensor

    @classmethod
    def none(cls, like: TangentFeatures) -> Self:
        """No directions yet."""
        empty = float64(like.like).new_zeros(0, 0)
        return cls(empty_features(like), None, empty, empty)

    @property
    def rank(self) -> int:
        """K."""
        return len(self.factor)

    @property
    def small_bytes(self) -> int:
        """Bytes of L, (L Lᵀ)⁻¹, moments and weights."""
        weights = 0 if self.weights is None else self.weights.nbytes
        return 2 * self.factor.nbytes + self.moments.nbytes + weights

    @cached_property
    def _gram_inverse(self) -> Tensor:
        """(L Lᵀ)⁻¹, (K, K): solving with L at every step would read it twice, and copy it."""
        return torch.cholesky_inverse(self.factor)

    @cached_property
    def passes(self) -> int:
        """Passes of a projection: where L is ill-conditioned, another removes rounding."""
        lengths = self.factor.square().sum(1)
        left = self.factor.diagonal().square() / lengths
        if bool((left > _WELL_CONDITIONED).all()):
            return 1
        size, _ = inverse_norm(self.factor, lengths)
        return 2 + sum(size > steep for steep in _STEEP)

    def basis(self) -> Tensor:
        """V, (K, p)."""
        weights = torch.eye(self.rank).to(self.factor) if self.weights is None else self.weights
        return self.phi.combine(solve_triangular(self.factor, weights, upper=False))

    def project_out(self, g: Tensor, movable: Movable | None = None) -> Tensor:
        """g − (W Φ)ᵀ (W Φ Φᵀ Wᵀ)⁻¹ W Φ g, (p,).

        Arguments:
            movable: if not all parameters can move.
        """
        inverse = self._gram_inverse if movable is None else movable.inverse
        for _ in range(self.passes if movable is None else movable.passes):
            if movable is not None:
                g = g * movable.mask
            along = float64(self.phi @ g)
            along = along if self.weights is None else self.weights @ along
            c = inverse @ along
            c = c if self.weights is None else c @ self.weights
            g = g - self.phi.combine(c.unsqueeze(0).to(g))[0]
        return g if movable is None else g * movable.mask

    def restricted(self, columns: Sequence[slice]) -> Movable:
        """The argument of `project_out` when only the parameters in these columns can move."""
        mask = torch.zeros(self.phi.shape[1], dtype=torch.bool, device=self.phi.like.device)
        for some in columns:
            mask[some] = True
        names = [name for name, own in self.phi.columns() if own in columns]
        gram = _weighted(self.phi.gram_over(names), self.weights, self.weights)
        # A short direction constrains as much as a long one.
        scale = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        unit = scale.unsqueeze(1) * gram * scale
        inverse = torch.linalg.pinv(unit, rtol=1e-10, hermitian=True)
        return Movable(mask, scale.unsqueeze(1) * inverse * scale)

    def with_samples(self, phi: TangentFeatures) -> Self:
        """These directions and the features of more samples."""
        gram = phi.gram()
        total = float(gram.trace())
        refuse_infinite(total)
        kept, factor, inside = self._grown(gram, phi.cross_gram(self.phi), None)
        moments = self._moments(inside, total)
        if self.weights is None:
            return replace(
                self, phi=concatenated(self.phi, stored(phi, kept)), factor=factor, moments=moments
            )
        some = torch.eye(len(phi)).to(factor)[kept]
        weights = torch.block_diag(self.weights, some)
        return type(self)(concatenated(self.phi, phi), weights, factor, moments)

    def with_combinations(
        self, phi: TangentFeatures, values: Tensor, weights: Tensor, total: float
    ) -> Self:
        """These directions and principal ones: the unit rows of W' Φ', with singular values.

        Arguments:
            total: Σ_i ‖φ_i‖² of the samples whose directions they are.
        """
        gram = _weighted(phi.gram(), weights, weights)
        kept, factor, inside = self._grown(gram, phi.cross_gram(self.phi), weights)
        moments = self._moments(values.unsqueeze(1) * inside, total)
        mine = torch.eye(self.rank).to(factor) if self.weights is None else self.weights
        both = torch.block_diag(mine, weights[kept])
        return type(self)(concatenated(self.phi, phi), both, factor, moments)

    def _grown(
        self, gram: Tensor, cross: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which of k more directions are new, the extended L, and all k in the extended basis V.

        With the old directions' Gram matrix L Lᵀ, the cross-Gram matrix C and the new Gram matrix
        G, the factor grows by C L⁻ᵀ and by the Cholesky factor of the Schur complement
        G − C L⁻ᵀ L⁻¹ Cᵀ.

        Arguments:
            gram: G, (k, k).
            cross: features of the new samples times those of the old ones, (n', n).
            weights: (k, n'), of the new samples.
        """
        cross = _weighted(cross, weights, self.weights)  # C
        reach = solve_triangular(self.factor, cross.T, upper=False).T  # C L⁻ᵀ
        rest = gram - reach @ reach.T
        kept = self._sturdy(independent(rest, gram.diagonal()), rest, reach, gram.diagonal())
        new = cholesky(rest[kept][:, kept])
        beyond = solve_triangular(new, rest[kept], upper=False).T
        return kept, self._extended(reach[kept], new), torch.cat([reach, beyond], 1)

    def _sturdy(self, kept: Tensor, rest: Tensor, reach: Tensor, lengths: Tensor) -> Tensor:
        """The directions with which all together stay well-conditioned.

        Each may have enough outside those before it and yet nearly be a sum of the others.
        Coefficients, and with them rounding, grow as the square root of ‖Ĝ⁻¹‖, Ĝ the Gram matrix of
        all directions at length one.

        Arguments:
            kept: indices of new directions, increasing.
            rest: the Schur complement, (k, k).
            reach: C L⁻ᵀ, (k, K).
            lengths: squared lengths of the new ones, (k,).
        """
        old = self.factor.square().sum(1)
        most = _STEEPEST
        while len(kept):
            new = cholesky(rest[kept][:, kept])
            if bool((new.diagonal().square() > _WELL_CONDITIONED * lengths[kept]).all()):
                break  # nearly always
            factor = self._extended(reach[kept], new)
            size, direction = inverse_norm(factor, torch.cat([old, lengths[kept]]))
            if size > most and self.rank:  # unless the old ones alone have it
                most = max(most, 1.05 * inverse_norm(self.factor, old)[0])
            if size <= most:
                break
            worst = int(direction[self.rank :].abs().argmax())
            kept = torch.cat([kept[:worst], kept[worst + 1 :]])
        return kept

    def _extended(self, reach: Tensor, new: Tensor) -> Tensor:
        """The extended L from its blocks L, C L⁻ᵀ (k, K) and the new directions' own (k, k)."""
        old = self.rank
        factor = new.new_zeros(old + len(new), old + len(new))
        factor[:old, :old] = self.factor
        factor[old:, :old] = reach
        factor[old:, old:] = new
        return factor

    def _moments(self, inside: Tensor, total: float) -> Tensor:
        """The moments with one more task, of directions (k, K) in the basis V and its variance."""
        moments = inside.T @ inside / max(total, TINY)
        moments[: self.rank, : self.rank] += self.moments
        return moments

    def limited(self, limit: int) -> Self:
        """At most `limit` directions, those that explain most of all tasks' features."""
        if self.rank <= limit:
            return self
        if self.weights is not None:
            values, vectors = torch.linalg.eigh(self.moments)
            values, vectors = values.flip(0)[:limit], vectors.flip(1)[:, :limit]
            mixed = (
                vectors.T @ solve_triangular(self.factor, self.weights, upper=False)
            ).contiguous()
            return replace(
                self, weights=mixed, factor=torch.eye(limit).to(mixed), moments=values.diag()
            )
        kept = best_rows(self.factor, self.moments, limit)
        some = self.factor[kept]  # the samples in the basis V
        factor = cholesky(some @ some.T).contiguous()  # rounds as after a file
        turned = solve_triangular(factor, some, upper=False)  # V' Vᵀ
        moments = (turned @ self.moments @ turned.T).contiguous()
        return type(self)(stored(self.phi, kept), None, factor, moments)


def _weighted(gram: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The Gram matrix W K W'ᵀ; None is the identity."""
    gram = gram if left is None else left @ gram
    return gram if right is None else gram @ right.T


def independent(rest: Tensor, lengths: Tensor) -> Tensor:
    """The indices of directions that add more than rounding, by Cholesky with pivots.

    Arguments:
        rest: (k, k), the Gram matrix less the part that earlier directions explain.
        lengths: (k,), the squared lengths before that.
    """
    if len(rest) == 0:
        return torch.arange(0)
    scale = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).rsqrt()
    unit = scale.unsqueeze(1) * rest * scale
    factor, order, rank, _ = dpstrf(unit.cpu().numpy(), tol=0.0, lower=1)
    left = np.square(np.diag(factor))
    left[rank:] = 0.0
    chosen = order[left > _SQUARED_RESIDUAL].astype(np.int64) - 1
    return torch.from_numpy(np.sort(chosen))


def inverse_norm(factor: Tensor, lengths: Tensor) -> tuple[float, Tensor]:
    """‖Ĝ⁻¹‖ of Ĝ = D⁻¹ L Lᵀ D⁻¹, and the unit vector (K,) that attains it.

    By the power method, to a few percent: a bound from the trace would be too high if many
    directions are slightly dependent.

    Arguments:
        factor: L, (K, K), lower triangular.
        lengths: the squares of D, (K,).
    """
    scale = lengths.sqrt().unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64).to(factor)
    for _ in range(_POWERS):
        vector = vector / vector.norm()
        half = solve_triangular(factor, scale * vector, upper=False)
        vector = scale * solve_triangular(factor.mT, half, upper=True)
    size = vector.norm()
    return float(size), (vector / size)[:, 0]


def best_rows(vectors: Tensor, moments: Tensor, limit: int) -> Tensor:
    """The rows whose span explains most: greedily the row r with the largest gain r M rᵀ / ‖r‖².

    Arguments:
        vectors: (n, K).
        moments: M, (K, K): what is to be explained is tr M.

    Returns:
        indices, increasing; at most `limit`.
    """
    rest, m = vectors.cpu().numpy().copy(), moments.cpu().numpy()
    seen = rest @ m
    lengths = np.square(rest).sum(1)
    least = _SQUARED_RESIDUAL * lengths
    chosen: list[int] = []
    while len(chosen) < limit:
        left = np.square(rest).sum(1)
        gains = np.where(left > least, (seen * rest).sum(1) / np.maximum(left, TINY), -1.0)
        gains[chosen] = -1.0
        best = int(gains.argmax())
        if gains[best] < 0:
            break
        chosen.append(best)
        direction = rest[best] / np.sqrt(left[best])
        along = rest @ direction
        rest -= np.outer(along, direction)
        seen -= np.outer(along, direction @ m)
    return torch.from_numpy(np.sort(np.array(chosen, dtype=np.int64)))


@final
@dataclass(frozen=True)
class FactoredSubspace(Subspace):
    """The span of remembered samples' features for each of S seeds.

    A sample of a linear layer takes n_in + n_out numbers instead of n_in · n_out, and a projection
    a few small matrix products; nothing is approximated.

    Arguments:
        atoms: of each seed; none before the first task.
        record: what each task added.
        storage: how the directions are stored.
        movable: for each seed the parameters that can move, if not all can.
    """

    atoms: tuple[Atoms, ...]
    record: Record
    storage: Storage = FACTORED
    _square_bytes: ClassVar[int] = SQUARE_BYTES["factored"]
    movable: tuple[Movable, ...] | None = None

    @classmethod
    def empty(cls, theta: Tensor, storage: Storage = FACTORED) -> Self:
        """No directions yet, for weights theta (S, p)."""
        return cls((), Record.empty(len(theta)), storage)

    @property
    def rank(self) -> int:
        return max((atoms.rank for atoms in self.atoms), default=0)

    @property
    def nbytes(self) -> int:
        return sum(stored_bytes(atoms.phi) + atoms.small_bytes for atoms in self.atoms)

    def bytes_by_parameter(self, columns: Mapping[str, slice]) -> dict[str, int]:
        return bytes_by_parameter(self.atoms[0].phi) if self.atoms else {}

    def explained(self) -> Tensor:
        return torch.stack([atoms.moments.trace() for atoms in self.atoms])

    def bases(self) -> Iterator[Tensor]:
        # The rows of all seeds may not fit into memory.
        return (atoms.basis() for atoms in self.atoms)

    def project_out(self, g: Tensor) -> Tensor:
        if not self.atoms:
            return g
        movable = self.movable or (None,) * len(self.atoms)
        problems = zip(self.atoms, g, movable, strict=True)
        works = [partial(atoms.project_out, *of) for atoms, *of in problems]
        return torch.stack(run_concurrently(works, g.device))

    def restricted(self, columns: Sequence[slice]) -> Self:
        movable = tuple(atoms.restricted(columns) for atoms in self.atoms)
        return replace(self, movable=movable or None)

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        atoms = tuple(replace(one, phi=grown(one.phi, growth)) for one in self.atoms)
        return replace(self, atoms=atoms, movable=None)

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        before = self.atoms or tuple(map(Atoms.none, features))
        grown = [old.with_samples(stored(phi)) for old, phi in zip(before, features, strict=True)]
        return self._extended(grown, [1.0] * len(features))

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        grown, shares = [], []
        before = self.atoms or tuple(map(Atoms.none, features))
        for old, phi in zip(before, map(stored, features), strict=True):
            values, weights, total = phi.top_weights(components, centred=centred)
            grown.append(old.with_combinations(phi, values, weights, total))
            shares.append(float(values.square().sum()) / max(total, TINY))
        return self._extended(grown, shares)

    def _extended(self, grown: Sequence[Atoms], shares: Sequence[float]) -> Self:
        before = [atoms.rank for atoms in self.atoms] or [0] * len(grown)
        new = [atoms.rank - rank for atoms, rank in zip(grown, before, strict=True)]
        record = self.record.with_task(new, shares)
        with_task = replace(self, atoms=tuple(grown), record=record, movable=None)
        limit = self.storage.max_rank
        return with_task if limit is None else with_task.limited(limit)

    def limited(self, limit: int) -> Self:
        """Samples are chosen greedily; sums of samples are mixed anew, and all samples stay."""
        return replace(self, atoms=tuple(atoms.limited(limit) for atoms in self.atoms))

    def moved_to(self, storage: Storage, theta: Tensor) -> Subspace:
        if storage.kind == "dense":
            return self.dense().moved_to(storage, theta)
        limit, there = storage.max_rank, replace(self, storage=storage)
        return there if limit is None else there.limited(limit)

    def compressed(self, budget: int) -> tuple[Subspace, tuple[str, ...]]:
        """Principal directions become rows, for fewer of them would need as many samples."""
        if all(atoms.weights is None for atoms in self.atoms):
            return self, ()
        rows = self.dense()
        smaller, how = (rows, ()) if rows.nbytes <= budget else rows.compressed(budget)
        return smaller, ("factored samples made rows", *how)

    def dense(self) -> DenseSubspace:
        """The same directions as rows."""
        rank = self.rank
        rows, moments = [], []
        for atoms in self.atoms:
            basis, missing = atoms.basis(), rank - atoms.rank
            rows.append(torch.nn.functional.pad(basis, (0, 0, 0, missing)))
            moments.append(torch.nn.functional.pad(atoms.moments, (0, missing, 0, missing)))
        storage = replace(DENSE, max_rank=self.storage.max_rank)
        return DenseSubspace(torch.stack(rows), torch.stack(moments), self.record, storage)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        kept = self.record.tensors(seed)
        if not self.atoms:
            return kept
        atoms = self.atoms[seed]
        kept |= {"factor": atoms.factor, "moments": atoms.moments}
        if atoms.weights is not None:
            kept["weights"] = atoms.weights
        return kept | {f"features.{name}": t for name, t in to_tensors(atoms.phi).items()}

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        record = Record.restore(of_seeds)
        atoms = []
        exact = float64(theta)
        for tensors in of_seeds if record.tasks else ():
            named = {
                n.removeprefix("features."): t
                for n, t in tensors.items()
                if n.startswith("features.")
            }
            phi = from_tensors(named, theta)
            weights = tensors["weights"].to(exact) if "weights" in tensors else None
            small = (tensors[name].to(exact) for name in ("factor", "moments"))
            atoms.append(Atoms(phi, weights, next(small), next(small)))
        return cls(tuple(atoms), record, storage)
