"""Directions that are samples' features, or weighted sums of them, and their Gram matrix."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, final

import torch
from torch import Tensor
from torch.linalg import cholesky, solve_triangular

from forgetless.linalg import float64
from forgetless.subspace.base import Outers, refuse_infinite
from forgetless.subspace.selection import best_rows, independent, inverse_norm
from forgetless.tangent import TangentFeatures, concatenated, empty_features, stored
from forgetless.tangent.blocks import Outer

# Least share of a direction's squared length outside of the earlier ones for which rounding in
# one pass leaves no more than in two.
_WELL_CONDITIONED = 1e-3
# ‖Ĝ⁻¹‖, see `_sturdy`, up to which directions are kept, and from which one more pass is needed.
_STEEPEST = 1e11
_STEEP = (1e7, 1e9)
# Mask (p,) of the parameters that can move, pseudo-inverse (K, K) of the Gram matrix over them.
Movable = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Atoms:
    """One seed's K directions W Φ with W Φ Φᵀ Wᵀ = L Lᵀ: their orthonormal basis is V = L⁻¹ W Φ.

    Arguments:
        phi: the remembered samples' features Φ, (n, p), held as factors.
        weights: W, (K, n) in float64; None for the samples themselves.
        factor: L, (K, K) in float64, lower triangular.
        moments: Σ over tasks of V Φᵀ Φ Vᵀ / tr Φ Φᵀ, (K, K) in float64: how much of the tasks'
            features lies in which direction.
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
        """Of L, (L Lᵀ)⁻¹, moments and weights."""
        weights = 0 if self.weights is None else self.weights.nbytes
        return 2 * self.factor.nbytes + self.moments.nbytes + weights

    @cached_property
    def _gram_inverse(self) -> Tensor:
        """(L Lᵀ)⁻¹, (K, K): solving with L at every step would read it twice, and copy it."""
        return torch.cholesky_inverse(self.factor)

    @cached_property
    def passes(self) -> int:
        """How often a projection is done: an ill-conditioned one leaves rounding to take out."""
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

    def project_out(
        self, g: Tensor, movable: Movable | None = None, outers: Outers | None = None
    ) -> Tensor:
        """G − (W Φ)ᵀ (W Φ Φᵀ Wᵀ)⁻¹ W Φ g, (p,).

        Arguments:
            movable: if not all parameters can move.
            outers: what is known of g, of this seed alone: L (b, r) and R (b, c).
        """
        mask, inverse = movable if movable is not None else (None, None)
        for number in range(self.passes if movable is None else 2):
            if mask is not None:
                g = g * mask
            known = outers if mask is None and number == 0 else None
            along = float64(self.phi @ g if known is None else self._along(g, known))
            along = along if self.weights is None else self.weights @ along
            c = (self._gram_inverse if inverse is None else inverse) @ along
            c = c if self.weights is None else c @ self.weights
            g = g - self.phi.combine(c.unsqueeze(0).to(g))[0]
        return g if mask is None else g * mask

    def _along(self, g: Tensor, outers: Outers) -> Tensor:
        """Φ g, (n,), of some matrices by their factors where that takes less."""
        out = g.new_zeros(len(self.phi), 1)
        for piece in self.phi.pieces():
            for name, columns in self.phi.columns():
                block, factors = piece.blocks[name], outers.get(columns.start)
                part = None
                if factors is not None and isinstance(block, Outer):
                    part = block.apply_outer(*factors)
                out[piece.rows] += block.apply(g[columns, None]) if part is None else part
        return out[:, 0]

    def restricted(self, columns: Sequence[slice]) -> Movable:
        """What `project_out` needs where only the parameters in these columns can move."""
        mask = torch.zeros(self.phi.shape[1], dtype=torch.bool, device=self.phi.like.device)
        for some in columns:
            mask[some] = True
        names = [name for name, its in self.phi.columns() if its in columns]
        gram = _weighted(self.phi.gram_over(names), self.weights, self.weights)
        # A short direction constrains as much as a long one.
        scale = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        unit = scale.unsqueeze(1) * gram * scale
        inverse = torch.linalg.pinv(unit, rtol=1e-10, hermitian=True)
        return mask, scale.unsqueeze(1) * inverse * scale

    def with_samples(self, phi: TangentFeatures) -> Self:
        """With the features of more samples."""
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
        """With principal directions: the rows of W' Φ', of lengths one and those singular values.

        Arguments:
            total: Σ_i ‖φ_i‖² of the samples that they are directions of.
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
        """Which of k more directions are new, the larger L, and all k in the larger basis V.

        Only the blocks that belong to the new ones are computed: with old directions' Gram
        matrix L Lᵀ, cross-Gram C and new Gram matrix G, the factor grows by C L⁻ᵀ and by the
        Cholesky factor of the Schur complement G − C L⁻ᵀ L⁻¹ Cᵀ.

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
        """Those of the directions to be kept with which all together stay well-conditioned.

        Each may have enough outside of those before it and all the same be as good as a sum of the
        others. Coefficients, and with them rounding, grow as the square root of ‖Ĝ⁻¹‖, Ĝ the Gram
        matrix of all directions at length one.

        Arguments:
            kept: indices of new directions, increasing.
            rest: what earlier directions leave of the new ones' Gram matrix, (k, k).
            reach: C L⁻ᵀ, (k, K).
            lengths: squared, of the new ones, (k,).
        """
        old = self.factor.square().sum(1)
        most = _STEEPEST
        while len(kept):
            new = cholesky(rest[kept][:, kept])
            if bool((new.diagonal().square() > _WELL_CONDITIONED * lengths[kept]).all()):
                break  # as nearly always
            factor = self._extended(reach[kept], new)
            size, direction = inverse_norm(factor, torch.cat([old, lengths[kept]]))
            if size > most and self.rank:  # not that of the old ones alone, as far as one can tell
                most = max(most, 1.05 * inverse_norm(self.factor, old)[0])
            if size <= most:
                break
            worst = int(direction[self.rank :].abs().argmax())
            kept = torch.cat([kept[:worst], kept[worst + 1 :]])
        return kept

    def _extended(self, reach: Tensor, new: Tensor) -> Tensor:
        """The larger L, of the blocks L, C L⁻ᵀ (k, K) and the new directions' own (k, k)."""
        old = self.rank
        factor = new.new_zeros(old + len(new), old + len(new))
        factor[:old, :old] = self.factor
        factor[old:, :old] = reach
        factor[old:, old:] = new
        return factor

    def _moments(self, inside: Tensor, total: float) -> Tensor:
        """With one more task, its directions (k, K) in the basis V, its variance `total`."""
        moments = inside.T @ inside / max(total, 1e-300)
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
    """Gram matrix W K W'ᵀ, None for the identity."""
    gram = gram if left is None else left @ gram
    return gram if right is None else gram @ right.T
