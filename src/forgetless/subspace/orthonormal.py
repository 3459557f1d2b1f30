"""Orthonormal rows of vectors that are too large to copy."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import solve_triangular, vector_norm

from forgetless.linalg import float64, matmul_long_rows
from forgetless.support.collectives import Ranks

# Numbers converted to float64 at once: those that fit a cache, or keep a GPU busy.
_CONVERTED = {"cpu": 1 << 20, "cuda": 1 << 27}
# The largest inner product between rows that count as orthonormal.
_SETTLED = {torch.float32: 1e-6, torch.float64: 1e-14}
# Inner products that one more round takes below that: each round squares them.
_NEARLY = {torch.float32: 1e-4, torch.float64: 1e-8}
# Both for old rows rounded to half precision, whose own inner products are no smaller.
_HALF_SETTLED, _HALF_NEARLY = 1e-4, 1e-2
# The relative residual of a row below which it depends on others: the rest is rounding.
_RESIDUAL = 1e-5
# The same in the second round, for old rows in half precision: what their rounding left may have
# been normalised in the first round, whereas new rows are orthonormal up to that rounding by now.
_HALF_RESIDUAL = 0.1
# Columns whose squares, and whose products, are summed in the rows' own precision.
_PIECE, _SUMMED = 1024, 4096
# Rows whose lengths are one up to this share need not be scaled before their overlaps are found.
_UNIT = 1e-3
# What corrections of nearly orthonormal rows have at most, so that float32 suffices for them: the
# numbers in one, and the overlap of two rows.
_MILD, _MILD_OVERLAP = 4.0, 0.1


def orthonormalize_in_place(
    vectors: Tensor,
    against: Tensor,
    *,
    lengths: Tensor | None = None,
    least: float = 0.0,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linalg.orthonormalize` in the memory of the vectors, which are overwritten.

    Block Gram-Schmidt against the old rows Q and Cholesky QR among the new ones, repeated until all
    are orthonormal: with G = W Wᵀ = L Lᵀ in float64, L⁻¹ W is. A few columns are read at a time.

    Arguments:
        vectors: W, (d, p) in float32, or in float64 on several ranks.
        against: Q, (K, p), orthonormal rows.
        lengths: of the vectors, (d,) in float64, if known.
        least: share of a vector's length outside Q below which it adds nothing.
        ranks: the processes that each hold some of the p columns; None if all are here.

    Returns:
        new rows N (r, p), and the coefficients A (d, K) and B (d, r) of W = A Q + B N in
        float64.
    """
    d = len(vectors)
    old = float64(vectors.new_zeros(d, len(against)))
    new = torch.eye(d).to(old)
    lengths = lengths_of_long(vectors, ranks) if lengths is None else lengths
    lengths = lengths.to(old).clamp_min(torch.finfo(vectors.dtype).tiny)
    is_unit, in_float32 = bool(((lengths - 1).abs() <= _UNIT).all()), _is_full_float32(vectors)
    if not is_unit:
        vectors /= lengths.unsqueeze(1).to(vectors)
        new = new * lengths
    half = len(against) > 0 and against.element_size() < vectors.element_size() == 4
    settled = _HALF_SETTLED if half else _SETTLED[vectors.dtype]
    nearly = _HALF_NEARLY if half else _NEARLY[vectors.dtype]
    for round_ in range(3):
        # The second round removes what rounding in the first left inside Q.
        again = round_ > 0
        exact = again and not half and not in_float32
        inside = _products(vectors, against, exact=exact, ranks=ranks)
        old = old + new @ inside
        _subtract(vectors, inside, against, exact=exact)
        if least:
            vectors *= (_lengths(vectors, ranks) >= least).unsqueeze(1).to(vectors)
        # Rows that nearly depend on each other need their overlaps exactly, others do not.
        exact = not (in_float32 and (again or is_unit))
        gram = _products(vectors, vectors, exact=exact, ranks=ranks)
        if not exact and _overlap(gram) > _MILD_OVERLAP:
            gram = _products(vectors, vectors, ranks=ranks)
        error = max(_overlap(gram), float(inside.abs().max()) if inside.numel() else 0.0)
        if error <= settled:
            break
        dependent = max(_RESIDUAL, _HALF_RESIDUAL if again and half else least)
        factor, kept = _factor(gram, dependent)
        if len(kept) < len(vectors):
            vectors = vectors[kept]
        new = new @ factor
        inverse = solve_triangular(factor[kept], torch.eye(len(kept)).to(factor), upper=False)
        mild = in_float32 and bool((inverse.abs() <= _MILD).all())
        for (part,) in _cut(vectors):
            like = part if mild else inverse
            part.copy_(inverse.to(like) @ part.to(like))
        if again and error <= nearly:
            break
    return vectors, old, new


def _overlap(gram: Tensor) -> float:
    """How far rows are from orthonormal, by their Gram matrix."""
    return float((gram - torch.eye(len(gram)).to(gram)).abs().max()) if len(gram) else 0.0


