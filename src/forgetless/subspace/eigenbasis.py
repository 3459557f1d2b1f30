"""The eigenbasis of a network's Kronecker moments, averaged over tasks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Self, final

import torch
from scipy.linalg.lapack import dpstrf, spstrf
from torch import Tensor
from torch.nn.functional import pad

from forgetless.linalg import Growth, Layout, product_with_itself
from forgetless.support.collectives import Ranks
from forgetless.support.progress import advance
from forgetless.support.validation import ConfigError, DataError, ForgetlessError
from forgetless.tangent import Moments

# Rows of a moment above which other ways to its eigenvectors than `eigh` in float64 pay.
_LARGE = 256
_STRONGEST = 16  # columns that hold most of a moment which has a large mean


@final
@dataclass(frozen=True)
class Axis:
    """The eigenvectors of one side of a layer, for each of S seeds.

    Arguments:
        vectors: the k strongest eigenvectors in columns, (S, d, k); k = 0 for the standard basis.
            Zeros stand for no eigenvector, of an eigenvalue 0.
        values: their eigenvalues, (S, k), strongest first; in the standard basis (S, d), unsorted.
        rest: the mean of the eigenvalues that were cut away, (S,).
    """

    vectors: Tensor
    values: Tensor
    rest: Tensor

    @classmethod
    def of(cls, moment: Tensor, like: Tensor) -> Self:
        """The eigenvectors of a moment (S, d, d), or the standard basis for a diagonal (S, d).

        Those of a large moment's null space, if that is half of all or more, are left out.
        """
        moment, rest = _finite(moment), like.new_zeros(len(moment))
        if moment.dim() == 2:
            return cls(like.new_zeros(*moment.shape, 0), moment.to(like), rest)
        if moment.device.type == "cpu" and moment.shape[1] >= _LARGE:
            pairs = [_eigenvectors(one, like) for one in moment]
            most = max(len(values) for values, _ in pairs)  # vectors of zeros have no energy
            values = torch.stack([pad(values, (0, most - len(values))) for values, _ in pairs])
            vectors = torch.stack([pad(v, (0, most - v.shape[1])) for _, v in pairs])
        else:
            values, vectors = torch.linalg.eigh(moment)
            values, vectors = values.flip(1), vectors.flip(2)
        # Contiguous, as after loading: products of other strides are rounded in another way.
        return cls(vectors.to(like).contiguous(), values.clamp_min(0).to(like), rest)

    @staticmethod
    def numbers(moment: Tensor) -> int:
        """How many `of` stores for a moment (d, d), or a diagonal (d,)."""
        return moment.numel() + 1 + (len(moment) if moment.dim() == 2 else 0)

    @property
    def is_standard(self) -> bool:
        """Whether the basis is the standard one."""
        return self.vectors.shape[2] == 0

    @property
    def trace(self) -> Tensor:
        """The sum of all d eigenvalues, (S,), in float64."""
        cut = self.vectors.shape[1] - self.values.shape[1]
        return self.values.double().sum(1) + self.rest.double() * cut

    def moment(self) -> Tensor:
        """Q diag(λ) Qᵀ + rest · (I − Q Qᵀ), or the diagonal, in float64."""
        values, rest = self.values.double(), self.rest.double()
        if self.is_standard:
            return values
        above = values - rest.unsqueeze(1)
        if self.vectors.device.type == "cpu" and bool((above >= 0).all()):
            # In their own precision, to which the vectors were rounded already.
            roots = (self.vectors * above.sqrt().unsqueeze(1).to(self.vectors)).mT.contiguous()
            found = torch.stack([product_with_itself(one) for one in roots]).double()
        else:
            vectors = self.vectors.double()
            found = (vectors * above.unsqueeze(1)) @ vectors.mT
        found.diagonal(dim1=1, dim2=2).add_(rest.unsqueeze(1))
        return found

    def averaged(self, moment: Tensor, old: float, new: float) -> Self:
        """The axis of old · (its moment) + new · (another moment)."""
        if self.is_standard and moment.dim() == 3:  # the vectors were given up for a budget
            moment = moment.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).expand_as(self.values)
        return type(self).of((old * self.moment()).add_(moment, alpha=new), self.vectors)

    def scaled(self, factor: float) -> Self:
        """The axis of factor · (its moment)."""
        return replace(self, values=factor * self.values, rest=factor * self.rest)

    def energies(self, moment: Tensor, count: int) -> Tensor:
        """q_iᵀ M q_i of another moment M for the first vectors, (S, count)."""
        if self.is_standard:
            return _diagonal(moment)[:, :count]
        vectors = self.vectors[:, :, :count]
        return (vectors * (moment.to(vectors) @ vectors)).double().sum(1)

    def weighted_energy(self, moment: Tensor, weights: Tensor) -> Tensor:
        """Σ_i w_i q_iᵀ M q_i of another moment M for weights w ≥ 0 (S, count): (S,).

        On a CPU as ⟨M, Q diag(w) Qᵀ⟩, a symmetric product, which takes half as long.
        """
        if self.is_standard or self.vectors.device.type != "cpu":
            return (weights * self.energies(moment, weights.shape[1])).sum(1)
        roots = weights.sqrt().unsqueeze(1).to(self.vectors)
        rows = (self.vectors[:, :, : weights.shape[1]] * roots).mT.contiguous()
        pairs = zip(moment, rows, strict=True)
        return torch.stack([(m * product_with_itself(x)).sum() for m, x in pairs])

    def cut(self, count: int) -> Self:
        """The strongest eigenvectors alone; of the standard basis, all."""
        k, d = self.values.shape[1], self.vectors.shape[1]
        if self.is_standard or count >= k:
            return self
        values = self.values[:, : max(1, count)].contiguous()
        rest = (self.trace - values.double().sum(1)).clamp_min(0) / (d - values.shape[1])
        vectors = self.vectors[:, :, : values.shape[1]].contiguous()
        return type(self)(vectors, values, rest.to(values))

    def grown(self, count: int) -> Self:
        """With so many more coordinates, in which the moment is zero.

        What was cut away is spread over them too: its energy stays the same.
        """
        values, vectors = self.values, pad(self.vectors, (0, 0, 0, count))
        if self.is_standard:
            return replace(self, vectors=vectors, values=pad(values, (0, count)))
        cut = self.vectors.shape[1] - values.shape[1]
        return replace(self, vectors=vectors, rest=self.rest * (cut / max(1, cut + count)))

    def without_vectors(self) -> Self:
        """The standard basis, with the mean eigenvalue for every coordinate."""
        d = self.vectors.shape[1]
        values = (self.trace / d).to(self.values).unsqueeze(1).expand(-1, d)
        return type(self)(self.vectors[:, :, :0], values.contiguous(), 0 * self.rest)


@final
@dataclass(frozen=True)
class Eigenbasis:
    """Eigenvectors u_i ⊗ v_j and energies γ_i α_j of each weight's moments G ⊗ A, for S seeds.

    G and A are means over the tasks, so that r² + c² numbers for a weight (r, c) suffice for any
    number of tasks. Layers with the same inputs share A.

    Arguments:
        outputs: weight → U and γ.
        inputs: weight → V and α; with a bias c counts it as a last input.
        source: weight → the weight whose inputs it has.
        biases: weight → its bias.
        squares: every other parameter → the mean of its squared gradient, (S, *shape).
    """

    outputs: Mapping[str, Axis]
    inputs: Mapping[str, Axis]
    source: Mapping[str, str]
    biases: Mapping[str, str]
    squares: Mapping[str, Tensor]

    @classmethod
    def empty(cls) -> Self:
        """The eigenbasis before the first task, of no parameter."""
        return cls({}, {}, {}, {}, {})

    @staticmethod
    def numbers_of(moments: Moments) -> int:
        """How many the eigenbasis of one network's moments has, which need no data for that."""
        sides = (*moments.outputs.values(), *moments.inputs.values())
        return sum(map(Axis.numbers, sides)) + sum(s.numel() for s in moments.squares.values())

    def sides(self, weight: str) -> tuple[Axis, Axis]:
        """Its outputs' side and its inputs' side."""
        return self.outputs[weight], self.inputs[self.source[weight]]

    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        axes = (*self.outputs.values(), *self.inputs.values())
        return [t for axis in axes for t in vars(axis).values()] + [*self.squares.values()]

    def averaged(
        self, moments: Moments, tasks: int, like: Tensor, ranks: Ranks | None = None
    ) -> Self:
        """With the moments of one more task, after so many.

        Arguments:
            moments: with a leading dimension of S seeds.
            tasks: those that are in it already.
            like: an empty tensor of the dtype and device to store with.
            ranks: processes with the same moments, which take turns with the eigenvectors.
        """
        old, new = tasks / (tasks + 1), 1 / (tasks + 1)
        _finite(moments.squared_scalars)
        self._check(moments)
        source, inputs = dict(self.source), dict(self.inputs)
        sides = 2 * len(moments.outputs)
        turns = count()

        def axis(known: Axis | None, moment: Tensor, old: float, new: float) -> Axis:
            def make() -> Axis:
                if known is None:
                    return Axis.of(moment if new == 1 else new * moment, like)
                return known.averaged(moment, old, new)

            return _by_one(next(turns), make, moment, like, ranks)

        for number, weight in enumerate(moments.outputs):
            advance("eigenvectors", number, sides)
            first = moments.source[weight]
            source.setdefault(weight, source.get(first, first))
            name, moment = source[weight], moments.inputs[first]
            if name not in self.inputs:
                inputs[name] = axis(None, moment, old, 1.0)
            elif inputs[name] is self.inputs[name]:  # not yet averaged for another weight
                inputs[name] = axis(inputs[name], moment, old, new)
        # A layer that the task does not use has no energy in it.
        outputs = {name: axis.scaled(old) for name, axis in self.outputs.items()}
        for number, (name, moment) in enumerate(moments.outputs.items()):
            advance("eigenvectors", len(moments.outputs) + number, sides)
            outputs[name] = axis(self.outputs.get(name), moment, old, new / moments.samples)
        squares = {name: old * square.double() for name, square in self.squares.items()}
        for name, square in moments.squares.items():
            mean = new / moments.samples * _finite(square)
            squares[name] = squares[name] + mean if name in squares else mean
        biases = {**self.biases, **moments.biases}
        covered = {*outputs, *biases.values()}
        return type(self)(
            outputs,
            {name: inputs[name] for name in source.values()},
            source,
            biases,
            {name: square.to(like) for name, square in squares.items() if name not in covered},
        )

    def _check(self, moments: Moments) -> None:
        """Reject moments of a network that works in another way than before.

        Of a layer that was not used, or now is not, there are zeros in place of a product.
        """
        mine, theirs = self.biases.get, moments.biases.get
        changed = [w for w in self.outputs if w in moments.outputs and mine(w) != theirs(w)]
        changed += [n for n, s in self.squares.items() if n in moments.outputs and bool(s.any())]
        changed += [n for n, s in moments.squares.items() if n in self.outputs and bool(s.any())]
        if changed:
            raise ConfigError(
                f"the model uses {changed[0]} in another way than in earlier tasks, so that their "
                "moments have no mean: leave it out with exclude=, or use PCAOGD"
            )

    def grown(self, growth: Growth) -> Self:
        """With more rows in some parameters, of which no task had a gradient."""
        outputs = {name: axis.grown(growth.new_rows(name)) for name, axis in self.outputs.items()}
        squares = {}
        for name, square in self.squares.items():
            trailing = (0, 0) * (square.dim() - 2)
            more = growth.new_rows(name)
            squares[name] = pad(square, (*trailing, 0, more)) if more else square
        return replace(self, outputs=outputs, squares=squares)

    def total(self) -> Tensor:
        """The energy in all coordinates, (S,) in float64; also those without eigenvectors."""
        found = [g.trace * a.trace for g, a in map(self.sides, self.outputs)]
        found += [_by_seed(square).double().sum(1) for square in self.squares.values()]
        return torch.stack(found).sum(0)

    def strong(self, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """The energy in coordinates of at least a threshold (S,), and their number: (S,) each."""
        energy = torch.zeros_like(threshold, dtype=torch.float64)
        count = torch.zeros_like(threshold, dtype=torch.long)
        for weight in self.outputs:
            gamma, alpha = (axis.values.double() for axis in self.sides(weight))
            sums = pad(alpha.cumsum(1), (1, 0))
            # α falls, so −α rises: how many of it are at most −threshold / γ.
            least = (threshold.double().unsqueeze(1) / gamma).nan_to_num(torch.inf)
            many = torch.searchsorted(-alpha, -least, right=True)
            energy += (gamma * sums.gather(1, many)).sum(1)
            count += many.sum(1)
        for square in self.squares.values():
            above = _by_seed(square >= as_leading(threshold, square))
            energy += (_by_seed(square).double() * above).sum(1)
            count += above.sum(1)
        return energy, count

    def effects(self, moved: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each coordinate's energy E, and E D for a movement with the squared coordinates D.

        Arguments:
            moved: parameter → how far it moved, (S, *shape).

        Yields:
            E and E D, (S, n) each, for one parameter after the other.
        """
        for weight in self.outputs:
            frame = Frame.of(self, weight, None, Layout({}))
            outputs, inputs = self.sides(weight)
            energies = outputs.values.unsqueeze(2) * inputs.values.unsqueeze(1)
            squared = frame.coordinates(moved).square()
            yield energies.flatten(1), (energies * squared).flatten(1)
        for name, square in self.squares.items():
            yield _by_seed(square), _by_seed(square * moved[name].square())

    def product(
        self,
        vector: Tensor,
        layout: Layout,
        change: Callable[[Tensor], Tensor] = lambda energies: energies,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """The moments' product with a vector, G X A of every weight: (S, p) → (S, p).

        Arguments:
            vector: the vector, or the columns of it that are here.
            layout: of these columns.
            change: of the energies (S, …), for the product with a function of the moments.
            ranks: the processes that have the other columns, if there are any.
        """
        parts = layout.split(vector)
        found = {name: torch.zeros_like(part) for name, part in parts.items()}
        frames = []
        for weight in self.outputs:
            outputs, inputs = self.sides(weight)
            energies = change(outputs.values.unsqueeze(2) * inputs.values.unsqueeze(1))
            frames.append(Frame.of(self, weight, energies, layout))
        inside = summed_coordinates(frames, [frame.coordinates(parts) for frame in frames], ranks)
        for frame, coordinates in zip(frames, inside, strict=True):
            frame.take_out(-coordinates, found)
        for name in self.squares:
            found[name] = change(self.square_here(name, layout)) * parts[name]
        return layout.join(found)

    def square_here(self, name: str, layout: Layout) -> Tensor:
        """The mean squared gradient of a parameter's numbers that are here, (S, *shape here)."""
        square, part = self.squares[name], layout.slices.get(name)
        if part is None:
            return square
        return part.of(square.flatten(1)).view(len(square), *part.shape_here)

    def strongest(self) -> Tensor:
        """The largest energy, (S,) in float64; zero if there is none."""
        sides = [self.sides(weight) for weight in self.outputs]
        found = [outputs.values.amax(1) * inputs.values.amax(1) for outputs, inputs in sides]
        found += [_by_seed(square).amax(1) for square in self.squares.values()]
        return torch.stack(found).amax(0).double()

    def masks(self, threshold: Tensor) -> dict[str, Tensor]:
        """Weight → which coordinates have at least a threshold, (S, rows, columns) of bool.

        Up to the last row and column with any; weights without any are missing.
        """
        found = {}
        for weight in self.outputs:
            outputs, inputs = self.sides(weight)
            energies = outputs.values.unsqueeze(2) * inputs.values.unsqueeze(1)
            mask = energies >= as_leading(threshold, energies)
            # Energies fall along both sides, but for the standard basis.
            rows = mask.shape[1] if outputs.is_standard else int(mask.any(2).sum(1).max())
            columns = int(mask.any(1).sum(1).max())
            if columns:
                found[weight] = mask[:, :rows, :columns].contiguous()
        return found

    def energy_of(self, moments: Moments, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Other moments' energy in the strong coordinates, and in all: (S,) each.

        In a coordinate it is (u_iᵀ G u_i) (v_jᵀ A v_j).
        """
        masks = self.masks(threshold)
        energy = torch.zeros_like(threshold, dtype=torch.float64)
        total = torch.zeros_like(energy)
        for weight, g in moments.outputs.items():
            a = moments.inputs[moments.source[weight]]
            total += _diagonal(g).sum(1) * _diagonal(a).sum(1)
            if weight in masks:
                mask = masks[weight].double()
                first, second = self.sides(weight)
                if mask.shape[1] > mask.shape[2]:  # the larger side's product comes last
                    first, second, g, a, mask = second, first, a, g, mask.mT
                along = first.energies(g, mask.shape[1]).clamp_min(0)
                weights = (along.unsqueeze(1) @ mask).squeeze(1)
                energy += second.weighted_energy(a, weights)
        for name, square in moments.squares.items():
            total += _by_seed(square).sum(1)
            if name in self.squares:
                above = self.squares[name] >= as_leading(threshold, square)
                energy += _by_seed(square * above).sum(1)
        return energy, total

    def cut(self, masks: Mapping[str, Tensor]) -> Self:
        """Without the eigenvectors that these masks do not need."""
        columns: dict[str, int] = {}
        for name, mask in masks.items():
            first = self.source[name]
            columns[first] = max(columns.get(first, 0), mask.shape[2])
        rows = {name: mask.shape[1] for name, mask in masks.items()}
        return replace(
            self,
            outputs={name: axis.cut(rows.get(name, 0)) for name, axis in self.outputs.items()},
            inputs={name: axis.cut(columns.get(name, 0)) for name, axis in self.inputs.items()},
        )

    def one_sided(self) -> Self:
        """With every output of a layer alike: coordinates are those of its inputs."""
        outputs = {name: axis.without_vectors() for name, axis in self.outputs.items()}
        return replace(self, outputs=outputs)

    def restricted(self, moving: Collection[str]) -> Self:
        """The moments of some parameters alone, where a bias may move without its weight."""
        like = next(iter(self.tensors())).new_empty(0)
        outputs = {name: axis for name, axis in self.outputs.items() if name in moving}
        biases = {w: b for w, b in self.biases.items() if w in outputs and b in moving}
        source = {name: self.source[name] for name in outputs}
        inputs = dict(self.inputs)
        squares = {name: square for name, square in self.squares.items() if name in moving}
        for weight, bias in self.biases.items():
            moment = self.inputs[self.source[weight]].moment()
            if weight in moving and bias not in moving:
                inputs[weight], source[weight] = Axis.of(moment[:, :-1, :-1], like), weight
            elif bias in moving and weight not in moving:
                square = _diagonal(self.outputs[weight].moment()) * moment[:, -1, -1:]
                squares[bias] = square.to(like)
        inputs = {name: inputs[name] for name in source.values()}
        return type(self)(outputs, inputs, source, biases, squares)


@final
@dataclass(frozen=True)
class Frame:
    """The protected coordinates of one weight's steps, X = Uᵀ [ΔW b] V, of which M stay out.

    Of a weight that is spread over processes each has some rows of U or V, and a part of X.

    Arguments:
        weight, bias: their names; no bias is "".
        u: eigenvectors at the rows that are here, (S, r, k); None for the standard basis.
        v: those at the columns that are here, (S, c, l).
        bias_u: as `u`, at the bias's rows.
        bias_v: V at the bias, (S, 1, l).
        mask: M, (S, k, l), or with other weights than 0 and 1; None for all coordinates.
        is_partial: whether X is the sum of what the processes have.
    """

    weight: str
    bias: str
    u: Tensor | None
    v: Tensor
    bias_u: Tensor | None
    bias_v: Tensor
    mask: Tensor | None
    is_partial: bool

    @classmethod
    def of(cls, basis: Eigenbasis, weight: str, mask: Tensor | None, layout: Layout) -> Self:
        """The frame of a weight, with these coordinates protected."""
        outputs, inputs = basis.sides(weight)
        bias = basis.biases.get(weight, "")
        part, bias_part = layout.slices.get(weight), layout.slices.get(bias)
        rows, columns = (None, None) if mask is None else mask.shape[1:]
        v = inputs.vectors[:, :, :columns]
        bias_v = v[:, -1:] if bias else v[:, :0]
        v = v[:, :-1] if bias else v
        u = None if outputs.is_standard else outputs.vectors[:, :, :rows]
        bias_u = u if bias else None
        if part is not None:
            if u is None and part.dim > 0:
                raise ConfigError(
                    f"{weight} is cut along dimension {part.dim}, and a Kronecker eigenbasis needs "
                    "embeddings and very wide layers to be cut along the first"
                )
            if u is None:
                mask = None if mask is None else mask[:, part.start : part.stop]
            elif part.dim == 0:
                u = u[:, part.start : part.stop]
            else:
                index = torch.arange(v.shape[1]).view(1, -1)
                of_row = replace(part, shape=(1, *part.shape[1:]))
                v = v[:, of_row.of(index).flatten()]
        if bias_u is not None and bias_part is not None:
            bias_u = bias_u[:, bias_part.start : bias_part.stop]
        is_partial = part is not None and u is not None
        return cls(weight, bias, u, v, bias_u, bias_v, mask, is_partial)

    def coordinates(self, parts: Mapping[str, Tensor]) -> Tensor:
        """X, of the parts of a step, (S, k, l)."""
        step = parts[self.weight].unsqueeze(2).flatten(2)
        b = parts[self.bias].unsqueeze(2) if self.bias else None
        if b is None or self.bias_u is not self.u:
            x = step @ self.v
        else:  # in one product: a GPU waits for each to start
            x = torch.baddbmm(b * self.bias_v, step, self.v)
        x = x if self.u is None else self.u.mT @ x
        if b is not None and self.bias_u is not self.u:
            x += (b if self.bias_u is None else self.bias_u.mT @ b) @ self.bias_v
        return x

    def take_out(self, x: Tensor, parts: dict[str, Tensor]) -> None:
        """Replace the weight's and the bias's parts of a step by those without U (X ∘ M) Vᵀ."""
        x = x if self.mask is None else x * self.mask
        step, bias = parts[self.weight], parts.get(self.bias)
        rows = x if self.u is None else self.u @ x
        matrix = step.unsqueeze(2).flatten(2)
        parts[self.weight] = torch.baddbmm(matrix, rows, self.v.mT, alpha=-1).view_as(step)
        if bias is not None:
            if self.bias_u is not self.u:
                rows = x if self.bias_u is None else self.bias_u @ x
            change = torch.baddbmm(bias.unsqueeze(2), rows, self.bias_v.mT, alpha=-1)
            parts[self.bias] = change.squeeze(2)


def summed_coordinates(
    frames: Sequence[Frame], inside: list[Tensor], ranks: Ranks | None
) -> list[Tensor]:
    """Coordinates of which each process has a part, by one sum over the processes.

    Arguments:
        frames: of the weights.
        inside: the coordinates in each frame, or this process's part of them.
        ranks: the processes; None if there is one.
    """
    shared = [x for x, frame in zip(inside, frames, strict=True) if frame.is_partial]
    if not shared or ranks is None:
        return inside
    total = ranks.sum(torch.cat([x.flatten() for x in shared]))
    sums = iter(total.split([x.numel() for x in shared]))
    return [
        next(sums).view_as(x) if frame.is_partial else x
        for x, frame in zip(inside, frames, strict=True)
    ]


def as_leading(values: Tensor, tensor: Tensor) -> Tensor:
    """Values (S,) as (S, 1, …), to compare with a tensor (S, …)."""
    return values.view(-1, *(1 for _ in tensor.shape[1:]))


def _by_seed(tensor: Tensor) -> Tensor:
    """(S, *shape) → (S, n), also of single numbers (S,)."""
    return tensor.reshape(len(tensor), -1)


def _by_one(
    turn: int, make: Callable[[], Axis], moment: Tensor, like: Tensor, ranks: Ranks | None
) -> Axis:
    """An axis that one of the processes makes and sends to the others.

    It is then the same on all, whose processors may round in different ways.
    """
    if ranks is None:
        return make()
    source = turn % ranks.size
    axis, failed = None, ""
    if ranks.rank == source:
        try:
            axis = make()
        except ForgetlessError as error:
            failed = str(error)
    size = torch.tensor(0 if axis is None else 1 + axis.vectors.shape[2])
    columns = int(ranks.broadcast(size, source)) - 1
    if columns < 0:
        raise DataError(failed or f"process {source} could not make eigenvectors")
    if axis is None:
        seeds, d = moment.shape[:2]
        k = columns or d
        axis = Axis(
            like.new_empty(seeds, d, columns), like.new_empty(seeds, k), like.new_empty(seeds)
        )
    return Axis(**{name: ranks.broadcast(tensor, source) for name, tensor in vars(axis).items()})


def _diagonal(moment: Tensor) -> Tensor:
    """Of (S, d, d), or itself if it is one (S, d)."""
    return moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)


def _eigenvectors(moment: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k,), largest first, and eigenvectors (d, k) of a large moment (d, d) on a CPU.

    A pivoted Cholesky decomposition takes a tenth of the time of eigenvectors. If it finds a rank
    k ≤ d / 2, up to rounding, L = Q R leaves those of R Rᵀ, (k, k). Otherwise k = d, in the
    precision of `like`: a moment is a sum of products in that precision.
    """
    d, top = len(moment), float(moment.diagonal().max())
    tolerance = d * torch.finfo(like.dtype).eps * top
    rank = d if _least_rank(moment, tolerance) > d // 2 else 0
    if rank <= d // 2 and like.dtype == torch.float32:  # anything to gain? In half the time
        _, _, rank, _ = spstrf((moment / top).float().numpy(), tol=tolerance / top, lower=1)
    if rank <= d // 2:
        found, pivots, rank, _ = dpstrf(moment.numpy(), tol=tolerance, lower=1)
    if rank <= d // 2:
        factor = torch.empty(d, max(1, rank), dtype=moment.dtype)
        factor[torch.from_numpy(pivots).long() - 1] = torch.from_numpy(found)[
            :, : max(1, rank)
        ].tril()
        q, r = torch.linalg.qr(factor)
        values, vectors = torch.linalg.eigh(r @ r.mT)
        return values.flip(0), q @ vectors.flip(1)
    values, vectors = torch.linalg.eigh((moment / top).to(like))
    lengths = torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64)
    return top * values.double().flip(0), (vectors / lengths.to(vectors)).flip(1)


def _least_rank(moment: Tensor, tolerance: float) -> float:
    """A lower bound on the rank of M (d, d), in a hundredth of the time of eigenvectors.

    rank M ≥ rank P M P ≥ tr(P M P)² / ‖P M P‖² for any projection P; here onto the complement of
    the columns of M with the largest diagonals, since inputs have a large mean.
    """
    strongest = moment.diagonal().topk(_STRONGEST).indices
    q, _ = torch.linalg.qr(moment[:, strongest])
    moved = moment @ q
    inside = q.mT @ moved
    trace = moment.diagonal().sum() - inside.diagonal().sum()
    squared = moment.square().sum() - 2 * moved.square().sum() + inside.square().sum()
    # What is left of a moment of few columns is rounding.
    return float(trace.square() / squared) if float(trace) > tolerance else 0.0


def _finite(moment: Tensor) -> Tensor:
    if not bool(moment.isfinite().all()):
        raise DataError(
            "the outputs of samples to protect, or their gradients, are NaN or infinite"
        )
    return moment
