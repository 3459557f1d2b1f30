"""Vectors in parameter space: linear algebra on them, and which columns belong to which parameter.

A vector is a tensor (*, p), its leading dimensions those of independent problems (the seeds of a
run). A basis is (*, K, p) with orthonormal *rows*; rows of zeros stand for no direction, which
lets problems of different rank be stacked.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import final

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

# The relative residual, in units of rounding, at which a row counts as dependent on others.
_RESIDUAL_ULPS = 100.0
# Added to the Gram matrix of unit vectors, to make it positive definite.
_RIDGE = 1e-10
# In place of a divisor that is zero: less than any sum of squares that matters.
TINY = 1e-300
# Columns of the blocks of a symmetric product: the least that is fast, and how many blocks.
_BLOCK, _BLOCKS = 128, 8
# The size of a product that keeps all of a GPU's processors busy.
_BUSY = 1 << 18


def float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def inner(u: Tensor, v: Tensor) -> Tensor:
    """⟨u, v⟩ over the last dimension: (*, p), (*, p) → (*)."""
    return (u * v).sum(-1)


def add_scaled(u: Tensor, scale: Tensor | float, v: Tensor) -> Tensor:
    """u + scale · v with one scale per problem: (*, p), (*), (*, p) → (*, p)."""
    if isinstance(scale, Tensor):
        scale = scale.unsqueeze(-1)
    return u + scale * v


def matmul_long_rows(a: Tensor, b: Tensor) -> Tensor:
    """A Bᵀ of few long rows: (d, p), (K, p) → (d, K).

    A small product is summed in chunks on a GPU, which uses all of its processors.
    """
    width = _chunk(a.device)
    whole = a.shape[1] // width * width
    if len(a) * len(b) > _BUSY:
        whole = 0
    product: Tensor = a[:, whole:] @ b[:, whole:].T
    if whole:
        left, right = (t[:, :whole].unflatten(1, (-1, width)).movedim(1, 0) for t in (a, b))
        product += (left @ right.mT).sum(0)
    return product


def project_out(g: Tensor, basis: Tensor, *, passes: int = 1) -> Tensor:
    """g̃ = g − Vᵀ V g, the part of g orthogonal to every row of the basis V.

    Arguments:
        g: (*, p), or several rows (*, n, p).
        basis: V, (*, K, p), orthonormal rows.
        passes: a second pass removes what the rounding of the first left.
    """
    if basis.shape[-2] == 0:
        return g
    alone = g.dim() < basis.dim()
    rows = g.unsqueeze(-2) if alone else g
    for _ in range(passes):
        rows = rows - (rows @ basis.mT) @ basis
    return rows.squeeze(-2) if alone else rows


def project_out_span(g: Tensor, vectors: Tensor) -> Tensor:
    """The part of g orthogonal to vectors that need not be orthonormal: g − Rᵀ (R Rᵀ)⁺ R g.

    The pseudo-inverse is replaced by (R Rᵀ + ε)⁻¹, which leaves ε / (λ + ε) of the component along
    an eigenvector of λ; a second pass removes it. Nothing waits for a result, so a GPU can record
    it.

    Arguments:
        g: (*, p).
        vectors: R, (*, K, p), any rank; K is small, the K×K system is solved in float64.
    """
    rows, gram, lengths, _ = _chunks_and_gram(vectors)
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    factor, _ = torch.linalg.cholesky_ex(gram)
    rest = _chunks(g.unsqueeze(-2)).mT  # (*, m, c, 1)
    for _ in range(2):
        products = (rows @ rest).sum(-3) / lengths.unsqueeze(-1)  # (*, K, 1)
        along = torch.linalg.solve_triangular(factor, products, upper=False)
        coefficients = torch.linalg.solve_triangular(factor.mT, along, upper=True)
        coefficients = coefficients / lengths.unsqueeze(-1)
        rest = rest - rows.mT @ coefficients.unsqueeze(-3)
    return rest.flatten(-3)[..., : g.shape[-1]].to(g)


def _chunks_and_gram(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Vectors (*, K, p) in chunks, the cosines between them and their lengths, in float64.

    Cosines, because a small vector constrains as much as a large one.

    Returns:
        the chunks (*, m, K, c) of scaled vectors, their cosines (*, K, K), their lengths (*, K),
        1 for vectors of zeros, and the lengths before scaling (*, K).
    """
    scales = vectors.new_ones(vectors.shape[:-1])
    if vectors.dtype == torch.float64:  # only its squares can be out of float64's range
        scales = vector_norm(vectors, torch.inf, dim=-1)
        scales = torch.where(scales == 0, 1, scales)
        vectors = vectors / scales.unsqueeze(-1)
    rows = _chunks(vectors)
    gram = (rows @ rows.mT).sum(-3)
    squares = gram.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares == 0, 1, squares).sqrt()
    cosines = gram / lengths.unsqueeze(-1) / lengths.unsqueeze(-2)
    return rows, cosines, lengths, lengths * scales.to(lengths)


