"""Directions among the inputs of each layer, which its steps leave alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.linalg import TINY, Growth, Layout, float64, orthonormalize
from forgetless.subspace.base import Directions, Record, require_no_rows, stored_layout
from forgetless.subspace.eigenbasis import Axis, Frame
from forgetless.subspace.storage import Storage
from forgetless.support.files import json_tensor, json_value
from forgetless.support.validation import ConfigError, DataError
from forgetless.tangent import InputMoments

_NAMES = "names"  # the entry with the names of parameters
_DEPENDENT = 1e-10  # squared lengths of parts below it are rounding

# From σ of a task's inputs along the old directions (k,) and the new ones (l,), and the old
# directions' λ (k,), to the λ of all, (k + l,).
Scales = Callable[[Tensor, Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True)
class InputSubspace(Directions):
    """Directions of the inputs of each layer, for each of S seeds.

    A layer's outputs do not change on inputs that a step maps to zero. With orthonormal q_j, steps
    become

        ΔW ← ΔW − ΔW Q diag(λ) Qᵀ,    0 < λ ≤ 1

    where a bias is a column of W, and a one is the last input. Parameters that a task uses in
    another way than as such a matrix, as those of norms and embeddings are, may be frozen.

    Arguments:
        layout: the protected parameters.
        axes: weight → Q, leading, and the mean over tasks of the inputs' energy along each q_j.
        scales: weight → λ of the leading columns, (S, k), k ≥ 1; zero where a seed has fewer.
        tasks: weight → how many tasks its inputs are of.
        biases: weight → the bias whose column it has.
        frozen: the parameters that do not move.
        record: what each task added.
        storage: its `max_rank` limits the directions of all layers together.
    """

    layout: Layout
    axes: Mapping[str, Axis]
    scales: Mapping[str, Tensor]
    tasks: Mapping[str, int]
    biases: Mapping[str, str]
    frozen: frozenset[str]
    record: Record
    storage: Storage = field(default_factory=Storage)
    over_ranks: ClassVar[bool] = True

    @classmethod
    def empty(cls, layout: Layout, theta: Tensor, storage: Storage) -> Self:
        """No directions yet."""
        require_no_rows(storage, "directions of layers' inputs")
        return cls(layout, {}, {}, {}, {}, frozenset(), Record.empty(len(theta)), storage)

    @property
    def rank(self) -> int:
        """K, the directions of all layers, of the seed that has most."""
        return max(self._ranks(), default=0)

    def _ranks(self) -> list[int]:
        """The directions of each seed."""
        counts = [(scale > 0).sum(1).cpu() for scale in self.scales.values()]
        found: list[int] = sum(counts, torch.zeros(len(self.record.ranks)).long()).tolist()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.nbytes for _, tensor in self._named())

    def _named(self) -> list[tuple[str, Tensor]]:
        """All that is stored, (S, *) each."""
        return [
            (f"{name}:{part}", tensor)
            for name, axis in self.axes.items()
            for part, tensor in {**vars(axis), "scales": self.scales[name]}.items()
        ]

    def bytes_by_parameter(self, columns: Mapping[str, slice]) -> dict[str, int]:
        """Weight → bytes for the first seed."""
        found: dict[str, int] = {}
        for key, tensor in self._named():
            name = key.rpartition(":")[0]
            found[name] = found.get(name, 0) + tensor[0].nbytes
        return found

    def __str__(self) -> str:
        return "directions of layers' inputs"

    @cached_property
    def _frames(self) -> list[Frame]:
        """Q and λ of every weight, taken apart into weight and bias."""
        frames = []
        for name, scale in self.scales.items():
            part, bias = self.layout.slices.get(name), self.biases.get(name, "")
            if part is not None and part.dim > 0:
                raise ConfigError(
                    f"{name} is cut along dimension {part.dim}, and directions of its inputs need "
                    "it to be cut along the first"
                )
            q = self.axes[name].vectors[:, :, : scale.shape[1]]
            v, last = (q[:, :-1], q[:, -1:]) if bias else (q, q[:, :0])
            frames.append(Frame(name, bias, None, v, None, last, scale.unsqueeze(1), False))
        return frames

    def project_out(self, g: Tensor) -> Tensor:
        """g with ΔW − ΔW Q diag(λ) Qᵀ in place of every ΔW, (S, p) → (S, p)."""
        parts = self.layout.split(g)
        for frame in self._frames:
            frame.take_out(frame.coordinates(parts), parts)
        for name in self.frozen:
            parts[name] = torch.zeros_like(parts[name])
        return self.layout.join(parts)

    def spanning(
        self, moments: InputMoments, like: Tensor, shares: Mapping[str, float], scales: Scales
    ) -> Self:
        """With directions that hold a share of a task's inputs' energy, besides those so far.

        Arguments:
            moments: of the task, with a leading dimension of S seeds.
            like: a tensor of the dtype and device to store with.
            shares: weight → the fewest new directions are taken that reach this share.
            scales: the choice of λ.
        """
        axes, lambdas = dict(self.axes), dict(self.scales)
        for name, moment in self._checked(moments).items():
            spans = [
                _Span.of(axes[name], lambdas[name], seed, a) if name in axes else _Span.none(a)
                for seed, a in enumerate(moment)
            ]
            tasks, least = self.tasks.get(name, 0), torch.finfo(like.dtype).eps
            spans = [
                span.spanning(a, shares[name], least, scales, tasks)
                for span, a in zip(spans, moment, strict=True)
            ]
            if any(len(span.energies) for span in spans):
                axes[name], lambdas[name] = _Span.stacked(spans, like)
        return self._with(moments, axes, lambdas)

    def above(self, moments: InputMoments, like: Tensor, ratio: float) -> Self:
        """With all eigenvectors of the tasks' mean moments, protected but for the smallest.

        Arguments:
            moments: of one more task, with a leading dimension of S seeds.
            like: a tensor of the dtype and device to store with.
            ratio: eigenvalues up to this many times the smallest are free. Those that are zero up
                to rounding are free too, and none of them is the smallest.
        """
        axes, scales = dict(self.axes), dict(self.scales)
        for name, moment in self._checked(moments).items():
            tasks = self.tasks.get(name, 0)
            old, new = tasks / (tasks + 1), 1 / (tasks + 1)
            axis = axes[name].averaged(moment, old, new) if tasks else Axis.of(moment, like)
            values = float64(axis.values)
            rounding = axis.vectors.shape[1] * torch.finfo(like.dtype).eps * values[:, :1]
            least = torch.where(values > rounding, values, torch.inf).amin(1, keepdim=True)
            protected = (values > ratio * least) & (values > rounding)
            axes[name] = axis
            scales[name] = protected[:, : max(1, int(protected.sum(1).max()))].to(like)
        return self._with(moments, axes, scales)

    def freezing(self, names: Collection[str]) -> Self:
        """With more parameters that do not move."""
        return replace(self, frozen=self.frozen.union(names))

    def _checked(self, moments: InputMoments) -> Mapping[str, Tensor]:
        """The task's moments of each weight, if its inputs are as before."""
        for name, moment in moments.inputs.items():
            if not bool(moment.isfinite().all()):
                raise DataError("the inputs of layers on samples to protect are NaN or infinite")
            if name in self.axes and self.biases.get(name) != moments.biases.get(name):
                raise ConfigError(f"the model uses the bias of {name} in another way than before")
        return moments.inputs

    def _with(
        self, moments: InputMoments, axes: Mapping[str, Axis], scales: Mapping[str, Tensor]
    ) -> Self:
        """With what a task added, recorded."""
        used = [name for name in moments.inputs if name in axes]
        if self.storage.ranks is not None:  # eigenvectors may differ between processors
            for tensor in [t for n in used for t in (*vars(axes[n]).values(), scales[n])]:
                tensor.copy_(self.storage.ranks.broadcast(tensor))
        tasks = {**self.tasks, **{name: self.tasks.get(name, 0) + 1 for name in used}}
        biases = {**self.biases, **{n: b for n, b in moments.biases.items() if n in axes}}
        grown = replace(self, axes=axes, scales=scales, tasks=tasks, biases=biases)
        limit = self.storage.max_rank
        new = grown if limit is None else grown.limited(limit)
        both = zip(new._ranks(), self._ranks(), strict=True)
        ranks = [max(0, now - then) for now, then in both]
        task = {name: moments.inputs[name] for name in used}
        along = {n: new.axes[n].energies(a, new.scales[n].shape[1]) for n, a in task.items()}
        shares = new._mean_share({n: (along[n], _trace(a)) for n, a in task.items()})
        return replace(new, record=self.record.with_task(ranks, shares))

    def _mean_share(self, energies: Mapping[str, tuple[Tensor, Tensor]]) -> list[float]:
        """The mean over layers of Σ_j λ_j e_j / total, for each seed.

        Arguments:
            energies: weight → e, the energy along each direction, (S, k), and the total, (S,).
        """
        shares = torch.zeros(len(self.record.ranks), dtype=torch.float64)
        for name, (along, total) in energies.items():
            scale = self.scales[name].to(along)
            protected = (scale * along[:, : scale.shape[1]]).sum(1)
            shares += float64(protected / total.clamp_min(TINY)).cpu() / len(energies)
        found: list[float] = shares.tolist()
        return found

    def kept_share(self) -> float:
        """The share of the energy of all tasks' inputs that is protected, a mean over layers."""
        stored = {n: (float64(axis.values), float64(axis.trace)) for n, axis in self.axes.items()}
        shares = self._mean_share(stored)
        return sum(shares) / len(shares)

    def limited(self, limit: int) -> Self:
        """At most `limit` directions, those with the largest shares of their layers' energy."""
        if self.rank <= limit:
            return self
        columns = [
            (scale > 0) * axis.values[:, : scale.shape[1]] / axis.trace.to(scale).unsqueeze(1)
            for axis, scale in ((self.axes[name], scale) for name, scale in self.scales.items())
        ]
        every = torch.cat([scale > 0 for scale in self.scales.values()], 1)
        shares = torch.cat(columns, 1)
        best = shares.topk(min(limit, shares.shape[1]), dim=1).indices
        chosen = torch.zeros_like(every).scatter(1, best, value=True) & every
        scales = {}
        widths = [scale.shape[1] for scale in self.scales.values()]
        for (name, scale), some in zip(self.scales.items(), chosen.split(widths, 1), strict=True):
            last = max((int(column) + 1 for column in some.any(0).nonzero()), default=1)
            scales[name] = (scale * some)[:, :last].contiguous()
        return replace(self, scales=scales)._cut()

    def _cut(self) -> Self:
        """Without the vectors that are not protected."""
        return replace(self, axes={n: a.cut(self.scales[n].shape[1]) for n, a in self.axes.items()})

    def compressed(self, budget: int) -> tuple[Self, tuple[str, ...]]:
        """Without the vectors that are not protected, of which later tasks know the mean alone."""
        fewer = self._cut()
        return fewer, ("only the protected directions",) if fewer.nbytes < self.nbytes else ()

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """New rows of a weight have the old inputs, so they are protected from them as well."""
        stuck = [name for name in self.frozen if growth.new_rows(name)]
        if stuck:
            raise ConfigError(
                f"the new rows of {stuck[0]} could not learn, because it has no inputs to protect "
                "and is frozen: leave it free by without_inputs='train'"
            )
        return replace(self, layout=growth.new)

    def restricted(self, columns: Sequence[slice]) -> Self:
        """The projection of vectors that are zero outside these columns, and stay so."""
        moving = {name for name, some in self.layout.columns.items() if some in columns}
        axes, scales = {}, {}
        biases: dict[str, str] = {}
        for weight, scale in self.scales.items():
            bias, axis = self.biases.get(weight), self.axes[weight]
            q = axis.vectors[:, :, : scale.shape[1]]
            if weight in moving and (bias is None or bias in moving):
                axes[weight], scales[weight] = axis, scale
                biases |= {} if bias is None else {weight: bias}
            elif weight in moving:
                axes[weight], scales[weight] = _part(q[:, :-1], scale)
            elif bias is not None and bias in moving:
                axes[bias], scales[bias] = _part(q[:, -1:], scale)
        return replace(self, axes=axes, scales=scales, biases=biases, frozen=self.frozen & moving)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """Everything stored for a seed."""
        structure = {
            "layout": self.layout.whole_shapes,
            "tasks": self.tasks,
            "biases": self.biases,
            "frozen": sorted(self.frozen),
        }
        found = {name: tensor[seed] for name, tensor in self._named()}
        return found | {_NAMES: json_tensor(structure)} | self.record.tensors(seed)

    @classmethod
    def restore(
        cls, of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
    ) -> Self:
        """From the `tensors` of each seed, for weights theta (S, p)."""
        structure = json_value(of_seeds[0][_NAMES])
        layout = stored_layout(structure["layout"], theta, storage)
        parts: dict[str, dict[str, Tensor]] = {}
        for key in of_seeds[0]:
            name, _, part = key.rpartition(":")
            if name:
                stacked = torch.stack([of[key] for of in of_seeds]).to(theta)
                parts.setdefault(name, {})[part] = stacked
        tasks, biases = structure["tasks"], structure["biases"]  # in the order of the layers
        scales = {name: parts[name].pop("scales") for name in tasks}
        axes = {name: Axis(**parts[name]) for name in tasks}
        frozen, record = frozenset(structure["frozen"]), Record.restore(of_seeds)
        unknown = {*parts, *biases.values(), *frozen} - set(layout.shapes)
        if unknown:
            raise ConfigError(f"the directions are of another model, with {min(unknown)}")
        return cls(layout, axes, scales, tasks, biases, frozen, record, storage)


