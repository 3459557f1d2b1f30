"""φ(X), one row per sample, as an operator that does not build its n×p matrix."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf
from typing import Protocol, Self, final

import torch
from torch import Tensor, nn

from forgetless.linalg import float64
from forgetless.support.memory import free_memory, total_memory
from forgetless.support.progress import advance
from forgetless.support.validation import ConfigError, require
from forgetless.tangent.blocks import Block, add_kernel, cuts, distinct_bytes, mirror
from forgetless.tangent.capture import Captured, SampleLayout, capture
from forgetless.tangent.evaluation import Batch, Evaluation, Scalar
from forgetless.tangent.spectrum import principal_weights, principal_weights_of_each

_BUDGET = 1 << 30  # bytes of captured chunks that are cached
_PROBE = 16  # samples that show how much memory one takes
# Most samples at once: these fit in a CPU's cache, or keep a GPU busy.
_CHUNK = {"cpu": 512, "cuda": 8192}
_SLOWNESS = {"unused": 0, "vmap": 2, "loop": 3}  # 1: a layer's rule

# Squared length of the longest feature below which float32 underflows for shorter ones.
_SMALL_SQUARE = 1e-20
_LONG = 1000  # parameters for each sample from which a Gram matrix takes less than sums of rows
_SOLVER_BYTES = 6 * 8  # the eigensolver's memory per entry of the Gram matrix: six in float64


def require_bytes(what: str, needed: int, like: Tensor) -> None:
    """Raise if so many bytes can never fit on the device of `like`."""
    # What others hold of main memory they may give back.
    available = free_memory(like.device) if like.is_cuda else total_memory(like.device)
    if needed > available:
        raise ConfigError(
            f"{what} would take {needed:,} bytes and {like.device} has {available:,.0f}: "
            "take fewer samples, or use phi @ v and phi.T @ u, which do not build it"
        )


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of φ (one scalar of each sample of a chunk), with a block for each parameter."""

    rows: slice
    blocks: Mapping[str, Block]


class FeatureSource(Protocol):
    """The rows of φ, a chunk at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of the columns."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Their numbers of columns."""

    @property
    def like(self) -> Tensor:
        """An empty tensor of the rows' dtype and device."""

    @property
    def height(self) -> int:
        """Number of rows."""

    @property
    def rules(self) -> Mapping[str, str]:
        """Parameter → how its gradients are computed or stored."""

    def __len__(self) -> int:
        """Number of chunks."""

    def pieces(self, index: int) -> Sequence[Piece]:
        """The pieces of one chunk."""


@final
@dataclass(frozen=True)
class Known:
    """What is known of samples of this network, scalar and shape from earlier ones.

    Arguments:
        sample_bytes: memory per sample.
        layout: their dimension in each layer, if it must be the same; None to find out.
    """

    sample_bytes: int
    layout: SampleLayout | None = None


