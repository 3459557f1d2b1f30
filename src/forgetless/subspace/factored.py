"""Directions as factored samples: their span without a single row of p numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import TINY, float64
from forgetless.subspace.atoms import Atoms
from forgetless.subspace.base import Record, Subspace
from forgetless.subspace.dense import DenseSubspace
from forgetless.subspace.movable import Movable
from forgetless.subspace.storage import DENSE, FACTORED, SQUARE_BYTES, Storage
from forgetless.support.cuda_graphs import run_concurrently
from forgetless.support.layout import Growth
from forgetless.tangent import (
    TangentFeatures,
    bytes_by_parameter,
    from_tensors,
    grown,
    stored,
    stored_bytes,
    to_tensors,
)


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