def _trace(moment: Tensor) -> Tensor:
    """Of (S, d, d), (S,)."""
    return moment.diagonal(dim1=1, dim2=2).sum(1)


@final
@dataclass(frozen=True)
class _Span:
    """The directions of one layer, for one seed.

    Arguments:
        vectors: q_j in columns, (d, k).
        energies: the inputs' mean energy along each, (k,).
        lambdas: λ, (k,).
        total: the inputs' mean energy, ().
    """

    vectors: Tensor
    energies: Tensor
    lambdas: Tensor
    total: Tensor

    @classmethod
    def none(cls, moment: Tensor) -> Self:
        """No directions of inputs with such a moment, (d, d)."""
        return cls(moment[:, :0], moment[0, :0], moment[0, :0], moment.new_zeros(()))

    @classmethod
    def of(cls, axis: Axis, scale: Tensor, seed: int, moment: Tensor) -> Self:
        """Those of a seed, with the dtype and device of a moment."""
        alive = (scale[seed] > 0).nonzero().flatten()
        vectors, energies = axis.vectors[seed][:, alive], axis.values[seed, alive]
        found = vectors, energies, scale[seed, alive], axis.trace[seed]
        return cls(*(tensor.to(moment) for tensor in found))

    @property
    def rest(self) -> Tensor:
        """The mean energy along each of the other directions, ()."""
        left = (self.total - self.energies.sum()).clamp_min(0)
        return left / max(1, len(self.vectors) - len(self.energies))

    def spanning(
        self, moment: Tensor, share: float, least: float, scales: Scales, tasks: int
    ) -> Self:
        """With the directions of one more task, after so many.

        Arguments:
            moment: A, (d, d).
            share: of its energy.
            least: share of its energy below which a direction is rounding.
            scales: the choice of λ.
            tasks: how many the present directions are of.
        """
        q, total = self.vectors, moment.trace()
        outside = moment - q @ (q.mT @ moment)
        outside = outside - (outside @ q) @ q.mT
        values, vectors = torch.linalg.eigh((outside + outside.mT) / 2)
        values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
        before = total - values.sum() + values.cumsum(0) - values  # without this direction
        count = int(((before < share * total) & (values > least * total)).sum())
        new = orthonormalize(vectors[:, :count].mT, against=q.mT).mT
        both = torch.cat([q, new], 1)
        along = (both * (moment @ both)).sum(0).clamp_min(0)
        sizes = along.sqrt()
        lambdas = scales(sizes[: q.shape[1]], sizes[q.shape[1] :], self.lambdas)
        energies = torch.cat([self.energies, self.rest.expand(new.shape[1])])
        energies = (tasks * energies + along) / (tasks + 1)
        order = energies.argsort(descending=True)
        mean = (tasks * self.total + total) / (tasks + 1)
        return type(self)(both[:, order], energies[order], lambdas[order], mean)

    @staticmethod
    def stacked(spans: Sequence["_Span"], like: Tensor) -> tuple[Axis, Tensor]:
        """Those of all seeds; one with fewer has λ = 0 in the place of the missing ones."""
        widest = max(len(span.energies) for span in spans)
        missing = [(0, widest - len(span.energies)) for span in spans]
        vectors, values, scale = (
            torch.stack(rows).to(like)
            for rows in (
                [pad(span.vectors, by) for span, by in zip(spans, missing, strict=True)],
                [
                    torch.cat([span.energies, span.rest.expand(by)])
                    for span, (_, by) in zip(spans, missing, strict=True)
                ],
                [pad(span.lambdas, by) for span, by in zip(spans, missing, strict=True)],
            )
        )
        return Axis(vectors, values, torch.stack([span.rest for span in spans]).to(like)), scale


def _part(rows: Tensor, scale: Tensor) -> tuple[Axis, Tensor]:
    """Orthonormal directions and their λ, for steps that move some of the inputs alone.

    Arguments:
        rows: Q at these inputs, (S, d, k), no longer orthonormal.
        scale: λ, (S, k).
    """
    exact = float64(rows)
    values, vectors = torch.linalg.eigh((exact * float64(scale).unsqueeze(1)) @ exact.mT)
    lengths = (exact.mT @ vectors).square().sum(1)
    there = lengths > _DEPENDENT
    lambdas = torch.where(there, values / lengths, 0).clamp(0, 1)
    nothing = torch.zeros_like(values[:, 0])
    axis = Axis(vectors.to(rows), values.to(rows), nothing.to(rows))
    return axis, lambdas.to(rows)
