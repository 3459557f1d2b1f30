"""Remembered samples as factors: their span without a single row of p numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor
from torch.linalg import cholesky, solve_triangular

from forgetless.errors import ConfigError
from forgetless.linalg import float64
from forgetless.subspace.base import Record
from forgetless.subspace.storage import FACTORED, Storage
from forgetless.tangent import TangentFeatures, from_tensors, held, held_bytes, joined, to_tensors

# What is left of a sample's squared length when it is dropped as dependent on the others.
_DEPENDENT = 1e-8


@final
@dataclass(frozen=True)
class Atoms:
    """One seed's directions W Φ, and the Cholesky factor L of their Gram matrix W Φ Φᵀ Wᵀ.

    Arguments:
        phi: the remembered samples' features Φ, (n, p), held as factors.
        weights: W, (K, n) in float64; None for the samples themselves.
        factor: L, (K, K) in float64, lower triangular.
    """

    phi: TangentFeatures
    weights: Tensor | None
    factor: Tensor

    def project_out(self, g: Tensor, movable: "_Movable | None") -> Tensor:
        """G − (W Φ)ᵀ (W Φ Φᵀ Wᵀ)⁻¹ W Φ g, (p,)."""
        mask, inverse = movable if movable is not None else (None, None)
        for _ in range(2):  # what rounding leaves of an ill-conditioned first time is taken out
            if mask is not None:
                g = g * mask.to(g.device)
            along = float64(self.phi @ g)
            along = along if self.weights is None else self.weights @ along
            if inverse is not None:
                c = inverse.to(along) @ along
            else:
                c = torch.cholesky_solve(along.unsqueeze(1), self.factor)[:, 0]
            c = c if self.weights is None else c @ self.weights
            g = g - self.phi.combine(c.unsqueeze(0).to(g))[0]
        return g if mask is None else g * mask.to(g.device)

    def extended(self, phi: TangentFeatures, weights: Tensor | None) -> tuple[Self, int]:
        """With more directions, and how many of them were new.

        Only the blocks that belong to the new ones are computed: with old directions' Gram
        matrix L Lᵀ, cross-Gram C and new Gram matrix G, the factor grows by C L⁻ᵀ and by the
        Cholesky factor of the Schur complement G − C L⁻ᵀ L⁻¹ Cᵀ.
        """
        gram = _weighted(phi.gram(), weights, weights)
        cross = _weighted(phi.cross_gram(self.phi), weights, self.weights)  # (k, K)
        reach = solve_triangular(self.factor, cross.T, upper=False).T  # C L⁻ᵀ
        kept = _independent(gram - reach @ reach.T, gram.diagonal())
        reach, rest = reach[kept], (gram - reach @ reach.T)[kept][:, kept]
        old, new = len(self.factor), len(kept)
        factor = self.factor.new_zeros(old + new, old + new)
        factor[:old, :old] = self.factor
        factor[old:, :old] = reach
        factor[old:, old:] = cholesky(rest)
        if weights is None and self.weights is None:
            return type(self)(joined(self.phi, held(phi, kept)), None, factor), new
        mine = torch.eye(old).to(factor) if self.weights is None else self.weights
        theirs = torch.eye(len(phi)).to(factor) if weights is None else weights
        both = torch.block_diag(mine, theirs[kept])
        return type(self)(joined(self.phi, held(phi)), both, factor), new

    def chosen(self, limit: int) -> tuple[Self, float]:
        """At most `limit` of the samples, and the share of all samples' variance they explain."""
        gram = self.factor @ self.factor.T
        lengths = gram.diagonal()
        order, _ = _pivots(gram / (lengths.sqrt().unsqueeze(1) * lengths.sqrt()))
        kept = order[:limit].sort()[0]
        factor = cholesky(gram[kept][:, kept])
        inside = solve_triangular(factor, gram[kept], upper=False)
        share = float((inside.square().sum(0) / lengths).mean())
        return type(self)(held(self.phi, kept), None, factor), share


