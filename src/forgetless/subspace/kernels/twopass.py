"""g − Vᵀ V g in two passes over rows that no chip can hold, each at the speed of memory.

Plain products would first copy rows in bfloat16 to float32, which takes ten times as long.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048  # of a row that one program looks at
_WARPS = 4


@triton.jit
def _dot_products(
    g, rows, partial, count, size, row_stride, seed_stride, parts, width: tl.constexpr
):
    """Each program: one piece of g times the same piece of every row."""
    part, seed = tl.program_id(0), tl.program_id(1)
    columns = part.to(tl.int64) * width + tl.arange(0, width)
    inside = columns < size
    x = tl.load(g + seed.to(tl.int64) * size + columns, mask=inside, other=0.0)
    row = rows + seed.to(tl.int64) * seed_stride + columns
    out = partial + seed.to(tl.int64) * count * parts + part
    for _ in range(count):
        v = tl.load(row, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, tl.sum(v * x))
        row += row_stride
        out += parts


@triton.jit
def _subtract(
    g, rows, coefficients, out, count, size, row_stride, seed_stride, width: tl.constexpr
):
    """Each program: its piece of g without what the rows have of it."""
    part, seed = tl.program_id(0), tl.program_id(1)
    columns = part.to(tl.int64) * width + tl.arange(0, width)
    inside = columns < size
    here = seed.to(tl.int64) * size + columns
    x = tl.load(g + here, mask=inside, other=0.0)
    row = rows + seed.to(tl.int64) * seed_stride + columns
    for k in range(count):
        c = tl.load(coefficients + seed * count + k)
        x -= c * tl.load(row, mask=inside, other=0.0).to(tl.float32)
        row += row_stride
    tl.store(out + here, x, mask=inside)


def project_out_in_two_passes(g: Tensor, rows: Tensor) -> Tensor:
    """g̃ = g − Vᵀ (V g), on a GPU.

    Arguments:
        g: (S, p) in float32, contiguous.
        rows: V, (S, K, p) in float32 or bfloat16, the columns next to each other.
    """
    seeds, count, size = rows.shape
    parts = triton.cdiv(size, _COLUMNS)
    partial = g.new_empty(seeds, count, parts)
    strides = rows.stride(1), rows.stride(0)
    options: dict[str, Any] = {"width": _COLUMNS, "num_warps": _WARPS}
    with torch.cuda.device(g.device):
        _dot_products[(parts, seeds)](g, rows, partial, count, size, *strides, parts, **options)
        coefficients = partial.sum(-1)
        out = torch.empty_like(g)
        _subtract[(parts, seeds)](g, rows, coefficients, out, count, size, *strides, **options)
    return out
