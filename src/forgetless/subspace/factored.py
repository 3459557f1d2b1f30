"""Remembered samples as factors: their span without a single row of p numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from forgetless.linalg import float64
from forgetless.subspace.atoms import Atoms, Movable
from forgetless.subspace.base import Outers, Record
from forgetless.subspace.dense import DenseSubspace
from forgetless.subspace.storage import DENSE, FACTORED, Storage
from forgetless.support.cuda_graphs import side_by_side
from forgetless.tangent import TangentFeatures, from_tensors, stored, stored_bytes, to_tensors


@final
@dataclass(frozen=True)
class FactoredSubspace:
    """The span of remembered samples' features for each of S seeds.

    A sample of a linear layer costs n_in + n_out numbers instead of n_in · n_out, and a projection
    a few small matrix products; nothing is approximated.

    Arguments:
        atoms: of each seed; none before the first task.
        record: what was remembered of each task.
        storage: how directions are kept.
        movable: if not all parameters can move, for each seed their mask (p,) and the
            pseudo-inverse (K, K) of the Gram matrix over them.
        columns: the columns of those that can.
    """

    atoms: tuple[Atoms, ...]
    record: Record
    storage: Storage = FACTORED
    movable: tuple[Movable, ...] | None = None
    columns: tuple[slice, ...] | None = None

    @classmethod
    def empty(cls, theta: Tensor, storage: Storage = FACTORED) -> Self:
        """Nothing yet, for weights theta (S, p)."""
        return cls((), Record.empty(len(theta)), storage)

    @property
    def rank(self) -> int:
        """K, the largest of all seeds."""
        return max((atoms.rank for atoms in self.atoms), default=0)

    @property
    def has_combinations(self) -> bool:
        """Whether directions are weighted sums of samples, so that fewer need as many samples."""
        return any(atoms.weights is not None for atoms in self.atoms)

    @property
    def nbytes(self) -> int:
        """Of the samples' factors, and of the small matrices that go with them."""
        return sum(stored_bytes(atoms.phi) + atoms.small_bytes for atoms in self.atoms)

    def project_out(self, g: Tensor, outers: Outers | None = None) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p).

        Arguments:
            g: a step or a gradient.
            outers: what is known of a gradient, which then takes less time.
        """
        if not self.atoms:
            return g if self.columns is None else _only(g, self.columns)
        movable = self.movable or (None,) * len(self.atoms)
        known = [
            outers and {start: (left[s], right[s]) for start, (left, right) in outers.items()}
            for s in range(len(g))
        ]
        problems = zip(self.atoms, g, movable, known, strict=True)
        works = [partial(atoms.project_out, *of) for atoms, *of in problems]
        return torch.stack(side_by_side(works, g.device))

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The same subspace where only the parameters in these columns can move."""
        movable = tuple(atoms.restricted(columns) for atoms in self.atoms)
        return replace(self, movable=movable or None, columns=tuple(columns))

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        """With the features of all samples, one operator a seed."""
        before = self.atoms or tuple(map(Atoms.none, features))
        grown = [old.with_samples(stored(phi)) for old, phi in zip(before, features, strict=True)]
        return self._extended(grown, [1.0] * len(features))

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        """With the samples' top directions, one operator a seed."""
        grown, shares = [], []
        before = self.atoms or tuple(map(Atoms.none, features))
        for old, phi in zip(before, map(stored, features), strict=True):
            values, weights, total = phi.top_weights(components, centred=centred)
            grown.append(old.with_combinations(phi, values, weights, total))
            shares.append(float(values.square().sum()) / max(total, 1e-300))
        return self._extended(grown, shares)

    def _extended(self, grown: Sequence[Atoms], shares: Sequence[float]) -> Self:
        before = [atoms.rank for atoms in self.atoms] or [0] * len(grown)
        new = [atoms.rank - rank for atoms, rank in zip(grown, before, strict=True)]
        record = self.record.with_task(new, shares)
        with_task = replace(self, atoms=tuple(grown), record=record, movable=None)
        limit = self.storage.max_rank
        kept = with_task if limit is None else with_task.limited(limit)
        return kept if self.columns is None else kept.restricted(self.columns)

    def limited(self, limit: int) -> Self:
        """No more than `limit` directions: those that explain most of all tasks' features.

        Samples are chosen greedily. Sums of samples are mixed anew, and all samples stay.
        """
        return replace(self, atoms=tuple(atoms.limited(limit) for atoms in self.atoms))

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

    def kept_share(self) -> float:
        """Of the variance of all tasks' features, the share that the directions explain."""
        if not self.atoms:
            return 0.0
        traces = [float(atoms.moments.trace()) for atoms in self.atoms]
        return sum(traces) / len(traces) / self.record.tasks

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""
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
        """From what `tensors` gave for each seed."""
        record = Record.restore(of_seeds)
        atoms = []
        exact = float64(theta)
        for tensors in of_seeds if record.tasks else ():
            named = {n[9:]: t for n, t in tensors.items() if n.startswith("features.")}
            phi = from_tensors(named, theta)
            weights = tensors["weights"].to(exact) if "weights" in tensors else None
            small = (tensors[name].to(exact) for name in ("factor", "moments"))
            atoms.append(Atoms(phi, weights, next(small), next(small)))
        return cls(tuple(atoms), record, storage)


def _only(g: Tensor, columns: Sequence[slice]) -> Tensor:
    """G in these columns, zero elsewhere."""
    kept = torch.zeros_like(g)
    for some in columns:
        kept[:, some] = g[:, some]
    return kept
