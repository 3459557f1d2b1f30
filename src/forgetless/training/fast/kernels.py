"""The steps of a perceptron, forward and backward, for all seeds at once, in Triton.

The same functions as `Products` has. Each product is summed from three in tf32, which loses no more
than float32 does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_OUTPUTS = 256  # of the last layer, which one program loads at once
_OUTPUTS = 16  # of a layer, in a tile
_INNER = 64  # inputs in one product
_STEPS = 2  # products that one program sums
_ADDED = 256  # numbers that one program adds up
_SIDE = 32  # of a tile of weights
_SIZES = ["n", "inputs", "outputs", "p", "weight", "bias", "x_seed", "x_row"]


@triton.jit
def _relu(value):
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    x, theta, out, n, inputs, outputs, p, weight, bias, x_seed, x_row, whole: tl.constexpr,
    relu: tl.constexpr, height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    """A tile of x Wᵀ + b, or of the partial product over some of the inputs."""
    part, seed = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, height)
    column = tl.program_id(0) * width + tl.arange(0, width)
    x += seed.to(tl.int64) * x_seed
    theta += seed * p
    total = tl.zeros((height, width), tl.float32)
    for step in range(steps):
        k = (part * steps + step) * depth + tl.arange(0, depth)
        left = tl.load(
            x + row[:, None] * x_row + k[None, :],
            mask=(row < n)[:, None] & (k < inputs)[None, :],
            other=0.0,
        )
        right = tl.load(
            theta + weight + column[None, :] * inputs + k[:, None],
            mask=(column < outputs)[None, :] & (k < inputs)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    place = ((seed * tl.num_programs(1) + part) * n + row[:, None]) * outputs + column[None, :]
    there = (row < n)[:, None] & (column < outputs)[None, :]
    if whole:
        known = tl.minimum(column, outputs - 1)[None, :]
        total += tl.load(theta + bias + known)
        if relu:
            total = _relu(total)
    tl.store(out + place, total, mask=there)


@triton.jit(do_not_specialize=["size", "outputs", "p", "bias", "parts"])
def _add_up(
    found, theta, out, size, outputs, p, bias, parts, relu: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The sum of the partial products, plus b."""
    seed = tl.program_id(1)
    place = tl.program_id(0) * width + tl.arange(0, width)
    there = place < size
    column = place % outputs
    theta += seed * p
    total = tl.load(theta + bias + column)
    for part in range(parts):
        total += tl.load(found + (seed * parts + part) * size + place, mask=there, other=0.0)
    if relu:
        total = _relu(total)
    tl.store(out + seed * size + place, total, mask=there)


