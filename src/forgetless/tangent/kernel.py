"""Inner products of the per-sample gradients of one parameter: its part of a Gram matrix."""

from collections.abc import Iterator
from math import isqrt

from torch import Tensor

from forgetless.tangent.blocks import Block, Outer, scratch
from forgetless.tangent.factors import Dense, cuts, inner

# Rows of a symmetric product that are computed at once, from the diagonal to the right: what saves
# most of a CPU's work, and so many that a GPU is kept busy.
_STRIPE = {"cpu": 1 << 9, "cuda": 1 << 13}


def add_kernel(a: Block, b: Block, out: Tensor) -> None:
    """Add a parameter's part of φ φ'ᵀ to `out`, (n, n'), computed in its precision.

    Of two blocks of outer products either the rows are built, r · c numbers each, or
    ⟨G_i, G'_j⟩ = Σ_ts ⟨L_it, L'_js⟩ ⟨R_it, R'_js⟩ is summed over pairs of positions, whichever
    takes less arithmetic. For a linear layer on plain vectors that is (D D'ᵀ)∘(A A'ᵀ). Of a block
    with itself only what is on and above the diagonal is right; `mirror` does the rest.
    """
    if not isinstance(a, Outer) or not isinstance(b, Outer):
        left, right = a.rows(), b.rows()
        for some in cuts(a.size, scratch(out) // max(len(left), len(right))):
            _add_product(left[:, some], right[:, some], a is b, out)
    elif _pairs_are_cheaper(a, b):
        _add_by_positions(a, b, out)
    else:
        for columns in a.slices() if a.n > b.n else b.slices():
            left = a.part(columns).flatten(1)
            right = left if a is b else b.part(columns).flatten(1)
            _add_product(left, right, a is b, out)


def mirror(out: Tensor) -> None:
    """Copy what is above the diagonal of a square matrix below it."""
    for some in cuts(len(out), _stripe(out)):
        corner = out[some, some]
        corner.copy_(corner.triu() + corner.triu(1).T)
        out[some.stop :, some] = out[some, some.stop :].T


def _stripe(out: Tensor) -> int:
    return _STRIPE.get(out.device.type, _STRIPE["cpu"])


def _pieces(out: Tensor, size: tuple[int, int], symmetric: bool) -> Iterator[tuple[slice, slice]]:
    """Pieces of a matrix; of a symmetric one, those that reach the diagonal or are above it."""
    rows, columns = out.shape
    height, width = size
    for mine in cuts(rows, min(height, _stripe(out)) if symmetric else height):
        first = mine.start if symmetric else 0
        for theirs in cuts(columns - first, width):
            yield mine, slice(first + theirs.start, first + theirs.stop)


def _add_product(a: Tensor, b: Tensor, symmetric: bool, out: Tensor) -> None:
    """Add A Bᵀ."""
    left = a.to(out)
    right = left if symmetric else b.to(out)
    for mine, theirs in _pieces(out, (len(left), len(right)), symmetric):
        out[mine, theirs].addmm_(left[mine], right[theirs].T)


def _pairs_are_cheaper(a: Outer, b: Outer) -> bool:
    """Compares multiplications per pair of samples."""
    _, r, c = a.shape
    by_pairs = sum(
        left.positions * other.positions * (c + (r if isinstance(left, Dense) else 1))
        for left, _ in a.uses
        for other, _ in b.uses
    )
    building = a.positions / max(1, b.n) + b.positions / max(1, a.n)
    return by_pairs <= r * c * (1 + building)


def _add_by_positions(a: Outer, b: Outer, out: Tensor) -> None:
    side = isqrt(scratch(out) // a.shape[0])
    for left, right in a.uses:
        for other_left, other_right in b.uses:
            t, s = left.positions, other_left.positions
            for mine, theirs in _pieces(out, (side // t, side // s), a is b):
                lefts = inner(left, other_left, mine, theirs, out)  # (g, m·T, m'·T')
                rights = inner(right, other_right, mine, theirs, out)
                if len(lefts) * t * s == 1:
                    out[mine, theirs].addcmul_(lefts[0], rights[0])
                    continue
                products = (lefts * rights).sum(0)
                products = products.view(-1, t, products.shape[1]).sum(1)
                out[mine, theirs] += products.view(len(products), -1, s).sum(2)
