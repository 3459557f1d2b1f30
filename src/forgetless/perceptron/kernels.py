"""What a perceptron does on the way forward and back, for all seeds at once, in Triton.

Products are summed from three products of numbers in tf32, which loses no more than float32 does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64  # samples, which a program looks at together
_OUTPUTS = 16  # of a layer in a tile
_INNER = 64  # that are multiplied at a time
_STEPS = 2  # of that, before others do the rest
_ADDED = 256
_SIDE = 32  # of a tile of weights
_WARPS = 4
_SIDE_WARPS = 4
_SIZES = ["n", "inputs", "outputs", "p", "weight", "bias", "x_seed", "x_row"]


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    x, theta, out, n, inputs, outputs, p, weight, bias, x_seed, x_row, whole: tl.constexpr,
    relu: tl.constexpr, height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    """A tile of x Wᵀ + b, or where it is not the whole, of what some of the inputs add to x Wᵀ."""
    seed = tl.program_id(2)
    part = tl.program_id(1)
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
    if whole:
        total += tl.load(theta + bias + column, mask=column < outputs, other=0.0)[None, :]
        if relu:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = ((seed * tl.num_programs(1) + part) * n + row[:, None]) * outputs + column[None, :]
    tl.store(out + place, total, mask=(row < n)[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["size", "outputs", "p", "bias", "parts"])
def _add_up(
    found, theta, out, size, outputs, p, bias, parts, relu: tl.constexpr, width: tl.constexpr
):
    """What the parts add to x Wᵀ, plus b."""
    seed = tl.program_id(1)
    place = tl.program_id(0) * width + tl.arange(0, width)
    there = place < size
    total = tl.load(theta + seed * p + bias + place % outputs, mask=there, other=0.0)
    for part in range(parts):
        total += tl.load(found + (seed * parts + part) * size + place, mask=there, other=0.0)
    if relu:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + seed * size + place, total, mask=there)


@triton.jit(do_not_specialize=["n", "classes", "p", "bias", "label_seed", "task_seed"])
def _loss(
    z, labels, tasks, active, error, gradient, n, classes, p, bias, label_seed, task_seed,
    masked: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One seed's (softmax(z) − onehot) / n, and its sum over samples: the last bias's gradient."""
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
    right = (column[None, :] == label[:, None]).to(tl.float32)
    wrong = (powers / tl.sum(powers, 1)[:, None] - right) / n
    wrong = tl.where((row < n)[:, None], wrong, 0.0)
    tl.store(error + place, wrong, mask=there)
    tl.store(gradient + seed * p + bias + column, tl.sum(wrong, 0), mask=column < classes)