def product_with_itself(rows: Tensor) -> Tensor:
    """Xᵀ X of rows (N, d), computed in their precision."""
    out = rows.new_zeros(rows.shape[1], rows.shape[1])
    add_product(rows, out)
    return mirrored(out)


def add_product(rows: Tensor, out: Tensor) -> None:
    """Add Xᵀ X of rows (N, d) to `out` (d, d), in their precision.

    A CPU computes the blocks on and above the diagonal, which saves most of half the work; those
    below it are left to `mirrored`.
    """
    for start, stop in _row_blocks(out):
        out[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:])


def mirrored(out: Tensor) -> Tensor:
    """The same matrix (d, d) with the blocks that `add_product` has left out."""
    for start, stop in _row_blocks(out):
        out[stop:, start:stop] = out[start:stop, stop:].mT
    return out


def _row_blocks(out: Tensor) -> Iterator[tuple[int, int]]:
    """The rows of the blocks of a symmetric product: from, to."""
    d = len(out)
    whole = out.device.type != "cpu" or d < 2 * _BLOCK
    height = max(d, 1) if whole else max(_BLOCK, -(-d // _BLOCKS))
    return ((start, min(start + height, d)) for start in range(0, d, height))


def _chunk(device: torch.device) -> int:
    """Columns per chunk of a product; each processor of a GPU sums one."""
    return 4096 if device.type == "cuda" else sys.maxsize


def _chunks(rows: Tensor) -> Tensor:
    """Rows (*, K, p) in float64, their columns cut into m chunks: (*, m, K, c).

    A GPU would sum the small products of few long rows on one processor.
    """
    p = rows.shape[-1]
    width = min(p, _chunk(rows.device))
    if missing := -p % width:
        rows = pad(rows, (0, missing))
    rows = (rows.cpu() if rows.device.type == "mps" else rows).unflatten(-1, (-1, width))
    return rows.movedim(-2, -3).to(torch.float64, memory_format=torch.contiguous_format)


def orthonormalize(vectors: Tensor, against: Tensor | None = None, *, least: float = 0.0) -> Tensor:
    """Orthonormal rows that, with those of `against`, span what the vectors span.

    Classical Gram-Schmidt against the old rows and Householder QR among the new ones, each done
    twice (Kahan's "twice is enough"). Vectors that depend on earlier ones, or are zero, are
    dropped: normalising their rounding would add a random direction.

    Arguments:
        vectors: (d, p), any rank.
        against: (K, p), orthonormal rows, or None.
        least: share of a vector's length outside `against` below which it adds nothing, for rows
            that are less precise than their dtype.

    Returns:
        (r, p) with r ≤ d.
    """
    rows, old = _normalized(vectors), vectors[:0] if against is None else against
    rows = project_out(rows, old, passes=2)
    rows = _independent(rows[vector_norm(rows, dim=1) >= least])
    return _independent(project_out(rows, old, passes=2))


def _normalized(rows: Tensor) -> Tensor:
    """Rows (*, p) of length one, or zero where they are zero."""
    # Scaled by the largest entry first, so that the norm of a tiny or huge row is finite.
    tiny = torch.finfo(rows.dtype).tiny
    rows = rows / rows.abs().amax(-1, keepdim=True).clamp_min(tiny)
    lengths: Tensor = vector_norm(rows, dim=-1, keepdim=True)
    return rows / lengths.clamp_min(tiny)


def _independent(rows: Tensor) -> Tensor:
    """An orthonormal basis of the rows (each of length ≤ 1), less those that add only rounding."""
    tolerance = _RESIDUAL_ULPS * torch.finfo(rows.dtype).eps
    rows = rows[vector_norm(rows, dim=1) > tolerance]
    while rows.shape[0]:
        # R_ii is the length of row i outside the rows before it.
        q, r = torch.linalg.qr(rows.T)
        kept = r.diagonal().abs() > tolerance
        if bool(kept.all()):
            # Its rounding grows with the coefficients of row i on those rows, R_ii (R⁻¹)_ji.
            square = r[:, : len(r)]
            inverse = torch.linalg.solve_triangular(square, torch.eye(len(r)).to(r), upper=True)
            unsure = torch.nonzero(tolerance * vector_norm(inverse, dim=0) >= 1)
            if len(unsure) == 0:
                basis: Tensor = q.T
                return basis
            kept[unsure[0]] = False  # only the first: it may be what makes later ones unsure
        # The column of q of a dropped row is arbitrary, and later ones avoid it: factor again.
        examined = kept.shape[0]  # min(rows, p)
        rows = torch.cat([rows[:examined][kept], rows[examined:]])
    return rows


def project_halfspace(g: Tensor, reference: Tensor) -> Tensor:
    """The vector nearest to g with ⟨·, r⟩ ≥ 0: g − min(0, ⟨g, r⟩) / ⟨r, r⟩ · r.

    A-GEM's projection (Chaudhry et al. 2019, eq. 11).

    Arguments:
        g: (*, p).
        reference: r, (*, p). Where it is zero, g is returned.
    """
    unit = _normalized(reference)  # a short reference constrains as much as a long one
    return add_scaled(g, -inner(g, unit).clamp_max(0), unit)


def project_cone(g: Tensor, references: Tensor, margin: float = 0.0) -> Tensor:
    """The vector nearest to g with ⟨·, r_k⟩ ≥ 0 for all k, by GEM's quadratic programme.

    The dual is min over v ≥ margin of ½ ‖Rᵀ v + g‖² (Lopez-Paz and Ranzato 2017, eq. 12), a
    non-negative least-squares problem, solved by `scipy.optimize.nnls`; the result is g + Rᵀ v.
    A positive margin lengthens the step towards the memories, as GEM's code does. Where no
    constraint is violated, g is returned unchanged.

    Arguments:
        g: (*, p).
        references: R, (*, K, p).
        margin: lower bound of the dual variables.
    """
    rows, gram, lengths, true_lengths = _chunks_and_gram(references)
    products = (rows @ _chunks(g.unsqueeze(-2)).mT).sum(-3).squeeze(-1) / lengths  # (*, K)
    k = products.shape[-1]
    duals = [
        _cone_duals(*problem)
        for problem in zip(
            gram.reshape(-1, k, k).cpu().numpy(),
            products.reshape(-1, k).cpu().numpy(),
            (margin * true_lengths).reshape(-1, k).cpu().numpy(),
            strict=True,
        )
    ]
    v = torch.from_numpy(np.stack(duals)).to(lengths).reshape(products.shape) / lengths
    step = v.unsqueeze(-2).unsqueeze(-3) @ rows  # (*, m, 1, c)
    return g + step.flatten(-3)[..., : g.shape[-1]].to(g)


def _cone_duals(gram: np.ndarray, products: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Argmin over v ≥ margins of ½ vᵀ G v + qᵀ v, or zero where q ≥ 0 already."""
    if not (np.isfinite(gram).all() and np.isfinite(products).all()):
        return np.full_like(products, np.nan)  # the caller detects the divergence
    if bool((products >= 0).all()):
        return np.zeros_like(products)
    # With G = L Lᵀ (L from the eigenvectors, so that equal references do no harm) and
    # v = w + margins it is min over w ≥ 0 of ‖Lᵀ w − b‖², L b = −(q + G · margins).
    values, vectors = np.linalg.eigh(gram)
    kept = values > np.finfo(np.float64).eps * len(values) * values[-1]
    if not kept.any():
        return np.zeros_like(products)
    root = np.sqrt(values[kept])
    target = -(vectors[:, kept].T @ (products + gram @ margins)) / root
    solution, _ = nnls(root[:, None] * vectors[:, kept].T, target)
    duals: np.ndarray = np.asarray(solution) + margins
    return duals


def is_under(name: str, beginnings: Iterable[str]) -> bool:
    """Whether a parameter's name is, or begins with, one of these, in whole parts.

    "fc1" and "fc1." are the beginning of "fc1.weight", not of "fc10.weight".
    """
    return any(f"{name}.".startswith(f"{one.removesuffix('.')}.") for one in beginnings)


@final
@dataclass(frozen=True)
class ParameterSlice:
    """The indices start … stop − 1 of one dimension of a parameter.

    Arguments:
        shape: of the whole parameter.
        dim: the dimension that is cut.
        start, stop: range of indices in this slice.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Shape of the slice."""
        here = list(self.shape)
        here[self.dim] = self.stop - self.start
        return tuple(here)

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape_here)

    def of(self, whole: Tensor) -> Tensor:
        """The slice's columns (n, size) of rows (n, entries of the whole parameter)."""
        shaped: Tensor = whole.unflatten(1, self.shape)
        return shaped.narrow(1 + self.dim, self.start, self.stop - self.start).flatten(1)


@final
@dataclass(frozen=True)
class Layout:
    """Where in a vector (…, p) each parameter lies, in the order of `shapes`.

    Arguments:
        shapes: parameter → its shape.
        slices: parameter → the slice of it that is here, for a model that is sharded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    slices: Mapping[str, ParameterSlice] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Parameter → its columns."""
        ends = accumulate(self._sizes)
        pairs = zip(self.shapes, zip(ends, self._sizes, strict=True), strict=True)
        return {name: slice(end - size, end) for name, (end, size) in pairs}

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter → its shape, also where only a slice of it is here."""
        own = self.slices
        return {n: own[n].shape if n in own else shape for n, shape in self.shapes.items()}

    @property
    def size(self) -> int:
        """p."""
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes.values()]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a vector (…, p) as a view (…, *shape)."""
        parts = vector.split(self._sizes, dim=-1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view((*part.shape[:-1], *shape)) for (name, shape), part in named}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector (…, p) of parts (…, *shape) by name; a missing part counts as zero."""
        some = next(iter(parts.items()))
        lead = some[1].shape[: some[1].dim() - len(self.shapes[some[0]])]
        columns = [
            parts[n].reshape(*lead, size) if n in parts else some[1].new_zeros(*lead, size)
            for n, size in zip(self.shapes, self._sizes, strict=True)
        ]
        return torch.cat(columns, dim=-1)


@final
@dataclass(frozen=True)
class Growth:
    """More weights in a network: further rows of parameters, and further parameters.

    Arguments:
        old: the layout before.
        new: that after, in which each old parameter's rows are the first.
    """

    old: Layout
    new: Layout

    def new_rows(self, name: str) -> int:
        """How many rows an old parameter gets."""
        shapes = self.old.shapes[name], self.new.shapes[name]
        before, after = (shape[0] if shape else 1 for shape in shapes)
        return after - before

    def spread(self, values: Tensor, onto: Tensor) -> Tensor:
        """`onto` (…, p') with values (…, p) at the old weights."""
        out = onto.clone()
        for name, some in self.old.columns.items():
            start = self.new.columns[name].start
            out[..., start : start + some.stop - some.start] = values[..., some]
        return out

    def padded(self, values: Tensor) -> Tensor:
        """Values (…, p) with zeros at the new weights, (…, p')."""
        return self.spread(values, values.new_zeros(*values.shape[:-1], self.new.size))