@final
class Chunks:
    """The rows of φ for the samples of some evaluations, captured a chunk at a time.

    Arguments:
        evaluations: the same scalars of the same network, each for samples of one shape.
        chunk: samples that go through the network at once; None for as many as fit well.
        known: from similar samples; None measures a few.
    """

    def __init__(
        self, evaluations: Sequence[Evaluation], chunk: int | None, known: Known | None = None
    ) -> None:
        self.names = evaluations[0].names
        values = [evaluations[0].values[name] for name in self.names]
        self.sizes = tuple(value.numel() for value in values)
        self.like = torch.cat([value.new_empty(0) for value in values])
        self.kept: dict[int, list[Piece]] = {}
        self.kept_bytes = 0
        self.rules: dict[str, str] = {}
        free = int(free_memory(self.like.device)) if self.like.is_cuda else 0
        self.budget = max(_BUDGET, free // 4)
        self._layout = None if known is None else known.layout
        if chunk is None and known is not None:
            chunk = self._fitting(known.sample_bytes)
        size = min(evaluations[0].n, _PROBE if chunk is None else chunk)
        first = self._capture(evaluations[0].select(slice(0, size)))
        self.per_sample = len(first.blocks)  # K
        self.known = Known(max(1, _bytes(first) // size), first.layout)
        if chunk is None and size < max(evaluation.n for evaluation in evaluations):
            chunk = self._fitting(self.known.sample_bytes)
        self.parts = [
            evaluation.select(some)
            for evaluation in evaluations
            for some in cuts(evaluation.n, chunk or size)
        ]
        self.starts = list(accumulate((part.n for part in self.parts), initial=0))
        if self.parts[0].n == size:
            self._keep(0, first)

    def _fitting(self, sample_bytes: int) -> int:
        """How many samples fit well through the network at once."""
        most = _CHUNK.get(self.like.device.type, _CHUNK["cpu"])
        return max(1, min(most, self.budget // 8 // sample_bytes))

    @property
    def height(self) -> int:
        """Number of rows, n · K."""
        return self.starts[-1] * self.per_sample

    def __len__(self) -> int:
        return len(self.parts)

    def pieces(self, index: int) -> list[Piece]:
        """The K pieces of one chunk."""
        if index in self.kept:
            return self.kept[index]
        return self._keep(index, self._capture(self.parts[index]))

    def _capture(self, part: Evaluation) -> Captured:
        fallen = frozenset(name for name, rule in self.rules.items() if rule in ("vmap", "loop"))
        captured = capture(part, fallen, self._layout)
        for name, rule in captured.rules.items():
            # Report the slowest rule among the chunks.
            before = self.rules.get(name, "unused")
            if _SLOWNESS.get(before, 1) <= _SLOWNESS.get(rule, 1):
                self.rules[name] = rule
        return captured

    def _keep(self, index: int, captured: Captured) -> list[Piece]:
        start, stop, count = self.starts[index], self.starts[index + 1], len(captured.blocks)
        if count != self.per_sample:
            raise ConfigError(
                f"every sample must have as many scalars as the first, {self.per_sample}, "
                f"not {count}"
            )
        pieces = [
            Piece(slice(start * count + k, stop * count, count), blocks)
            for k, blocks in enumerate(captured.blocks)
        ]
        advance("gradients of samples", stop, self.starts[-1])
        used = _bytes(captured)
        if self.kept_bytes + used <= self.budget:
            self.kept[index] = pieces
            self.kept_bytes += used
        return pieces


def _bytes(captured: Captured) -> int:
    blocks = (block for piece in captured.blocks for block in piece.values())
    return distinct_bytes(t for block in blocks for t in block.tensors())


@final
class TangentFeatures:
    """φ = ∂s(x_i)/∂θ, (n, p), layer by layer, as factors where the layer allows.

    Every operation runs over chunks of samples. Later changes of the network's weights have no
    effect; the inputs are not copied.

    Arguments:
        source: the rows.
    """

    def __init__(self, source: FeatureSource) -> None:
        self.source = source
        self.names, self.sizes, self.like = source.names, source.sizes, source.like

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p), or (n · K, p) with K scalars per sample."""
        return self.source.height, sum(self.sizes)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def is_long(self) -> bool:
        """Whether a Gram matrix in float64 takes less time than a few sums of rows."""
        return self.shape[1] > _LONG * len(self)

    @property
    def rules(self) -> dict[str, str]:
        """Parameter → how its gradients are computed: by the layer's rule, "vmap" or "loop".

        The rule "layer" runs a layer of an unknown type again for each sample.
        """
        return dict(self.source.rules)

    @property
    def known(self) -> Known | None:
        """What these samples say about similar ones; None if φ is stored."""
        return self.source.known if isinstance(self.source, Chunks) else None

    def __repr__(self) -> str:
        n, p = self.shape
        return f"TangentFeatures(n={n}, p={p}, rules={sorted(set(self.rules.values()))})"

    def dense(self, out: Tensor | None = None) -> Tensor:
        """φ itself, (n, p), in new memory or where it is to be written."""
        n, p = self.shape
        if out is None:
            require_bytes("φ as a matrix", n * p * self.like.element_size(), self.like)
            out = self.like.new_empty(n, p)
        for piece in self.pieces():
            for name, columns in self.columns():
                out[piece.rows, columns] = piece.blocks[name].rows().to(self.like)
        return out

    def gram(self) -> Tensor:
        """φ φᵀ, (n, n) in float64."""
        return self._products(self, float64(self.like))

    def gram_over(self, names: Sequence[str]) -> Tensor:
        """The named parameters' part of φ φᵀ, (n, n) in float64."""
        return self._products(self, float64(self.like), names)

    def cross_gram(self, other: Self) -> Tensor:
        """φ φ'ᵀ, (n, n') in float64, with features φ' of other samples or at other weights."""
        if not isinstance(other, TangentFeatures):
            raise ConfigError(f"other must be TangentFeatures, not {type(other).__name__}")
        if (self.names, self.sizes) != (other.names, other.sizes):
            raise ConfigError(
                "cross_gram needs features of the same parameters: "
                f"{_described(self)} here, {_described(other)} there"
            )
        here, there = self.like.device, other.like.device
        require(here == there, "other's device", str(there), f"{here}, as these features'")
        return self._products(other, float64(self.like))

    def _products(self, other: Self, like: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """φ φ'ᵀ, computed in the precision of `like`."""
        n, m = len(self), len(other)
        require_bytes("the Gram matrix", like.element_size() * n * m, self.like)
        out = like.new_zeros(n, m)
        for i in range(len(self.source)):
            mine = self.source.pieces(i)
            # A symmetric matrix needs one half only.
            for j in range(i if other is self else 0, len(other.source)):
                theirs = mine if other is self and j == i else other.source.pieces(j)
                for a, b in product(mine, theirs):
                    for name in self.names if names is None else names:
                        add_kernel(a.blocks[name], b.blocks[name], out[a.rows, b.rows])
        if other is self:
            mirror(out)
        return out

    def __matmul__(self, v: Tensor) -> Tensor:
        """φ v: (p,) → (n,), or (p, k) → (n, k)."""
        v, is_vector = _columns_of(v, self.shape[1], "phi @ v", self.like)
        out = v.new_zeros(len(self), v.shape[1])
        for piece in self.pieces():
            for name, columns in self.columns():
                out[piece.rows] += piece.blocks[name].apply(v[columns])
        return out[:, 0] if is_vector else out

    @property
    def T(self) -> "Transposed":  # noqa: N802
        """φᵀ, (p, n)."""
        return Transposed(self)

    def combine(self, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """W φ: (k, n) → (k, p).

        Arguments:
            weights: W.
            out: where to write it, (k, p); None for new memory.
        """
        accepted = f"a tensor (k, {len(self)})"
        fits = weights.dim() == 2 and weights.shape[1] == len(self)
        require(fits, "weights of phi.combine", tuple(weights.shape), accepted)
        weights = weights.to(self.like)
        out = weights.new_empty(len(weights), self.shape[1]) if out is None else out
        beta = 0
        for piece in self.pieces():
            some = weights[:, piece.rows].contiguous()
            for number, (name, columns) in enumerate(self.columns()):
                piece.blocks[name].add_combined(some, out[:, columns], beta)
                advance("directions", number + 1, len(self.names))
            beta = 1
        return out if beta else out.zero_()

    def squared_sum(self) -> Tensor:
        """Σ_i φ_i², element by element, (p,)."""
        out = self.like.new_zeros(self.shape[1])
        for piece in self.pieces():
            for name, columns in self.columns():
                out[columns] += piece.blocks[name].squared_sum()
        return out

    def top(self, components: int | float, *, centred: bool = False) -> tuple[Tensor, Tensor]:
        """The top right singular vectors of φ: the directions in which the samples' outputs move.

        With φ φᵀ = U Σ² Uᵀ they are V = Σ⁻¹ Uᵀ φ, from the n×n Gram matrix and one product.

        Arguments:
            components: number of directions (an int), or the share of the variance that they
                explain together (a float in (0, 1)).
            centred: subtract the mean feature first, as PCA does.

        Returns:
            singular values (k,) and orthonormal directions (k, p), k at most the rank.
        """
        values, weights, _ = self.top_weights(components, centred=centred)
        return values.to(self.like), _straightened(self.combine(weights.to(self.like)))

    def top_weights(
        self, components: int | float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor, float]:
        """The top directions as weighted sums of samples: the rows of W φ, with W = Σ⁻¹ Uᵀ.

        Returns:
            singular values (k,) and W (k, n) in float64, and Σ_i ‖φ_i‖² (after centring).
        """
        gram = self.precise_enough_gram()
        return principal_weights(gram, components, centred=centred, dtype=self.like.dtype)

    def precise_enough_gram(self) -> Tensor:
        """φ φᵀ, (n, n), in float32 where that suffices for its top directions, else in float64.

        Of few long rows in float64: their sums then need no correction, which would take longer.
        """
        like = float64(self.like) if self.is_long else _precise_enough(self.like)
        gram = self._products(self, like)
        fits = gram.dtype == torch.float64 or _SMALL_SQUARE < float(gram.diagonal().max()) < inf
        return gram if fits else self.gram()

    def pieces(self) -> Iterator[Piece]:
        """The rows, piece by piece."""
        for index in range(len(self.source)):
            yield from self.source.pieces(index)

    def columns(self) -> Iterator[tuple[str, slice]]:
        """Each parameter's name and its columns."""
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            yield name, slice(start, start + size)
            start += size


@final
@dataclass(frozen=True)
class Transposed:
    """φᵀ, (p, n)."""

    T: TangentFeatures

    @property
    def shape(self) -> tuple[int, int]:
        """(p, n)."""
        n, p = self.T.shape
        return p, n

    def __matmul__(self, u: Tensor) -> Tensor:
        """φᵀ u: (n,) → (p,), or (n, k) → (p, k)."""
        u, is_vector = _columns_of(u, len(self.T), "phi.T @ u", self.T.like)
        out = self.T.combine(u.T)
        return out[0] if is_vector else out.T


def _precise_enough(like: Tensor) -> Tensor:
    """An empty tensor in the precision that a Gram matrix needs for its top directions.

    Entries of a float32 product of float32 features have independent errors of about
    ε ‖φ_i‖ ‖φ_j‖: as a matrix 2 √n times that, while the largest eigenvalue grows with n. The error
    counts as noise, and float32 takes half the time on a CPU. Not if products are rounded further.
    """
    full = torch.get_float32_matmul_precision() == "highest"
    return like if like.dtype == torch.float32 and not like.is_cuda and full else float64(like)


def features_of(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    scalar: Scalar,
    *,
    names: Sequence[str],
    chunk: int | None = None,
    lasting: bool = False,
    known: Known | None = None,
) -> TangentFeatures:
    """The gradients of K scalars per sample with respect to the named parameters.

    Arguments:
        module: the network, in eval mode (a sample's output must not depend on the others).
        values: its parameters and buffers, by name.
        batches: the samples, in parts whose shapes may differ (sequences of different lengths).
        scalar: from outputs and targets of n samples to (n,) or (n, K).
        names: the parameters, in the order of the columns of φ.
        chunk: samples that go through the network at once.
        lasting: the values will not be changed; otherwise they are copied.
        known: from earlier features of the same scalars of the same network.
    """
    first, *others = batches
    evaluation = Evaluation.at(module, values, names, first, scalar, lasting=lasting)
    return TangentFeatures(Chunks([evaluation, *map(evaluation.on, others)], chunk, known))


def _columns_of(v: Tensor, length: int, product: str, like: Tensor) -> tuple[Tensor, bool]:
    """The right factor of a product as (length, k), and whether it was a vector."""
    if not isinstance(v, Tensor):
        raise ConfigError(f"{product} needs a tensor, not {type(v).__name__}")
    fits = v.dim() in (1, 2) and v.shape[0] == length
    require(fits, f"the shape of {product[-1]} in {product}", tuple(v.shape), f"({length}, k)")
    v = v.to(like)
    return (v.unsqueeze(1), True) if v.dim() == 1 else (v, False)


def _straightened(directions: Tensor) -> Tensor:
    """Nearly orthonormal rows made orthonormal: L⁻¹ V with V Vᵀ = L Lᵀ.

    The first directions, the best determined ones, change least.
    """
    gram = float64(directions @ directions.T)
    off = float((gram - torch.eye(len(gram)).to(gram)).abs().max()) if len(gram) else 0.0
    if off <= 50 * torch.finfo(directions.dtype).eps:
        return directions
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):
        return directions
    inverse: Tensor = torch.linalg.inv(factor)
    return inverse.to(directions) @ directions


def _described(phi: TangentFeatures) -> str:
    return f"{phi.shape[1]} numbers of {len(phi.names)} parameters ({phi.names[0]}, …)"


def top_weights_of_each(
    features: Sequence[TangentFeatures], components: int | float, *, centred: bool
) -> list[tuple[Tensor, Tensor, float]]:
    """`TangentFeatures.top_weights` of each, all at once on a GPU with enough memory."""
    like = features[0].like
    needed = _SOLVER_BYTES * sum(len(phi) ** 2 for phi in features)
    if not like.is_cuda or needed > free_memory(like.device):
        return [phi.top_weights(components, centred=centred) for phi in features]
    grams = [phi.precise_enough_gram() for phi in features]
    return principal_weights_of_each(grams, components, centred=centred, dtype=like.dtype)