@triton.jit(do_not_specialize=["n", "inputs", "outputs", "p", "weight", "bias"])
def _backward(
    error, theta, below, out, gradient, n, inputs, outputs, p, weight, bias,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Some columns of (D W) ∘ [h > 0], and their sums: the gradient of the bias below."""
    seed = tl.program_id(1)
    column = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.arange(0, height)
    total = tl.zeros((height, width), tl.float32)
    for start in range(0, outputs, depth):
        k = start + tl.arange(0, depth)
        left = tl.load(
            error + (seed * n + row[:, None]) * outputs + k[None, :],
            mask=(row < n)[:, None] & (k < outputs)[None, :],
            other=0.0,
        )
        right = tl.load(
            theta + seed * p + weight + k[:, None] * inputs + column[None, :],
            mask=(k < outputs)[:, None] & (column < inputs)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    place = (seed * n + row[:, None]) * inputs + column[None, :]
    there = (row < n)[:, None] & (column < inputs)[None, :]
    total = tl.where(tl.load(below + place, mask=there, other=0.0) > 0, total, 0.0)
    tl.store(out + place, total, mask=there)
    tl.store(gradient + seed * p + bias + column, tl.sum(total, 0), mask=column < inputs)


@triton.jit(do_not_specialize=_SIZES)
def _weight_gradient(
    error, x, gradient, n, inputs, outputs, p, weight, x_seed, x_row,
    height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of Dᵀ h."""
    seed = tl.program_id(2)
    row = tl.program_id(1) * height + tl.arange(0, height)
    column = tl.program_id(0) * width + tl.arange(0, width)
    x += seed.to(tl.int64) * x_seed
    k = tl.arange(0, depth)
    left = tl.load(
        error + (seed * n + k[None, :]) * outputs + row[:, None],
        mask=(k < n)[None, :] & (row < outputs)[:, None],
        other=0.0,
    )
    right = tl.load(
        x + k[:, None] * x_row + column[None, :],
        mask=(k < n)[:, None] & (column < inputs)[None, :],
        other=0.0,
    )
    total = tl.dot(left, right, input_precision="tf32x3")
    place = seed * p + weight + row[:, None] * inputs + column[None, :]
    tl.store(gradient + place, total, mask=(row < outputs)[:, None] & (column < inputs)[None, :])


def forward(x: Tensor, theta: Tensor, layer: Any, *, relu: bool) -> Tensor:
    """X Wᵀ + b, or the positive part of that: (S, n, i), (S, p) → (S, n, o)."""
    seeds, n, _ = x.shape
    # Many inputs are summed in parts: one after the other they would keep few processors busy.
    steps = triton.cdiv(layer.inputs, _INNER)
    steps = steps if steps <= _STEPS else _STEPS
    parts = triton.cdiv(layer.inputs, steps * _INNER)
    found = x.new_empty(seeds, parts, n, layer.outputs)
    _forward[(triton.cdiv(layer.outputs, _OUTPUTS), parts, seeds)](
        x, theta, found, n, layer.inputs, layer.outputs, theta.shape[1], layer.weight, layer.bias,
        x.stride(0), x.stride(1), whole=parts == 1, relu=relu, height=_rounded(n),
        width=_OUTPUTS, depth=_INNER, steps=steps, num_warps=_WARPS,
    )  # fmt: skip
    if parts == 1:
        return found.squeeze(1)
    out = x.new_empty(seeds, n, layer.outputs)
    size = n * layer.outputs
    _add_up[(triton.cdiv(size, _ADDED), seeds)](
        found, theta, out, size, layer.outputs, theta.shape[1], layer.bias, parts, relu=relu,
        width=_ADDED, num_warps=4,
    )  # fmt: skip
    return out


def _rounded(size: int) -> int:
    """A size that a product can have, of which there are few: each is compiled by itself."""
    return max(32, triton.next_power_of_2(size))


def loss(
    z: Tensor, labels: Tensor, tasks: Tensor, active: Tensor | None, gradient: Tensor, layer: Any
) -> Tensor:
    """(softmax(z) − onehot) / n within each sample's outputs, (S, n, C)."""
    seeds, n, classes = z.shape
    error = torch.empty_like(z)
    _loss[(seeds,)](
        z, labels, tasks, z if active is None else active.view(torch.uint8), error, gradient,
        n, classes, gradient.shape[1], layer.bias, labels.stride(0), tasks.stride(0),
        masked=active is not None, height=_rounded(n), width=_rounded(classes), num_warps=4,
    )  # fmt: skip
    return error


def backward(
    error: Tensor, theta: Tensor, below: Tensor, gradient: Tensor, layer: Any, lower: Any
) -> Tensor:
    """(D W) ∘ [h > 0], (S, n, i); its sum over samples goes to the bias of the lower layer."""
    seeds, n, _ = error.shape
    out = torch.empty_like(below)
    _backward[(triton.cdiv(layer.inputs, _OUTPUTS), seeds)](
        error, theta, below, out, gradient, n, layer.inputs, layer.outputs, theta.shape[1],
        layer.weight, lower.bias, height=_rounded(n), width=_OUTPUTS, depth=_INNER,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


def weight_gradient(error: Tensor, x: Tensor, gradient: Tensor, layer: Any) -> None:
    """Dᵀ h, written to its place in the gradient."""
    seeds, n, _ = error.shape
    grid = triton.cdiv(layer.inputs, _SIDE), triton.cdiv(layer.outputs, _SIDE), seeds
    _weight_gradient[grid](
        error, x, gradient, n, layer.inputs, layer.outputs, gradient.shape[1], layer.weight,
        x.stride(0), x.stride(1), height=_SIDE, width=_SIDE, depth=_rounded(n),
        num_warps=_SIDE_WARPS,
    )  # fmt: skip
