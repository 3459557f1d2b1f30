"""What a perceptron does on the way forward and back, in PyTorch's own products.

The same functions as `kernels` has. For much work they are the faster ones: a library's products
are nearer to what a GPU can do, and how many kernels there are no longer matters.
"""

from typing import Any

import torch
from torch import Size, Tensor


def forward(x: Tensor, theta: Tensor, layer: Any, *, relu: bool) -> tuple[Tensor, Tensor | None]:
    """X Wᵀ + b, through the layer's norm if it has one, or its positive part.

    (S · K, n, i), (S, p) → (S · K, n, o) for K sets of samples a seed; with a norm also what that
    makes of x Wᵀ + b before γ and β.
    """
    weight = slot(theta, layer.weight, layer.outputs, layer.inputs)
    bias = slot(theta, layer.bias, 1, layer.outputs)
    values, normed = torch.baddbmm(bias, _of_seeds(x, theta), weight.mT), None
    if (norm := layer.norm) is not None:
        rate = _rate(norm)
        normed = torch.addcmul(-norm.mean.unsqueeze(1) * rate, values, rate)
        scale, shift = (slot(theta, at, 1, layer.outputs) for at in (norm.scale, norm.shift))
        values = torch.addcmul(shift, normed, scale)
    if relu:
        values.relu_()
    shape = *x.shape[:-1], layer.outputs
    return values.view(shape), None if normed is None else normed.view(shape)


def loss(
    z: Tensor, labels: Tensor, tasks: Tensor, active: Tensor | None, gradient: Tensor, layer: Any
) -> Tensor:
    """(softmax(z) − onehot) / n within each sample's outputs, (S · K, n, C)."""
    others = None if active is None else ~active[tasks]
    error = (z if others is None else z.masked_fill(others, -torch.inf)).softmax(-1)
    one = error.new_ones(()).expand(*labels.shape, 1)
    error.scatter_add_(-1, labels.unsqueeze(-1), -one).div_(z.shape[1])
    if others is not None:  # no gradient, not even for a label among them
        error.masked_fill_(others, 0)
    torch.sum(error, 1, out=slot(gradient, layer.bias, layer.outputs))
    return error


def backward(
    error: Tensor,
    theta: Tensor,
    below: Tensor,
    normed: Tensor | None,
    gradient: Tensor,
    layer: Any,
    lower: Any | None,
) -> Tensor:
    """The weights' gradient Dᵀ h, and the error of the layer below with its sums, if there is one.

    (S · K, n, o), (S, p), (S · K, n, i) → (S · K, n, i): (D W) ∘ [h > 0], through the norm below.
    """
    torch.bmm(error.mT, below, out=slot(gradient, layer.weight, layer.outputs, layer.inputs))
    if lower is None:
        return error
    weight = slot(theta, layer.weight, layer.outputs, layer.inputs)
    error = torch.bmm(_of_seeds(error, theta), weight).view(below.shape)
    error = torch.ops.aten.threshold_backward(error, below, 0)
    if (norm := lower.norm) is not None and normed is not None:
        torch.sum(error, 1, out=slot(gradient, norm.shift, lower.outputs))
        torch.sum(error * normed, 1, out=slot(gradient, norm.scale, lower.outputs))
        factor = slot(theta, norm.scale, 1, lower.outputs) * _rate(norm)
        error = (_of_seeds(error, theta) * factor).view(below.shape)
    torch.sum(error, 1, out=slot(gradient, lower.bias, lower.outputs))
    return error


def slot(flat: Tensor, start: int, *shape: int) -> Tensor:
    """Parameters of one shape, (S, *shape), as a view of all, (S, p)."""
    return flat[:, start : start + Size(shape).numel()].view(-1, *shape)


def _of_seeds(values: Tensor, theta: Tensor) -> Tensor:
    """Sets of samples (S · K, n, *), those of a seed one after the other: (S, K · n, *)."""
    return values.reshape(len(theta), -1, values.shape[-1])


def _rate(norm: Any) -> Tensor:
    """What a norm multiplies with, 1 / √(σ² + ε), (S, 1, o)."""
    return torch.rsqrt(norm.variance + norm.eps).unsqueeze(1)