def _is_full_float32(rows: Tensor) -> bool:
    """Whether float32 products of rows on a CPU are rounded as float32 only, and are fast."""
    full = torch.get_float32_matmul_precision() == "highest"
    return rows.device.type == "cpu" and rows.dtype == torch.float32 and full


def _subtract(vectors: Tensor, inside: Tensor, against: Tensor, *, exact: bool) -> None:
    """`vectors` ← `vectors` − A Q, in place."""
    for part, rows in _cut(vectors, against):
        if exact:
            part.sub_((inside @ float64(rows).to(inside)).to(part))
        else:
            part.addmm_(inside.to(part), rows.to(part), alpha=-1)


def _factor(gram: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """L (d, r) with G ≈ L Lᵀ, and the r rows of G that do not depend on those before them.

    A row depends on them if less than `least` of it is left outside them, or rounding, which grows
    with its coefficients c on them as √(1 + ‖c‖²) = L_ii ‖row i of L⁻¹‖.
    """
    size = len(gram)
    whole, failed = torch.linalg.cholesky_ex(gram)
    inverse = solve_triangular(whole, torch.eye(size).to(whole), upper=False)
    sure = (whole.diagonal() > least) & (_RESIDUAL * inverse.norm(dim=1) < 1) & (failed == 0)
    if bool(sure.all()):
        return whole, torch.arange(size, device=gram.device)
    kept: list[int] = []
    found = gram.new_zeros(size, 0).cpu()
    rest = gram.cpu().clone()
    for i in range(size):
        c = solve_triangular(found[kept].T, found[i].unsqueeze(1), upper=True)
        if float(rest[i, i]) <= max(least**2, _RESIDUAL**2 * (1 + float(c.square().sum()))):
            continue
        column = rest[:, i] / rest[i, i].sqrt()
        column[kept] = 0.0
        rest -= torch.outer(column, column)
        found = torch.cat([found, column.unsqueeze(1)], 1)
        kept.append(i)
    return found.to(gram), torch.tensor(kept, dtype=torch.long, device=gram.device)


def lengths_of_long(rows: Tensor, ranks: Ranks | None = None) -> Tensor:
    """The rows' lengths in float64, (d, p) → (d,), even where their squares would overflow."""
    found = _norms(rows)
    limits = torch.finfo(rows.dtype)
    unsafe = (found < _PIECE * limits.tiny**0.5) | ~found.isfinite()
    if rows.shape[1] and bool(unsafe.any()):
        some = rows[unsafe]
        scale = some.abs().amax(1, keepdim=True).clamp_min(limits.tiny)
        found[unsafe] = float64(scale[:, 0]) * _norms(some / scale)
    return _over_ranks(found, ranks)


def _lengths(rows: Tensor, ranks: Ranks | None) -> Tensor:
    """The same for rows whose lengths are about one."""
    return _over_ranks(_norms(rows), ranks)


def _norms(rows: Tensor) -> Tensor:
    """Lengths, (d,) in float64.

    Short pieces are summed in the rows' own precision, which is far faster, and the pieces in
    float64: in float32 alone a millionth would be lost.
    """
    whole = rows.shape[1] // _PIECE * _PIECE
    pieces = vector_norm(rows[:, :whole].unflatten(1, (-1, _PIECE)), dim=2)
    rest = vector_norm(rows[:, whole:], dim=1, keepdim=True)
    found: Tensor = vector_norm(float64(torch.cat([pieces, rest], dim=1)), dim=1)
    return found


def _over_ranks(lengths: Tensor, ranks: Ranks | None) -> Tensor:
    """The lengths of rows whose columns are spread over ranks."""
    return lengths if ranks is None else ranks.sum(lengths.square()).sqrt()


def _products(a: Tensor, b: Tensor, *, exact: bool = True, ranks: Ranks | None = None) -> Tensor:
    """A Bᵀ in float64, or computed in the precision of A.

    On a CPU products over few columns are summed in float64: they lose less than 1e-7 of the rows'
    lengths, and take a fifth of the time of exact ones.
    """
    out = float64(a.new_zeros(len(a), len(b)))
    if not exact and out.numel() and _is_full_float32(a):
        for left, right in zip(a.split(_SUMMED, 1), b.split(_SUMMED, 1), strict=True):
            out += left @ right.to(left).T
        return out if ranks is None else ranks.sum(out)
    for left, right in _cut(a, b):
        if exact:
            out += matmul_long_rows(float64(left).to(out), float64(right).to(out))
        else:
            out += matmul_long_rows(left, right.to(left)).to(out)
    return out if ranks is None or out.numel() == 0 else ranks.sum(out)


def _cut(*several: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """All tensors, a few columns at a time."""
    most = max(len(rows) for rows in several)
    numbers = _CONVERTED.get(several[0].device.type, _CONVERTED["cpu"])
    width = max(1, numbers // max(1, most))
    return zip(*(rows.split(width, dim=1) for rows in several), strict=True)
