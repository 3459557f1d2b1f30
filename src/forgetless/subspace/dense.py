"""Directions as orthonormal rows, one stack per seed: extended, and projected out of steps."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import TINY, Growth, float64, orthonormalize
from forgetless.subspace.base import Movable, Record, Subspace, refuse_infinite
from forgetless.subspace.orthonormal import lengths_of_long, orthonormalize_in_place
from forgetless.subspace.storage import DENSE, SQUARE_BYTES, Storage
from forgetless.support.collectives import Ranks
from forgetless.support.validation import ConfigError
from forgetless.tangent import TangentFeatures, principal_weights, stored, top_weights_of_each

# The share of each sample's length outside the others from which their Gram matrix tells enough.
_APART = 0.01
# Rows of a block that is read twice in a row, and should come from the cache the second time.
_HEIGHT = 4
_CACHED = 1 << 24
# Rows that are elsewhere, or of another type, are copied in blocks of this many bytes.
_COPIED = 1 << 26
# Bytes of rows below which a second thread costs more than it helps.
_WORTHWHILE = 1 << 21
# The same for loops that are compiled first, which takes seconds, once on every machine.
_WORTH_COMPILING = 1 << 25
_ALIGNMENT = 128  # bytes of a line of a GPU's cache: rows across its borders take a third longer
# Numbers converted to float64 at once.
_EXACT = 1 << 22
# The norm of the inverse of V Vᵀ over some parameters above which rounding matters.
_STEEP = 100.0


def project_out_rows(g: Tensor, rows: Tensor) -> Tensor:
    """g̃ = g − Σ_b V_bᵀ V_b g over blocks of orthonormal rows, each block read once.

    Rows that a cache cannot hold are read twice, for V g and for Vᵀ times that. On a GPU kernels
    do it, in one pass where the chip can hold its share of a row.

    Arguments:
        g: (S, p).
        rows: V, (S, K, p), of any floating-point type, on any device.
    """
    if rows.shape[1] == 0:
        return g
    for kernel in _kernels() if _suit_a_kernel(g, rows) else ():
        projected = kernel(g.contiguous(), rows)
        if projected is not None:
            return projected
    each = [_project_out(one, basis) for one, basis in zip(g, rows, strict=True)]
    return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)


def _suit_a_kernel(g: Tensor, rows: Tensor) -> bool:
    return (
        g.dtype == torch.float32
        and g.device == rows.device
        and _has_kernels(rows)
        and rows.stride(2) == 1
        and not (torch.is_grad_enabled() and g.requires_grad)
    )


def _has_kernels(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in (torch.float32, torch.bfloat16)


@cache
def _kernels() -> tuple[Callable[[Tensor, Tensor], Tensor | None], ...]:
    """The kernels that the installed Triton can compile, the fastest first."""
    found: list[Callable[[Tensor, Tensor], Tensor | None]] = []
    with suppress(ImportError):  # no Triton, or one without its experimental language
        from forgetless.subspace.kernels.onepass import project_out_in_one_pass

        found.append(project_out_in_one_pass)
    with suppress(ImportError):
        from forgetless.subspace.kernels.twopass import project_out_in_two_passes

        found.append(project_out_in_two_passes)
    return tuple(found)


def _project_out(g: Tensor, basis: Tensor) -> Tensor:
    """One seed's g̃, (p,). PyTorch's products with a vector have one thread: several share rows."""
    threads = torch.get_num_threads() if g.device.type == "cpu" else 1
    if basis.nbytes < _WORTHWHILE or (torch.is_grad_enabled() and g.requires_grad):
        return g - _inside(g, basis)
    # One thread gains too little, and a few rows less than the compiler takes.
    compiled = _compiled() if threads > 1 and basis.nbytes >= _WORTH_COMPILING else None
    projected = None if compiled is None else compiled(g, basis, threads)
    if projected is not None:
        return projected
    mine, *others = basis.chunk(threads)
    waiting = [_pool(threads, os.getpid()).submit(_without_gradient, g, part) for part in others]
    total = _inside(g, mine)
    for part in waiting:
        total += part.result()
    return g - total


@cache
def _compiled() -> Callable[[Tensor, Tensor, int], Tensor | None] | None:
    """The loops that Numba compiles; None without it, or where it can store nothing."""
    try:
        from forgetless.subspace.kernels.compiled import project_out_compiled
    except (ImportError, RuntimeError):
        return None
    return project_out_compiled


def _inside(g: Tensor, basis: Tensor) -> Tensor:
    """Vᵀ V g, (p,), with one thread."""
    out = torch.zeros_like(g)
    for block in _blocks(basis, g):
        out.addmv_(block.T, block @ g)
    return out


def _without_gradient(g: Tensor, basis: Tensor) -> Tensor:
    with torch.no_grad():
        return _inside(g, basis)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(max(1, threads - 1), "forgetless")


def coefficients(g: Tensor, rows: Tensor) -> Tensor:
    """V g: (S, p), (S, K, p) → (S, K)."""
    found = [
        torch.cat([block @ one for block in _blocks(basis, one)])
        for one, basis in zip(g, rows, strict=True)
    ]
    return torch.stack(found)


def combination(weights: Tensor, rows: Tensor) -> Tensor:
    """Vᵀ c: (S, K), (S, K, p) → (S, p)."""
    out = weights.new_zeros(rows.shape[0], rows.shape[2])
    for one, of_one, basis in zip(out, weights, rows, strict=True):
        start = 0
        for block in _blocks(basis, one):
            one.add_(of_one[start : start + len(block)] @ block)
            start += len(block)
    return out


def _blocks(basis: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The rows (K, p) a few at a time, on the device and in the type of `like`."""
    row = max(1, basis.shape[1] * like.element_size())
    here = basis.device == like.device and not like.is_cuda
    height = _HEIGHT if here and _HEIGHT * row <= _CACHED else max(1, _COPIED // row)
    if basis.device == like.device and basis.dtype == like.dtype and height != _HEIGHT:
        height = max(1, len(basis))  # nothing to copy, and no cache to stay in
    for block in basis.split(height):
        # A copy to the CPU would be read before it is there.
        yield block.to(like, non_blocking=like.is_cuda)


def aligned(like: Tensor, count: int) -> Tensor:
    """Zero rows (S, count, p) of the type of `like`, (S, ·, p), each at a multiple of 128 bytes."""
    step = _ALIGNMENT // like.element_size()
    seeds, size = like.shape[0], like.shape[-1]
    return like.new_zeros(seeds, count, -(-size // step) * step)[..., :size]


def laid_out(rows: Tensor) -> Tensor:
    """The same rows (S, K, p), aligned if a GPU's kernels will read them."""
    lined_up = rows.stride(1) * rows.element_size() % _ALIGNMENT == 0
    if lined_up or rows.shape[1] == 0 or not _has_kernels(rows):
        return rows
    return aligned(rows, rows.shape[1]).copy_(rows)


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

    def reaches(self, columns: Mapping[str, slice]) -> bool:
        added = self.record.ranks[:, -1:]
        last = self.storage.max_rank is None and bool((added > 0).any())
        return last and all(bool(self.rows[:, -1, some].any()) for some in columns.values())

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
        several = [_samples(phi, self.storage) for phi in features]
        totals = [total for *_, total in several]
        fill = [(count, write, mix) for count, write, mix, _ in several]
        return self._extended(fill, features[0].like, totals)

    def add_principal(
        self, features: Sequence[TangentFeatures], components: int | float, *, centred: bool
    ) -> Self:
        phis, ranks = [_merged(one) for one in features], self.storage.ranks
        if ranks is None:
            found = top_weights_of_each(phis, components, centred=centred)
        else:
            found = [_agreed_weights(phi, components, centred, ranks) for phi in phis]
        fill = [
            (len(values), partial(phi.combine, weights), values.diag())
            for phi, (values, weights, _) in zip(phis, found, strict=True)
        ]
        return self._extended(fill, phis[0].like, [total for *_, total in found])

    def _extended(
        self,
        several: Sequence[tuple[int, Callable[[Tensor], Tensor], Tensor | None]],
        like: Tensor,
        totals: Sequence[float | None],
    ) -> Self:
        """The subspace extended by the span of more vectors.

        Vectors that lie inside it, or depend on the others, add nothing. They are written where the
        new rows will be, if these are stored as vectors are.

        Arguments:
            several: for each seed a number d, a function that writes as many rows W, (d, p), and B,
                (d, d), for vectors B W; None if the rows are the vectors.
            like: a tensor of the vectors' dtype and device.
            totals: the variance of the features whose directions they are; None if the vectors are
                these features.
        """
        ranks, before = self.storage.ranks, self.rank
        most = max(count for count, *_ in several)
        refuse_infinite(*(total for total in totals if total is not None))
        rows = self._room(before + most, like)
        rows[:, :before] = self.rows
        is_place = rows.dtype == like.dtype and rows.device == like.device
        inside, squares = [], []
        for of_seed, old, (count, write, mix) in zip(rows, self.rows, several, strict=True):
            place = of_seed[before : before + count]
            vectors = write(place if is_place else like.new_empty(place.shape))
            if mix is None:
                lengths = energies = lengths_of_long(vectors, ranks)
            else:  # the rows are of length one, up to what the Gram matrix loses
                energies = mix.to(self.moments).norm(dim=0)
                lengths = torch.ones_like(energies)
            squares.append(float(energies.square().sum()))
            refuse_infinite(squares[-1])
            new, found = _new_rows(vectors, old, lengths, ranks)
            inside.append(found if mix is None else mix.to(found) @ found)
            if new.data_ptr() != place.data_ptr():
                of_seed[before : before + len(new)] = new
            of_seed[before + len(new) :] = 0
        wholes = [s if total is None else total for s, total in zip(squares, totals, strict=True)]
        shares = [one / max(whole, TINY) for one, whole in zip(squares, wholes, strict=True)]
        ranks_of_each = [found.shape[1] for found in inside]
        count = max(ranks_of_each)
        if count < rows.shape[1]:
            rows = laid_out(rows[:, :count].clone())
        moments = self.moments.new_zeros(len(rows), count, count)
        moments[:, :before, :before] = self.moments
        for moment, found, whole in zip(moments, inside, wholes, strict=True):
            size = found.shape[1]
            moment[:size, :size].add_(found.T @ found, alpha=1 / max(whole, TINY))
        record = self.record.with_task([size - before for size in ranks_of_each], shares)
        grown = replace(self, rows=rows, moments=moments, record=record, movable=None)
        return grown.stored(self.storage)

    def _room(self, count: int, like: Tensor) -> Tensor:
        """Memory for rows (S, count, p), stored as asked unless max_rank will first reduce them."""
        limit = self.storage.max_rank
        whole = limit is None or count <= limit
        none = like.new_empty(len(self.rows), 0, self.rows.shape[2])
        none = none.to(self.storage.device, self.storage.dtype) if whole else none
        return (
            aligned(none, count)
            if none.is_cuda
            else none.new_empty(len(none), count, none.shape[2])
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


def _samples(
    phi: TangentFeatures, storage: Storage
) -> tuple[int, Callable[[Tensor], Tensor], Tensor | None, float | None]:
    """What `_extended` takes for the features themselves.

    Of few samples with long rows, at hand as factors, the rows are orthonormal as they are written:
    with cosines C = L Lᵀ and lengths ℓ, L⁻¹ diag(ℓ)⁻¹ φ is.
    """
    whole = storage.ranks is None and storage.dtype is None
    if whole and len(phi.source) == 1 and phi.is_long:
        gram = phi.gram()
        lengths = gram.diagonal().sqrt()
        factor, failed = torch.linalg.cholesky_ex(gram / lengths.outer(lengths))
        if not bool(failed) and bool((factor.diagonal() > _APART).all()):
            weights = torch.linalg.inv(factor) / lengths
            mix = lengths.unsqueeze(1) * factor
            return len(phi), partial(phi.combine, weights), mix, float(gram.trace())
    return len(phi), phi.dense, None, None


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


def _merged(phi: TangentFeatures) -> TangentFeatures:
    """The features as few pieces, with all first scalars of the samples first.

    A Gram matrix then takes one product instead of one for each pair of scalars.
    """
    return phi if len(phi.source.pieces(0)) == 1 else stored(phi)
