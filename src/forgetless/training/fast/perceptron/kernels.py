"""What a perceptron does on the way forward and back, for all seeds at once, in Triton.

Products are summed from three products of numbers in tf32, which loses no more than float32 does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_OUTPUTS = 256  # of the last layer, at which a program looks together, as at all samples
_OUTPUTS = 16  # of a layer in a tile
_INNER = 64  # that are multiplied at a time
_STEPS = 2  # of that, before others do the rest
_ADDED = 256
_SIDE = 32  # of a tile of weights
_SIZES = ["n", "inputs", "outputs", "p", "weight", "bias", "x_seed", "x_row"]
_NORM = ["eps", "scale", "shift"]


@triton.jit
def _rate(variance, column, eps):
    """What a norm multiplies with, 1 / √(σ² + ε)."""
    return 1.0 / tl.sqrt_rn(tl.load(variance + column) + eps)


@triton.jit
def _finished(
    total, theta, normed, mean, variance, eps, scale, shift, place, column, there,
    norm: tl.constexpr, relu: tl.constexpr,
):  # fmt: skip
    """What a layer makes of x Wᵀ + b; with a norm, (x Wᵀ + b − μ) / √(σ² + ε) is kept."""
    if norm:
        total = (total - tl.load(mean + column)) * _rate(variance, column, eps)
        tl.store(normed + place, total, mask=there)
        total = total * tl.load(theta + scale + column) + tl.load(theta + shift + column)
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return total


@triton.jit(do_not_specialize=[*_SIZES, *_NORM])
def _forward(
    x, theta, out, normed, mean, variance, n, inputs, outputs, p, weight, bias, x_seed, x_row,
    eps, scale, shift, whole: tl.constexpr, norm: tl.constexpr, relu: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """A tile of x Wᵀ + b, or where it is not the whole, of what some of the inputs add to x Wᵀ."""
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
        mean += seed * outputs
        variance += seed * outputs
        total = _finished(
            total, theta, normed, mean, variance, eps, scale, shift, place, known, there, norm, relu
        )
    tl.store(out + place, total, mask=there)


@triton.jit(do_not_specialize=["size", "outputs", "p", "bias", "parts", *_NORM])
def _add_up(
    found, theta, out, normed, mean, variance, size, outputs, p, bias, parts, eps, scale,
    shift, norm: tl.constexpr, relu: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """What the parts add to x Wᵀ, plus b."""
    seed = tl.program_id(1)
    place = tl.program_id(0) * width + tl.arange(0, width)
    there = place < size
    column = place % outputs
    theta += seed * p
    total = tl.load(theta + bias + column)
    for part in range(parts):
        total += tl.load(found + (seed * parts + part) * size + place, mask=there, other=0.0)
    place += seed * size
    mean += seed * outputs
    variance += seed * outputs
    total = _finished(
        total, theta, normed, mean, variance, eps, scale, shift, place, column, there, norm, relu
    )
    tl.store(out + place, total, mask=there)


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
    error, theta, below, normed, variance, out, gradient, tile, n, inputs, outputs, below_row,
    weight, bias, eps, scale, shift, norm: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Some columns of (D W) ∘ [h > 0], and their sums: the gradient of the bias below.

    With a norm below, its γ and β get their gradients, and the bias is before it.
    """
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
    active = tl.load(below + row[:, None] * below_row + column[None, :], mask=there, other=0.0) > 0
    total = tl.where(active, total, 0.0)
    if norm:
        u = tl.load(normed + place, mask=there, other=0.0)
        tl.store(gradient + shift + column, tl.sum(total, 0), mask=column < inputs)
        tl.store(gradient + scale + column, tl.sum(total * u, 0), mask=column < inputs)
        known = tl.minimum(column, inputs - 1)
        total *= (tl.load(theta + scale + known) * _rate(variance, known, eps))[None, :]
    tl.store(out + place, total, mask=there)
    tl.store(gradient + bias + column, tl.sum(total, 0), mask=column < inputs)