_Movable = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class FactoredSubspace:
    """The span of remembered samples' features for each of S seeds.

    A sample of a linear layer costs n_in + n_out numbers instead of n_in · n_out, and a projection
    a few small matrix products; nothing is approximated.

    Arguments:
        atoms: of each seed.
        record: what was remembered of each task.
        share: of the variance of all samples ever remembered, what those that were kept explain.
        storage: how directions are kept.
        movable: if not all parameters can move, for each seed their mask (p,) and the
            pseudo-inverse (K, K) of the Gram matrix over them.
    """

    atoms: tuple[Atoms, ...]
    record: Record
    share: float = 1.0
    storage: Storage = FACTORED
    movable: tuple[_Movable, ...] | None = None

    @classmethod
    def empty(cls, theta: Tensor, storage: Storage = FACTORED) -> Self:
        """Nothing yet, for weights theta (S, p)."""
        return cls((), Record.empty(len(theta)), storage=storage)

    @property
    def rank(self) -> int:
        """K, the largest of all seeds."""
        return max((len(atoms.factor) for atoms in self.atoms), default=0)

    @property
    def nbytes(self) -> int:
        """Of the samples' factors, and of the small matrices that go with them."""
        small = (t for a in self.atoms for t in (a.factor, a.weights) if t is not None)
        return sum(held_bytes(a.phi) for a in self.atoms) + sum(t.nbytes for t in small)

    def project_out(self, g: Tensor) -> Tensor:
        """G without its part in the subspace: (S, p) → (S, p)."""
        if not self.atoms:
            return g
        movable = self.movable or (None,) * len(self.atoms)
        problems = zip(self.atoms, g, movable, strict=True)
        return torch.stack([atoms.project_out(one, free) for atoms, one, free in problems])

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The same subspace where only the parameters in these columns can move."""
        movable = []
        for atoms in self.atoms:
            mask = torch.zeros(atoms.phi.shape[1], dtype=torch.bool, device=atoms.phi.like.device)
            for some in columns:
                mask[some] = True
            names = [name for name, its in atoms.phi.columns() if its in columns]
            gram = _weighted(atoms.phi.gram_over(names), atoms.weights, atoms.weights)
            movable.append((mask, torch.linalg.pinv(gram, rtol=1e-10, hermitian=True)))
        return replace(self, movable=tuple(movable) or None)

    def add_samples(self, features: Sequence[TangentFeatures]) -> Self:
        """With the features of all samples, one operator a seed."""
        return self._extended([(phi, None) for phi in features], [1.0] * len(features))

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        """With the samples' top directions, one operator a seed."""
        new, shares = [], []
        for phi in features:
            values, weights, total = phi.top_weights(components, centred=centred)
            new.append((phi, weights))
            shares.append(float(values.square().sum()) / max(total, 1e-300))
        return self._extended(new, shares)

    def _extended(
        self, new: Sequence[tuple[TangentFeatures, Tensor | None]], shares: Sequence[float]
    ) -> Self:
        atoms, ranks = [], []
        before = self.atoms or tuple(_nothing(phi) for phi, _ in new)
        for old, (phi, weights) in zip(before, new, strict=True):
            grown, rank = old.extended(held(phi), weights)
            ranks.append(rank)
            atoms.append(grown)
        record = self.record.with_task(ranks, shares)
        all_of_them = replace(self, atoms=tuple(atoms), record=record)
        limit = self.storage.max_rank
        return all_of_them if limit is None else all_of_them.limited(limit)

    def limited(self, limit: int) -> Self:
        """No more than `limit` samples: those that explain the others best."""
        if self.rank <= limit:
            return self
        if any(atoms.weights is not None for atoms in self.atoms):
            raise ConfigError(
                "principal directions cannot be made fewer in factored storage: all samples that "
                "they were made from would stay; use dense storage"
            )
        chosen = [atoms.chosen(limit) for atoms in self.atoms]
        share = self.share * sum(share for _, share in chosen) / len(chosen)
        return replace(self, atoms=tuple(atoms for atoms, _ in chosen), share=share)

    def kept_share(self) -> float:
        """Of the variance of all tasks' features, the share that the directions explain."""
        return self.share * float(self.record.shares.mean()) if self.record.tasks else 0.0

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """What is kept of a seed."""
        kept = self.record.tensors(seed) | {"share": torch.tensor(self.share).double()}
        if not self.atoms:
            return kept
        atoms = self.atoms[seed]
        kept["factor"] = atoms.factor
        if atoms.weights is not None:
            kept["weights"] = atoms.weights
        return kept | {f"features.{name}": t for name, t in to_tensors(atoms.phi).items()}

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        """From what `tensors` gave for each seed."""
        atoms = []
        exact = float64(theta)
        for tensors in of_seeds:
            if "factor" not in tensors:
                continue
            named = {n[9:]: t for n, t in tensors.items() if n.startswith("features.")}
            phi = from_tensors(named, theta)
            weights = tensors["weights"].to(exact) if "weights" in tensors else None
            atoms.append(Atoms(phi, weights, tensors["factor"].to(exact)))
        share = float(of_seeds[0]["share"])
        return cls(tuple(atoms), Record.restore(of_seeds), share, storage)


def _nothing(phi: TangentFeatures) -> Atoms:
    none = held(phi, torch.arange(0))
    return Atoms(none, None, float64(phi.like).new_zeros(0, 0))


def _weighted(gram: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Gram matrix W K W'ᵀ, None for the identity."""
    gram = gram if left is None else left @ gram
    return gram if right is None else gram @ right.T


def _independent(rest: Tensor, lengths: Tensor) -> Tensor:
    """Indices of the vectors that add more than rounding, from what is left of their Gram matrix.

    Arguments:
        rest: (k, k), the Gram matrix without the part that earlier directions explain.
        lengths: (k,), the squared lengths with it.
    """
    scale = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).sqrt()
    order, left = _pivots(rest / (scale.unsqueeze(1) * scale))
    return order[left > _DEPENDENT].sort()[0]


def _pivots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Pivoted Cholesky: the order in which vectors are least explained, and what is left of each.

    Greedy: the next vector is always the one of which the earlier ones explain least.
    """
    n = len(gram)
    if n == 0:
        return torch.arange(0), gram.new_zeros(0).cpu()
    factor, order, rank, _ = dpstrf(gram.cpu().numpy(), tol=0.0, lower=1)
    left = np.square(np.diag(factor))
    left[rank:] = 0.0
    return torch.from_numpy(order.astype(np.int64) - 1), torch.from_numpy(left)