@triton.jit(do_not_specialize=["n", "classes", "p", "bias", "label_seed", "task_seed"])
def _loss(
    z, labels, tasks, active, error, gradient, n, classes, p, bias, label_seed, task_seed,
    masked: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One seed's (softmax(z) − onehot) / n, and its sum over samples: the last bias's gradient.

    Outputs that are not a sample's own get none, not even if its label is among them.
    """
    seed = tl.program_id(0)
    row, column = tl.arange(0, height), tl.arange(0, width)
    there = (row < n)[:, None] & (column < classes)[None, :]
    place = (seed * n + row[:, None]) * classes + column[None, :]
    own = there
    if masked:
        task = tl.load(tasks + seed * task_seed + row, mask=row < n, other=0)
        own &= tl.load(active + task[:, None] * classes + column[None, :], mask=there, other=0) != 0
    values = tl.load(z + place, mask=own, other=float("-inf"))
    # Rows past the end have no finite value; a zero keeps them from being NaN.
    values = tl.where((row < n)[:, None], values, 0.0)
    powers = tl.exp(values - tl.max(values, 1)[:, None])
    label = tl.load(labels + seed * label_seed + row, mask=row < n, other=-1)
    right = (own & (column[None, :] == label[:, None])).to(tl.float32)
    wrong = (powers / tl.sum(powers, 1)[:, None] - right) / n
    wrong = tl.where((row < n)[:, None], wrong, 0.0)
    tl.store(error + place, wrong, mask=there)
    tl.store(gradient + seed * p + bias + column, tl.sum(wrong, 0), mask=column < classes)


@triton.jit
def _weight_tile(
    error, x, gradient, tile, across, n, inputs, outputs, x_row,
    height: tl.constexpr, side: tl.constexpr,
):  # fmt: skip
    """A tile of Dᵀ h."""
    row = tile // across * side + tl.arange(0, side)
    column = tile % across * side + tl.arange(0, side)
    k = tl.arange(0, height)
    left = tl.load(
        error + k[None, :] * outputs + row[:, None],
        mask=(k < n)[None, :] & (row < outputs)[:, None],
        other=0.0,
    )
    there = (k < n)[:, None] & (column < inputs)[None, :]
    right = tl.load(x + k[:, None] * x_row + column[None, :], mask=there, other=0.0)
    total = tl.dot(left, right, input_precision="tf32x3")
    place = row[:, None] * inputs + column[None, :]
    tl.store(gradient + place, total, mask=(row < outputs)[:, None] & (column < inputs)[None, :])


@triton.jit
def _columns_below(
    error, theta, hidden, out, gradient, tile, n, inputs, outputs, hidden_row, weight, bias,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Some columns of (D W) ∘ [h > 0], and their sums: the gradient of the bias below."""
    row, column = tl.arange(0, height), tile * width + tl.arange(0, width)
    total = tl.zeros((height, width), tl.float32)
    for start in range(0, outputs, depth):
        k = start + tl.arange(0, depth)
        left = tl.load(
            error + row[:, None] * outputs + k[None, :],
            mask=(row < n)[:, None] & (k < outputs)[None, :],
            other=0.0,
        )
        right = tl.load(
            theta + weight + k[:, None] * inputs + column[None, :],
            mask=(k < outputs)[:, None] & (column < inputs)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    place = row[:, None] * inputs + column[None, :]
    there = (row < n)[:, None] & (column < inputs)[None, :]
    values = tl.load(hidden + row[:, None] * hidden_row + column[None, :], mask=there, other=0.0)
    total = tl.where(values > 0, total, 0.0)
    tl.store(out + place, total, mask=there)
    tl.store(gradient + bias + column, tl.sum(total, 0), mask=column < inputs)


@triton.jit(do_not_specialize=_SIZES)
def _backward(
    error, x, theta, out, gradient, n, inputs, outputs, p, weight, bias, x_seed, x_row,
    first: tl.constexpr, height: tl.constexpr, side: tl.constexpr, width: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """A tile of the weights' gradient, or some columns of the error of the layer below.

    Neither needs the other: one launch does both.
    """
    tile, seed = tl.program_id(0), tl.program_id(1)
    error += seed.to(tl.int64) * n * outputs
    x += seed.to(tl.int64) * x_seed
    gradient += seed.to(tl.int64) * p
    across = tl.cdiv(inputs, side)
    tiles = across * tl.cdiv(outputs, side)
    if tile < tiles:
        _weight_tile(
            error, x, gradient + weight, tile, across, n, inputs, outputs, x_row, height, side
        )
    elif not first:
        _columns_below(
            error, theta + seed * p, x, out + seed * n * inputs, gradient, tile - tiles, n, inputs,
            outputs, x_row, weight, bias, height, width, depth,
        )  # fmt: skip


def forward(x: Tensor, theta: Tensor, layer: Any, *, relu: bool) -> Tensor:
    """x Wᵀ + b or its positive part: (S, n, i), (S, p) → (S, n, o)."""
    seeds, n, _ = x.shape
    # Many inputs are summed in parts: one sum would keep few processors busy.
    steps = min(triton.cdiv(layer.inputs, _INNER), _STEPS)
    parts, out = triton.cdiv(layer.inputs, steps * _INNER), x.new_empty(seeds, n, layer.outputs)
    found = out if parts == 1 else x.new_empty(seeds, parts, n, layer.outputs)
    _forward[(triton.cdiv(layer.outputs, _OUTPUTS), parts, seeds)](
        x, theta, found, n, layer.inputs, layer.outputs, theta.shape[1], layer.weight, layer.bias,
        x.stride(0), x.stride(1), whole=parts == 1, relu=relu, height=_rounded(n), width=_OUTPUTS,
        depth=_INNER, steps=steps,
    )  # fmt: skip
    if parts > 1:
        size = n * layer.outputs
        _add_up[(triton.cdiv(size, _ADDED), seeds)](
            found, theta, out, size, layer.outputs, theta.shape[1], layer.bias, parts, relu=relu,
            width=_ADDED,
        )  # fmt: skip
    return out


def _rounded(size: int) -> int:
    """The next size of a product; there are few, for each is compiled by itself."""
    return max(32, triton.next_power_of_2(size))


def loss(
    z: Tensor, labels: Tensor, tasks: Tensor, active: Tensor | None, gradient: Tensor, layer: Any
) -> Tensor:
    """(softmax(z) − onehot) / n among each sample's outputs, (S, n, C)."""
    seeds, n, classes = z.shape
    labels, tasks = (t if t.stride(1) == 1 else t.contiguous() for t in (labels, tasks))
    error = torch.empty_like(z)
    _loss[(seeds,)](
        z, labels, tasks, z if active is None else active.view(torch.uint8), error, gradient,
        n, classes, gradient.shape[1], layer.bias, labels.stride(0), tasks.stride(0),
        masked=active is not None, height=_rounded(n), width=_rounded(classes),
        num_warps=4 if _rounded(n) * _rounded(classes) <= 4096 else 16,
    )  # fmt: skip
    return error


def backward(
    error: Tensor, theta: Tensor, hidden: Tensor, gradient: Tensor, layer: Any, below: Any | None
) -> Tensor:
    """Stores Dᵀ h and the bias gradient of the layer below; returns that layer's error.

    (S, n, o), (S, p), (S, n, i) → (S, n, i): (D W) ∘ [h > 0].
    """
    seeds, n, _ = error.shape
    out = error if (first := below is None) else torch.empty_like(hidden)
    tiles = triton.cdiv(layer.inputs, _SIDE) * triton.cdiv(layer.outputs, _SIDE)
    columns = 0 if first else triton.cdiv(layer.inputs, _OUTPUTS)
    _backward[(tiles + columns, seeds)](
        error, hidden, theta, out, gradient, n, layer.inputs, layer.outputs, theta.shape[1],
        layer.weight, 0 if first else below.bias, hidden.stride(0), hidden.stride(1), first=first,
        height=_rounded(n), side=_SIDE, width=_OUTPUTS, depth=_INNER,
    )  # fmt: skip
    return out
