"""Directions chosen among the coordinates of each layer's Kronecker eigenbasis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import TINY, Growth, Layout, float64
from forgetless.subspace.base import Directions, Record, require_no_rows, stored_layout
from forgetless.subspace.eigenbasis import (
    Axis,
    Eigenbasis,
    Frame,
    as_leading,
    summed_coordinates,
)
from forgetless.subspace.storage import Storage
from forgetless.support.files import json_tensor, json_value
from forgetless.support.validation import ConfigError, format_bytes
from forgetless.tangent import Moments

_SIDES = ("outputs", "inputs")  # of a layer
_NAMES = "names"  # the entry with the names of parameters
# The threshold is found among energies down to this share of the largest, in so many halvings.
_RANGE, _HALVINGS = 1e-24, 40
_TIES = 1e-5  # energies that differ by less are equal up to rounding
# Shares of the energy: the least and the most that `holding` protects, and that without a movement.
_SHARES, _USUAL = (0.95, 0.999), 0.97


@final
@dataclass(frozen=True)
class KroneckerSubspace(Directions):
    """The strongest coordinates u_i v_jᵀ of each layer's steps, for each of S seeds.

    K-FAC's moments of a weight's gradients, G ⊗ A, have the eigenvectors u_i ⊗ v_j with energies
    γ_i α_j. Protected are those with an energy of at least a threshold, one for all layers:

        ΔW ← ΔW − U [(Uᵀ ΔW V) ∘ M] Vᵀ,    M_ij = [γ_i α_j ≥ threshold]

    Parameters without such a product are protected number by number.

    Arguments:
        layout: the protected parameters.
        basis: the eigenvectors and energies, of all tasks together.
        threshold: the least energy that is protected, (S,).
        record: what each task added.
        storage: its `max_rank` limits the coordinates.
        start: the weights at which the present task began, (S, p); None if they do not matter.
    """

    layout: Layout
    basis: Eigenbasis
    threshold: Tensor
    record: Record
    storage: Storage = field(default_factory=Storage)
    start: Tensor | None = None
    over_ranks: ClassVar[bool] = True

    @classmethod
    def empty(cls, layout: Layout, theta: Tensor, storage: Storage) -> Self:
        """Nothing protected yet."""
        require_no_rows(storage, "a Kronecker eigenbasis")
        nothing = theta.new_full((len(theta),), torch.inf)
        return cls(layout, Eigenbasis.empty(), nothing, Record.empty(len(theta)), storage)

    @property
    def rank(self) -> int:
        """K, the protected coordinates of the seed that has most."""
        return int(self.basis.strong(self.threshold)[1].max())

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        own = self.basis.tensors() if self.start is None else [*self.basis.tensors(), self.start]
        return sum(tensor.nbytes for tensor in own)

    def bytes_by_parameter(self, columns: Mapping[str, slice]) -> dict[str, int]:
        """Parameter → bytes for the first seed; a shared V counts for the first weight."""
        found = dict.fromkeys(columns, 0)
        for axes in (self.basis.outputs, self.basis.inputs):
            for name, axis in axes.items():
                found[name] += sum(tensor[0].nbytes for tensor in vars(axis).values())
        for name, square in self.basis.squares.items():
            found[name] += square[0].nbytes
        return {name: size for name, size in found.items() if size}

    def __str__(self) -> str:
        return "Kronecker eigenbasis"

    @cached_property
    def _masks(self) -> dict[str, Tensor]:
        """M of each weight with protected coordinates."""
        return self.basis.masks(self.threshold)

    @cached_property
    def _frames(self) -> list[Frame]:
        """The protected coordinates of each weight, for the columns that are here."""
        return [
            Frame.of(self.basis, weight, mask, self.layout) for weight, mask in self._masks.items()
        ]

    @cached_property
    def _free(self) -> dict[str, Tensor]:
        """Parameter without a product → which of its numbers may move, (S, *shape here)."""
        here = {name: self.basis.square_here(name, self.layout) for name in self.basis.squares}
        return {name: some < as_leading(self.threshold, some) for name, some in here.items()}

    def project_out(self, g: Tensor) -> Tensor:
        """g without its protected coordinates, (S, p) → (S, p)."""
        parts = self.layout.split(g)
        inside = [frame.coordinates(parts) for frame in self._frames]
        summed = summed_coordinates(self._frames, inside, self.storage.ranks)
        for frame, found in zip(self._frames, summed, strict=True):
            frame.take_out(found, parts)
        for name, free in self._free.items():
            parts[name] = parts[name] * free
        return self.layout.join(parts)

    def add(self, moments: Moments, choose: Callable[[Self], Self]) -> Self:
        """With a task's moments, and the coordinates chosen again.

        Arguments:
            moments: of the task, with a leading dimension of S seeds.
            choose: the choice among all tasks' coordinates: `protecting` or `holding`.
        """
        like = self.threshold.new_empty(0)
        basis = self.basis.averaged(moments, self.record.tasks, like, self.storage.ranks)
        chosen = choose(replace(self, basis=basis))
        if self.storage.max_rank is not None:
            chosen = chosen.limited(self.storage.max_rank)
        counts = [one.basis.strong(one.threshold)[1].tolist() for one in (chosen, self)]
        ranks = [max(0, now - then) for now, then in zip(*counts, strict=True)]
        protected, total = basis.energy_of(moments, chosen.threshold)
        shares = (protected / total.clamp_min(TINY)).tolist()
        return replace(chosen, record=self.record.with_task(ranks, shares))

    def kept_share(self) -> float:
        """The share of the energy of all tasks that is protected."""
        protected = self.basis.strong(self.threshold)[0]
        return float((protected / self.basis.total().clamp_min(TINY)).mean())

    def protecting(self, share: float) -> Self:
        """With the strongest coordinates protected that hold at most a share of the energy."""
        most = share * self.basis.total()
        return self._at(self._least(lambda threshold: self.basis.strong(threshold)[0] <= most))

    def holding(self, moved: Tensor | None, limit: Tensor) -> Self:
        """With the strongest coordinates protected, so many that the outputs hardly move.

        If the next task moves the weights like the last one, coordinates of energy E change an
        output by E D on average, squared. Protected are the fewest coordinates for which

            Σ_unprotected E D ≤ limit,

        but a share of the energy between bounds, and `_USUAL` where nothing has moved.

        Arguments:
            moved: how far the last task moved the weights, (S, p); None if that is unknown.
            limit: of the outputs' mean squared change, (S,).
        """
        usual, least, most = (
            self.protecting(share).threshold.double() for share in (_USUAL, *_SHARES)
        )
        if moved is None:
            return self._at(usual)
        effects = [*self.basis.effects(self._whole(moved))]

        def change_below(threshold: Tensor) -> Tensor:
            free = threshold.to(moved).unsqueeze(1)
            return torch.stack([float64(((e < free) * d).sum(1)) for e, d in effects]).sum(0)

        # Just below the threshold at which it is too much, those at it are protected.
        found = self._least(lambda threshold: change_below(threshold) > limit) / (1 + _TIES) ** 2
        found = found.clamp(most, least)
        return self._at(
            torch.where(change_below(torch.full_like(found, torch.inf)) > 0, found, usual)
        )

    def _whole(self, vector: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a vector, with all of its numbers."""
        parts = self.layout.split(vector)
        if self.storage.ranks is None:
            return parts
        for name, part in self.layout.slices.items():
            shape = [*parts[name].shape]
            shape[1 + part.dim] = -1
            lead = 1 + part.dim
            pieces = self.storage.ranks.gather(parts[name].transpose(0, lead).flatten())
            shape[0], shape[lead] = shape[lead], shape[0]
            parts[name] = torch.cat([piece.view(shape) for piece in pieces]).transpose(0, lead)
        return parts

    def limited(self, limit: int) -> Self:
        """At most `limit` coordinates, the strongest ones; later tasks may add more."""
        least = self._least(lambda threshold: self.basis.strong(threshold)[1] <= limit)
        return self._at(torch.maximum(self.threshold.double(), least))

    def _at(self, threshold: Tensor) -> Self:
        # Coordinates without energy are never protected, whatever rounding makes of a threshold.
        least = torch.finfo(self.threshold.dtype).tiny
        return replace(self, threshold=threshold.to(self.threshold).clamp_min(least))

    def _least(self, fits: Callable[[Tensor], Tensor]) -> Tensor:
        """The least threshold (S,) that fits, if all larger ones do.

        By halving the interval of its logarithm: to sort the energies would take a number for
        every weight.
        """
        top = self.basis.strongest().clamp_min(TINY)
        low, high = (top * _RANGE).log(), (2 * top).log()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            good = fits(middle.exp())
            low, high = torch.where(good, low, middle), torch.where(good, middle, high)
        # Of those that are equal up to rounding, all are protected or none.
        return high.exp() * (1 + _TIES)

    def within(self, budget: int) -> tuple[Self, str | None]:
        """In at most `budget` bytes, and what was given up for it, in words.

        Either the weakest coordinates are given up, and with them the eigenvectors that no other
        coordinate needs; or the outputs' side is, so that the strongest inputs v_j are protected
        for all outputs alike. What protects more of the energy is taken.
        """
        if self.nbytes <= budget:
            return self, None
        share = self.kept_share()
        one_sided = replace(self, basis=self.basis.one_sided()).protecting(share)
        ways = {
            "only the strongest coordinates": self._trimmed(budget),
            "only the strongest inputs, for all outputs of a layer": one_sided._trimmed(budget),
        }
        fitting = {how: small for how, small in ways.items() if small.nbytes <= budget}
        if not fitting:
            least = format_bytes(min(small.nbytes for small in ways.values()))
            raise ConfigError(
                f"budget must be at least {least} for a Kronecker eigenbasis of this model, not "
                f"{format_bytes(budget)}"
            )
        how, best = max(fitting.items(), key=lambda way: way[1].kept_share())
        return best, (
            f"{how}: {format_bytes(self.nbytes)} asked for, {format_bytes(budget)} given; "
            f"{share:.1%} of the energy was protected, {best.kept_share():.1%} is now"
        )

    def _trimmed(self, budget: int) -> Self:
        """With so few coordinates that their eigenvectors fit, if that is possible."""
        share = self.kept_share()
        low, high, best = 0.0, 1.0, self.protecting(0.0)._cut()
        for _ in range(_HALVINGS // 2):
            middle = (low + high) / 2
            fewer = self.protecting(middle * share)._cut()
            if fewer.nbytes <= budget:
                low, best = middle, fewer
            else:
                high = middle
        return best

    def _cut(self) -> Self:
        """Without the eigenvectors that no protected coordinate needs."""
        return replace(self, basis=self.basis.cut(self._masks))

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The projection of vectors that are zero outside these columns, and stay so."""
        moving = {name for name, some in self.layout.columns.items() if some in columns}
        return replace(self, basis=self.basis.restricted(moving))

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """New rows of a weight are further coordinates on its outputs' side, without energy."""
        start = None if self.start is None else growth.spread(self.start, theta)
        return replace(self, layout=growth.new, basis=self.basis.grown(growth), start=start)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Everything stored for a seed."""
        structure = {
            "layout": self.layout.whole_shapes,
            "source": dict(self.basis.source),
            "biases": dict(self.basis.biases),
            "squares": [*self.basis.squares],
        }
        found = {_NAMES: json_tensor(structure)}
        for side in _SIDES:
            for name, axis in getattr(self.basis, side).items():
                found |= {f"{side}:{name}:{part}": t[seed] for part, t in vars(axis).items()}
        found |= {f"squares:{name}": square[seed] for name, square in self.basis.squares.items()}
        found |= {"threshold": self.threshold[seed]} | self.record.tensors(seed)
        return found if self.start is None else found | {"start": self.start[seed]}

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        """From the `tensors` of each seed, for weights theta (S, p)."""
        structure = json_value(of_seeds[0][_NAMES])
        layout = stored_layout(structure["layout"], theta, storage)
        found: dict[str, dict[str, Any]] = {"squares": {}, **{side: {} for side in _SIDES}}
        for key in of_seeds[0]:
            kind, _, rest = key.partition(":")
            if kind in found:
                stacked = torch.stack([of[key] for of in of_seeds]).to(theta)
                name, _, part = rest.rpartition(":")
                if kind == "squares":
                    found[kind][rest] = stacked
                else:
                    found[kind].setdefault(name, {})[part] = stacked
        # In the order that they were stored in, which a file need not have: sums round alike.
        source = structure["source"]
        basis = Eigenbasis(
            {name: Axis(**found["outputs"][name]) for name in source},
            {name: Axis(**found["inputs"][name]) for name in source.values()},
            source,
            structure["biases"],
            {name: found["squares"][name] for name in structure["squares"]},
        )
        threshold = torch.stack([of["threshold"] for of in of_seeds]).to(theta)
        start = None
        if "start" in of_seeds[0]:
            start = torch.stack([of["start"] for of in of_seeds]).to(theta)
        return cls(layout, basis, threshold, Record.restore(of_seeds), storage, start)