@triton.jit(do_not_specialize=[*_SIZES, *_NORM])
def _backward(
    error, x, theta, normed, variance, out, gradient, n, inputs, outputs, p, weight, bias, x_seed,
    x_row, eps, scale, shift, first: tl.constexpr, norm: tl.constexpr, height: tl.constexpr,
    side: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of the weights' gradient, or some columns of the error of the layer below.

    Both need nothing of each other: one launch does them all.
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
            error, theta + seed * p, x, normed + seed * n * inputs, variance + seed * inputs,
            out + seed * n * inputs, gradient, tile - tiles, n, inputs, outputs, x_row, weight,
            bias, eps, scale, shift, norm, height, width, depth,
        )  # fmt: skip


def forward(x: Tensor, theta: Tensor, layer: Any, *, relu: bool) -> tuple[Tensor, Tensor | None]:
    """X Wᵀ + b, through the layer's norm if it has one, or its positive part.

    (S, n, i), (S, p) → (S, n, o); with a norm also what that makes of x Wᵀ + b before γ and β.
    """
    seeds, n, _ = x.shape
    # Many inputs are summed in parts: one after the other they would keep few processors busy.
    steps = min(triton.cdiv(layer.inputs, _INNER), _STEPS)
    parts, out = triton.cdiv(layer.inputs, steps * _INNER), x.new_empty(seeds, n, layer.outputs)
    found = out if parts == 1 else x.new_empty(seeds, parts, n, layer.outputs)
    normed = None if layer.norm is None else torch.empty_like(out)
    tensors, numbers = _norm_arguments(layer.norm, normed, theta)
    _forward[(triton.cdiv(layer.outputs, _OUTPUTS), parts, seeds)](
        x, theta, found, *tensors, n, layer.inputs, layer.outputs, theta.shape[1], layer.weight,
        layer.bias, x.stride(0), x.stride(1), *numbers, whole=parts == 1, norm=normed is not None,
        relu=relu, height=_rounded(n), width=_OUTPUTS, depth=_INNER, steps=steps,
    )  # fmt: skip
    if parts > 1:
        size = n * layer.outputs
        _add_up[(triton.cdiv(size, _ADDED), seeds)](
            found, theta, out, *tensors, size, layer.outputs, theta.shape[1], layer.bias, parts,
            *numbers, norm=normed is not None, relu=relu, width=_ADDED,
        )  # fmt: skip
    return out, normed


def _norm_arguments(
    norm: Any, normed: Tensor | None, theta: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[float, int, int]]:
    """What kernels need of a norm: tensors and numbers, of no meaning if there is none."""
    if norm is None or normed is None:
        return (theta, theta, theta), (0.0, 0, 0)
    return (normed, norm.mean, norm.variance), (norm.eps, norm.scale, norm.shift)


def _rounded(size: int) -> int:
    """A size that a product can have, of which there are few: each is compiled by itself."""
    return max(32, triton.next_power_of_2(size))


def loss(
    z: Tensor, labels: Tensor, tasks: Tensor, active: Tensor | None, gradient: Tensor, layer: Any
) -> Tensor:
    """(softmax(z) − onehot) / n within each sample's outputs, (S, n, C)."""
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
    error: Tensor, theta: Tensor, below: Tensor, normed: Tensor | None, gradient: Tensor,
    layer: Any, lower: Any | None,
) -> Tensor:  # fmt: skip
    """(D W) ∘ [h > 0], (S, n, i), through the lower layer's norm if it has one.

    The gradients of the layer's weights, and of the lower layer's bias and norm, go to their
    places. Without a lower layer there are only the weights, and the error stays what it is.
    """
    seeds, n, _ = error.shape
    out = error if (first := lower is None) else torch.empty_like(below)
    (normed, _, variance), numbers = _norm_arguments(lower and lower.norm, normed, theta)
    tiles = triton.cdiv(layer.inputs, _SIDE) * triton.cdiv(layer.outputs, _SIDE)
    columns = 0 if first else triton.cdiv(layer.inputs, _OUTPUTS)
    _backward[(tiles + columns, seeds)](
        error, below, theta, normed, variance, out, gradient, n, layer.inputs, layer.outputs,
        theta.shape[1], layer.weight, 0 if first else lower.bias, below.stride(0), below.stride(1),
        *numbers, first=first, norm=bool(lower and lower.norm), height=_rounded(n), side=_SIDE,
        width=_OUTPUTS, depth=_INNER,
    )  # fmt: skip
    return out
